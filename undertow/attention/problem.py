"""One attention call as data: normalised from the public spellings, refused by name before anything runs.

Rows are (batch, seqlen, heads, head_dim), or packed (rows, heads, head_dim) with `Sequences`; LSE is (batch, heads,
seqlen_q), packed (heads, rows), in natural logarithm. Any strides are read as they are.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.tensors import ALIGNMENT, Sequences

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DEVICES = ("cpu", "cuda")
UNBOUNDED = -1  # how flash-attn spells "no bound"


def misalignment(x: Tensor) -> int:
    """Bytes by which `x` begins behind a multiple of ALIGNMENT; 0 of a tensor that has no memory, as in a trace."""
    try:
        return x.data_ptr() % ALIGNMENT
    except RuntimeError:
        return 0


def facts(x: Tensor | None) -> tuple[Any, ...] | None:
    """What a plan depends on of one tensor."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, misalignment(x))


def is_determinism_enforced() -> bool:
    """Whether torch's own kernels are deterministic, or raise: a warning alone does not make them so."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


class AttentionInputError(ValueError):
    """An argument of a call that describes no attention; the message names it, its value and what is allowed."""


class BackendError(ValueError):
    """No backend that was asked for can compute the call; the message says why, for each of them."""


class LibraryRefusal(BackendError):
    """A library that was expected to compute a call refuses it, or its own code is refused, before any launch."""


class Gradients(NamedTuple):
    """Gradients in the shapes, dtypes and (made dense) strides of q, k, v; dsink like the sink, None without one."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None


@dataclass(frozen=True)
class Inputs:
    """What a forward pass reads.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads and head
    h reads kv head h // (heads / kv_heads). Packed sequences have no batch dimension.
    sink: (heads), any floating dtype, a score without a key. settings: scale, mask, cap; `settings_from` makes them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    _: KW_ONLY
    settings: Settings
    sink: Tensor | None = None
    sequences: Sequences | None = None

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-3], self.q.shape[-2], self.q.shape[-3])

    @property
    def is_empty(self) -> bool:
        """Whether there is no query row or no key, so that nothing is seen by anybody."""
        return self.q.numel() == 0 or self.k.numel() == 0

    def signature(self) -> tuple[Any, ...]:
        """Everything that decides who computes the call and how, as numbers, strings and types: no tensor is kept.

        The contents of no tensor take part, so equal signatures are found without waiting for the device.
        """
        packing = None if self.sequences is None else tuple(map(facts, vars(self.sequences).values()))
        return (
            self.settings,
            facts(self.q),
            facts(self.k),
            facts(self.v),
            facts(self.sink),
            packing,
        )


@dataclass(frozen=True)
class Problem(Inputs):
    """One backward call: what the forward read and stored, and the gradients of its results.

    out, dout: like q. lse: (batch, heads, seqlen_q) float32 (float64 beside float64 rows), natural logarithm, -inf
    where a row sees nothing; it is trusted, not computed again, so it may belong to more keys than k holds. dlse: like
    lse, or None.
    """

    _: KW_ONLY
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None

    def signature(self) -> tuple[Any, ...]:
        """As of `Inputs`, with what the forward pass stored, the gradients of its results, and what torch enforces."""
        given = (facts(self.out), facts(self.lse), facts(self.dout), facts(self.dlse))
        return (*super().signature(), *given, self.settings.deterministic and is_determinism_enforced())

    def honouring_torch(self) -> Problem:
        """The same, deterministic if `torch.use_deterministic_algorithms` asks for it."""
        if self.settings.deterministic or not torch.are_deterministic_algorithms_enabled():
            return self
        return replace(self, settings=replace(self.settings, deterministic=True))


def settings_from(
    head_dim: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    deterministic: bool = False,
) -> Settings:
    """Settings from the spellings of flash-attn.

    softmax_scale: None is 1 / sqrt(head_dim). window_size: (left, right), inclusive; None and -1 are no bound, every
    other integer is a number. softcap: None and 0 are no cap.
    Raises: AttentionInputError.
    """
    for name, value in (("causal", causal), ("deterministic", deterministic)):
        if not isinstance(value, bool):
            raise AttentionInputError(f"{name}={value!r}: must be True or False")
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5 if head_dim else 1.0
    return Settings(
        _number("softmax_scale", softmax_scale), causal, _window(window_size), _softcap(softcap), deterministic
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.SymFloat | torch.SymInt):
        value = float(value)  # a number that was left open by a tracer is fixed
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AttentionInputError(f"{name}={value!r}: must be a number")
    if not math.isfinite(value):
        raise AttentionInputError(f"{name}={value}: must be finite")
    return float(value)


def _softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    cap = _number("softcap", softcap)
    if cap < 0:
        raise AttentionInputError(f"softcap={softcap}: must be positive, or 0 or None for no cap")
    return cap or None


def _window(window_size: Any) -> tuple[int | None, int | None]:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise AttentionInputError(f"window_size={window_size!r}: must be (left, right)")
    window_size = [int(bound) if isinstance(bound, torch.SymInt) else bound for bound in window_size]
    for side, bound in zip(("left", "right"), window_size):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise AttentionInputError(f"window_size: {side}={bound!r}: must be an integer or None")
    left, right = (None if bound == UNBOUNDED else bound for bound in window_size)
    return left, right


def require_tensors(**given: object) -> None:
    """Raises: AttentionInputError naming the first that is no tensor."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise AttentionInputError(f"{name} is a {type(x).__name__}: must be a tensor")


def sequences_from(**given: Tensor | None) -> Sequences:
    """Packed sequences from cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k.

    Raises: AttentionInputError if cu_seqlens are missing.
    """
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if not isinstance(given.get(name), Tensor):
            raise AttentionInputError(
                f"{name}={given.get(name)!r}: must be a tensor of (sequences + 1) int32; lengths of a padded batch "
                "become packed sequences by cu_seqlens that are multiples of the padded length, and seqused"
            )
    return Sequences(**given)  # pyright: ignore[reportArgumentType]
