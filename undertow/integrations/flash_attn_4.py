"""Our backward pass inside flash-attn-4: `undertow.patch_fa4()` and `undertow.unpatch_fa4()`.

Everything that looks the function up when it calls it then runs ours: flash-attn-4's own autograd functions, and with
them the packages that call those. Whoever did `from flash_attn.cute.interface import _flash_attn_bwd` before the patch
keeps the original, so patch first.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from undertow.attention.problem import (
    AttentionInputError,
    Gradients,
    Problem,
    Settings,
    sequences_from,
    settings_from,
)
from undertow.integrations.fallback import NotOurs, by_our_kernels, fall_back

MODULE = "flash_attn.cute.interface"
FUNCTION = "_flash_attn_bwd"

# What we know how to read. An argument that is not here must have its default, or the original computes the call.
ROWS = ("q", "k", "v", "out", "dout", "lse")
SCORING = ("softmax_scale", "causal", "softcap", "window_size_left", "window_size_right", "learnable_sink", "dlse")
PACKING = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
RESULTS = ("dq", "dk", "dv")
UNDERSTOOD = frozenset((*ROWS, *SCORING, *PACKING, *RESULTS, "max_seqlen_q", "max_seqlen_k", "deterministic"))


def patch_fa4(strict: bool | None = None) -> Patch:
    """Let flash-attn-4's backward pass run our kernels; what they cannot compute goes to the original.

    strict: raise an error instead of going to the original; None is what UNDERTOW_STRICT says. The result undoes the
    patch, also as a context manager. Patching again changes `strict` only.
    Raises: ImportError without flash-attn-4; AttentionInputError for a release whose function we cannot read.
    """
    return patch(importlib.import_module(MODULE), Options(strict))


def unpatch_fa4() -> None:
    """Give flash-attn-4 its own backward pass back. Without a patch, nothing happens."""
    for applied in list(_patches):
        applied.undo()


@dataclass(frozen=True)
class Options:
    """strict: as for `patch_fa4`. backend: as for `dispatch.run_backward`."""

    strict: bool | None = None
    backend: str = "auto"


def patch(module: ModuleType, options: Options) -> Patch:
    """`patch_fa4` for any module with such a function, and with a backend.

    Raises: AttentionInputError as `patch_fa4`.
    """
    unpatch_fa4()
    applied = Patch(module, options)
    _patches.append(applied)
    return applied


class Patch:
    """A module's function replaced by one that runs ours where it can, until `undo` or the end of the `with` block."""

    def __init__(self, module: ModuleType, options: Options) -> None:
        original = getattr(module, FUNCTION)
        parameters = inspect.signature(original).parameters
        for name in (*ROWS, "softmax_scale", "causal"):
            if name not in parameters:
                raise AttentionInputError(f"{FUNCTION} has no argument {name}: this flash-attn-4 cannot be patched")
        self._module = module
        self._options = options
        self._original = original
        self._names = tuple(parameters)
        self._defaults = {name: None if x.default is x.empty else x.default for name, x in parameters.items()}
        self._replacement = self._made()
        setattr(module, FUNCTION, self._replacement)

    @property
    def active(self) -> bool:
        return self in _patches

    def undo(self) -> None:
        """Put the original back; nothing happens if it is back. Where somebody patched over us, we step aside only."""
        if self.active:
            _patches.remove(self)
            if getattr(self._module, FUNCTION) is self._replacement:
                setattr(self._module, FUNCTION, self._original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _made(self) -> Callable[..., tuple[Tensor, ...]]:
        @functools.wraps(self._original)  # with its attributes: it finds its compiled kernels in one of them
        def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            given = dict(zip(self._names, args)) | kwargs
            grads = self._ours(given) if self.active else None
            return self._original(*args, **kwargs) if grads is None else grads

        return backward

    def _ours(self, given: dict[str, Any]) -> tuple[Tensor, ...] | None:
        """What our kernels make of a call, or None if they cannot compute it."""
        try:
            grads = by_our_kernels(_problem(given, self._defaults), self._options.backend)
        except AttentionInputError as error:
            grads = NotOurs(str(error))
        if isinstance(grads, NotOurs):
            fall_back(FUNCTION, grads.reason, self._options.strict)
            return None
        return _results(grads, given)


_patches: list[Patch] = []


def _problem(given: dict[str, Any], defaults: dict[str, Any]) -> Problem:
    """The call as flash-attn-4 means it.

    Raises: AttentionInputError for what we cannot read.
    """
    for name, value in given.items():
        if name not in UNDERSTOOD and not _same(value, defaults.get(name)):
            raise AttentionInputError(f"{name} is given: must be left at its default")
    packing = {name: given.get(name) for name in PACKING}
    packed = any(x is not None for x in packing.values())
    q, k, v, out, dout, lse = (given[name] for name in ROWS)
    return Problem(
        q,
        k,
        v,
        settings=_settings(given),
        sink=given.get("learnable_sink"),
        sequences=sequences_from(**packing) if packed else None,
        out=out,
        lse=lse,
        dout=torch.zeros_like(out) if dout is None else dout,
        dlse=given.get("dlse"),
    )


def _settings(given: dict[str, Any]) -> Settings:
    """Bounds of a window are what they are, negative ones too, but two negative ones are no window."""
    left, right = given.get("window_size_left"), given.get("window_size_right")
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    settings = settings_from(
        given["q"].shape[-1],
        given.get("softmax_scale"),
        bool(given.get("causal")),
        (None, None),
        given.get("softcap"),
        bool(given.get("deterministic")),
    )
    return replace(settings, window=(left, right))


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and value == default)


def _results(grads: Gradients, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """What flash-attn-4 returns: in the tensors that the caller brought, if any, and dsink only with a sink."""
    *of_rows, dsink = grads
    results = [grad if given.get(name) is None else given[name].copy_(grad) for name, grad in zip(RESULTS, of_rows)]
    return tuple(results) if dsink is None else (*results, dsink)
