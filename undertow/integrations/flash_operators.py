"""torch's flash attention operators on our backward pass, and on flash-attn-4's forward pass where there is one.

The ring of torch's context parallelism, `varlen_attn` and scaled_dot_product_attention all end in these operators. The
LSE that they pass is trusted, because in a ring it belongs to more keys than the call holds. Gradients have the strides
that the operators' meta kernels promise, those of `empty_like`: a compiled graph relies on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undertow.attention import libraries
from undertow.attention.checks import check_max_seqlen
from undertow.attention.dispatch import run_backward
from undertow.attention.forward import run_forward
from undertow.attention.prepared import Rows, again, options_of
from undertow.attention.problem import (
    AttentionInputError,
    Gradients,
    Inputs,
    LibraryRefusal,
    Problem,
    Settings,
    settings_from,
)
from undertow.integrations.fallback import NotOurs, by_our_kernels, fall_back
from undertow.integrations.operators import Call, Kernel, Operator
from undertow.kernels.sm100.tensors import Sequences

FORWARDS = ("auto", "torch", "flash-attn-4")

ROWS = {"query", "key", "value", "is_causal", "dropout_p", "scale"}
SAVED = {"grad_out", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"}
RANDOM = {"philox_seed", "philox_offset", "rng_state", "unused"}  # read by dropout only
WINDOW = {"window_size_left", "window_size_right"}
FLAGS = {"return_debug_mask"}
VARLEN = {"cum_seq_q", "cum_seq_k", "max_q", "max_k"}

SDPA_BACKWARD = Operator("_scaled_dot_product_flash_attention_backward", ROWS | SAVED | RANDOM)
FLASH_BACKWARD = Operator("_flash_attention_backward", ROWS | SAVED | RANDOM | WINDOW)
SDPA_FORWARD = Operator("_scaled_dot_product_flash_attention", ROWS | FLAGS)
FLASH_FORWARD = Operator("_flash_attention_forward", ROWS | VARLEN | WINDOW | FLAGS)


@dataclass(frozen=True)
class Options:
    """How the operators are taken over.

    forward: who computes the forward pass; "auto" is flash-attn-4 where it is installed and able, else torch.
    strict: raise where our kernels do not compute; None: as the environment says. backend: as for `run_backward`.
    dispatch_key: the kind of tensors. On the CPU torch has no such operators, so there, for rehearsals without a GPU,
    forward may be "reference", which is float64.
    """

    forward: str = "auto"
    strict: bool | None = None
    backend: str = "auto"
    dispatch_key: str = "CUDA"

    def __post_init__(self) -> None:
        allowed = (*FORWARDS, "reference") if self.dispatch_key == "CPU" else FORWARDS
        if self.forward not in allowed:
            raise AttentionInputError(f"forward={self.forward!r}: must be one of {', '.join(allowed)}")


def kernels(options: Options) -> dict[Operator, Kernel]:
    """What takes each operator over."""
    table: dict[Operator, Kernel] = {
        SDPA_BACKWARD: lambda call: _backward(call, _sdpa_given, options),
        FLASH_BACKWARD: lambda call: _backward(call, _flash_given, options),
    }
    if options.forward != "torch":
        table[SDPA_FORWARD] = lambda call: _sdpa_forward(call, options)
        table[FLASH_FORWARD] = lambda call: _flash_forward(call, options)
    return table


class Given(NamedTuple):
    """What a backward operator is given. rows: q, k, v, out, dout, lse in our order, swapped if theirs is another."""

    rows: Rows
    swapped: bool
    sequences: Sequences | None = None


def _backward(call: Call, read: Callable[[Call], Given], options: Options) -> Sequence[Tensor]:
    """Gradients of q, k, v as the operator returns them: ours, flash-attn-4's where it made the forward, or torch's."""
    named = call.arguments
    try:
        _refuse(call)
        given = read(call)
        head_dim, scale, causal = named["query"].shape[-1], named["scale"], named["is_causal"]
        settings, told = _told(head_dim, scale, causal, _window(call), options.backend)
        more = None if given.sequences is None else (None, None, *vars(given.sequences).values())
        grads = again(told, given.rows, more) or _made(given, settings, options)
    except AttentionInputError as error:
        grads = NotOurs(str(error))
    if isinstance(grads, NotOurs):
        fall_back(str(call.operator), grads.reason, options.strict)
        return call.as_before()
    dq, dk, dv = grads[:3]
    if given.swapped:
        dq, dk, dv = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    return (
        _in_promised_strides(dq, named["query"]),
        _in_promised_strides(dk, named["key"]),
        _in_promised_strides(dv, named["value"]),
    )


def _made(given: Given, settings: Settings, options: Options) -> Gradients | NotOurs:
    q, k, v, out, dout, lse = given.rows
    problem = Problem(q, k, v, settings=settings, sequences=given.sequences, out=out, lse=lse, dout=dout)
    grads = by_our_kernels(problem, options.backend)
    if isinstance(grads, NotOurs) and grads.next_best == "flash-attn-4" and options.forward != "torch":
        return run_backward(problem, options.backend, options.strict)
    return grads


def _refuse(call: Call) -> None:
    if call["dropout_p"] != 0.0:
        raise AttentionInputError(f"dropout_p={call['dropout_p']}: must be 0")
    if call.has("return_debug_mask") and call["return_debug_mask"]:
        raise AttentionInputError("return_debug_mask=True: must be False")
    given = call.given(call.operator.foreign)
    if given:
        raise AttentionInputError(f"{given[0]} is given: must be left at its default")


def _sdpa_given(call: Call) -> Given:
    """The call with heads and rows in our order, which is the other one."""
    given = call.arguments
    if given["cum_seq_q"] is not None:
        raise AttentionInputError("cum_seq_q is given: must be None for rows of one length")
    q, k, v = given["query"].transpose(1, 2), given["key"].transpose(1, 2), given["value"].transpose(1, 2)
    out, dout = given["out"].transpose(1, 2), given["grad_out"].transpose(1, 2)
    return Given((q, k, v, out, dout, given["logsumexp"]), True)


def _flash_given(call: Call) -> Given:
    q, k, v = call["query"], call["key"], call["value"]
    sequences = _sequences(call)
    if sequences is not None and q.device.type == "cpu":
        inputs = Inputs(q, k, v, settings=_settings(call), sequences=sequences)
        check_max_seqlen(inputs, call["max_q"], call["max_k"])
    return Given((q, k, v, call["out"], call["grad_out"], call["logsumexp"]), False, sequences)


def _window(call: Call) -> tuple[int | None, int | None]:
    """The bounds, of which every negative number says that there is none."""
    if not call.has("window_size_left"):
        return None, None
    left, right = call["window_size_left"], call["window_size_right"]
    return None if left is None or left < 0 else int(left), None if right is None or right < 0 else int(right)


def _settings(call: Call) -> Settings:
    return _settings_of(call["query"].shape[-1], call["scale"], call["is_causal"], _window(call))


_settings_of = functools.lru_cache(settings_from)  # a model has few


@functools.lru_cache
def _told(head_dim: int, scale: float | None, causal: bool, window: tuple, backend: str) -> tuple[Settings, Hashable]:
    """The settings of a call, and what tells them apart."""
    settings = _settings_of(head_dim, scale, causal, window)
    return settings, options_of(settings, backend)


def _sequences(call: Call) -> Sequences | None:
    names = ("cum_seq_q", "cum_seq_k")
    missing = [name for name in names if call[name] is None]
    if len(missing) == 1:
        raise AttentionInputError(f"{missing[0]} is None: must be given beside the other")
    return None if missing else Sequences(*(call[name] for name in names))


def _in_promised_strides(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` as `empty_like(x)` lies in memory; if x is dense, that is as x does."""
    if grad.stride() == x.stride():
        return grad
    promised = torch.empty_like(x)
    return grad if grad.stride() == promised.stride() else promised.copy_(grad)


def _sdpa_forward(call: Call, options: Options) -> Sequence[Any]:
    made = _forward(call, _sdpa_inputs, options)
    if made is None:
        return call.as_before()
    out, lse = made
    seed, offset, debug_mask = _without_dropout(out)
    return out, lse, None, None, out.shape[2], call["key"].shape[2], seed, offset, debug_mask


def _flash_forward(call: Call, options: Options) -> Sequence[Any]:
    made = _forward(call, _flash_inputs, options)
    return call.as_before() if made is None else (*made, *_without_dropout(made[0]))


def _sdpa_inputs(call: Call) -> tuple[Inputs, bool]:
    """The call with heads and rows in our order, which is the other one."""
    q, k, v = (call[name].transpose(1, 2) for name in ("query", "key", "value"))
    return Inputs(q, k, v, settings=_settings(call)), True


def _flash_inputs(call: Call) -> tuple[Inputs, bool]:
    q, k, v = (call[name] for name in ("query", "key", "value"))
    return Inputs(q, k, v, settings=_settings(call), sequences=_sequences(call)), False


def _forward(call: Call, read: Callable[[Call], tuple[Inputs, bool]], options: Options) -> tuple[Tensor, Tensor] | None:
    """out, which lies as the query does, and LSE; None: the kernel from before is to compute them."""
    try:
        _refuse(call)
        inputs, swapped = read(call)
        reason = libraries.outside_flash_attn_4(inputs) if options.forward != "reference" else None
        if reason is None:
            out = torch.empty_like(call["query"])
            rows = out.transpose(1, 2) if swapped else out
            return out, (_reference if options.forward == "reference" else _flash_attn_4)(call, inputs, rows)
    except (AttentionInputError, LibraryRefusal) as error:
        reason = str(error)
    if options.forward != "auto":
        fall_back(str(call.operator), reason, options.strict)
    return None


def _reference(call: Call, inputs: Inputs, out: Tensor) -> Tensor:
    forward = run_forward(inputs)
    out.copy_(forward.out)
    return forward.lse


def _flash_attn_4(call: Call, inputs: Inputs, out: Tensor) -> Tensor:
    """LSE, once flash-attn-4 has written `out`. Rows that no sequence has, it does not write; they are zeros then."""
    module = libraries.flash_attn_4_module()
    assert isinstance(module, ModuleType)
    q, k, v, written = (libraries.readable(x) for x in (inputs.q, inputs.k, inputs.v, out))
    options = libraries.options_of(inputs)
    if inputs.sequences is not None:
        options |= {f"max_seqlen_{side}": int(call[f"max_{side}"]) for side in ("q", "k")}
    with libraries.asked("flash-attn-4", q):
        results = module._flash_attn_fwd(q, k, v, **options, return_lse=True, out=written)
    lse = results[1].contiguous()  # what follows differs from release to release
    if written is not out:
        out.copy_(written)
    if inputs.sequences is not None:
        unused = libraries.unused_rows(inputs.sequences.cu_seqlens_q, None, out.shape[0])
        out.masked_fill_(unused[:, None, None], 0.0)
        lse.masked_fill_(unused, -torch.inf)
    return lse


def _without_dropout(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Random state that nobody reads, and an empty mask of what was dropped."""
    seed = torch.zeros(2, dtype=torch.uint64, device=like.device)
    offset = torch.zeros((), dtype=torch.uint64, device=like.device)
    return seed, offset, like.new_empty(0)
