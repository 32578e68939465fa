"""Our backward pass inside torch: `undertow.enable()` and `undertow.disable()`.

`scaled_dot_product_attention`, `torch.nn.attention.varlen.varlen_attn`, nested tensors and context parallelism use it
from then on. It is a flash attention implementation in the sense of torch, registered under the name "UNDERTOW" when
this module is imported, and active only once somebody asks for it.

torch warns once that an operator is overridden; that is what happens. The state is one for the whole process, as torch
keeps it. Not reached: programs that AOTInductor compiled, which call the operators without torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import (
    SDPBackend,
    _cur_sdpa_kernel_backends,
    _registry,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from undertow.attention.problem import AttentionInputError
from undertow.integrations.flash_operators import Options, kernels
from undertow.integrations.operators import Overrides

IMPLEMENTATION = "UNDERTOW"

Register = Callable[[], Any]

_enabled: list[Enabled] = []  # the last one first to go


def enable(
    prefer_flash: bool = True,
    replace: tuple[str, ...] = (),
    forward: str = "auto",
    strict: bool | None = None,
) -> Enabled:
    """Let torch's flash attention use our backward pass, until the result's `disable()` or the end of its `with` block.

    prefer_flash: let scaled_dot_product_attention try flash attention first. Without it, on H100, H200 and B200 torch
    takes cuDNN for most calls, and nothing of ours runs. This holds for all calls of the process, also those of other
    head dims, which then run flash attention as it was before, or flash-attn-4's if it makes the forward.
    replace: names that stand for us as well, for frameworks that activate an implementation themselves: ("FA4", "FA3").
    forward: who computes the forward pass, as we have none: "flash-attn-4", "torch" (its own flash kernel), or "auto",
    which is flash-attn-4 where it is installed and able, and torch elsewhere.
    strict: raise an error where our kernels cannot compute a backward pass, instead of computing it as before with one
    line in the log; None is what UNDERTOW_STRICT says.
    Raises: AttentionInputError for an unknown `forward`, or a name in `replace` that torch does not know.
    """
    return enable_with(Options(forward=forward, strict=strict), prefer_flash, replace)


def disable() -> None:
    """Undo every `enable` that is still in force. Without one, nothing happens."""
    if _enabled:
        _enabled[0].disable()


def enable_with(options: Options, prefer_flash: bool = True, replace: tuple[str, ...] = ()) -> Enabled:
    """`enable` with options that only tests need.

    Raises: AttentionInputError as `enable`.
    """
    known = list_flash_attention_impls()
    for name in replace:
        if name not in known:
            raise AttentionInputError(f"replace={replace!r}: {name!r} is none of {', '.join(known)}")
    before = Before(current_flash_attention_impl(), {name: _registered(name) for name in (IMPLEMENTATION, *replace)})
    for name in before.registered:
        register_flash_attention_impl(name, register_fn=partial(_activate, options))
    enabled = Enabled(before, prefer_flash)
    try:
        activate_flash_attention_impl(IMPLEMENTATION)
    except BaseException:
        before.restore()
        raise
    _enabled.append(enabled)
    enabled.prefer()
    if prefer_flash and torch.cuda.is_available():
        torch.cuda._lazy_call(_settle)  # now, or as soon as this process uses a GPU
    return enabled


def _settle() -> None:
    """Let torch put its own order of backends into force, and prefer flash attention again.

    torch does so once a process, at its first choice on a GPU, whatever order was set before: on H100 and later that
    puts cuDNN first. As it is the order from before, it is also the one that comes back in the end.
    """
    for enabled in reversed(_enabled):
        enabled.prefer_no_more()
    _make_torch_choose()
    for enabled in _enabled:
        enabled.prefer()


def _make_torch_choose() -> None:
    x = torch.empty((1, 1, 1, 64), dtype=torch.bfloat16, device="cuda")
    torch.ops.aten._fused_sdp_choice(x, x, x)


@dataclass(frozen=True)
class Before:
    """What torch's registry held: the active implementation, and who stood for the names that we take."""

    active: str | None
    registered: dict[str, Register]

    def restore(self) -> None:
        for name, register in self.registered.items():
            register_flash_attention_impl(name, register_fn=register)
        if self.active is not None:
            activate_flash_attention_impl(self.active)


class Enabled:
    """One `enable` in force. As a context manager it ends with the block; what was active before is active again."""

    def __init__(self, before: Before, prefers_flash: bool) -> None:
        self._before = before
        self._prefers_flash = prefers_flash
        self._priority = ExitStack()

    def prefer(self) -> None:
        """Put flash attention first, if that is asked for."""
        if self._prefers_flash:
            self._priority.enter_context(sdpa_kernel(_flash_first(), set_priority=True))

    def prefer_no_more(self) -> None:
        """Put the order from before back."""
        self._priority.close()

    @property
    def active(self) -> bool:
        """Whether this call of `enable` is still in force."""
        return self in _enabled

    def disable(self) -> None:
        """Undo this call of `enable`, and those after it. Once it is undone, nothing happens.

        An implementation that somebody else activated in the meantime stays.
        """
        while self in _enabled:
            _enabled.pop()._undo()

    def _undo(self) -> None:
        self.prefer_no_more()
        if _is_ours_active():
            restore_flash_attention_impl()
            self._before.restore()
        else:
            Before(None, self._before.registered).restore()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()


def _activate(options: Options) -> Overrides:
    """What torch calls to activate an implementation. The result takes the operators over until it is removed."""
    overrides = Overrides(options.dispatch_key, kernels(options))
    _live.append(overrides)
    return overrides


_live: list[Overrides] = []


def _is_ours_active() -> bool:
    _live[:] = [overrides for overrides in _live if overrides.active]
    return bool(_live)


def _registered(name: str) -> Register:
    # torch has no public way to ask who stands for a name
    return _registry._FLASH_ATTENTION_IMPLS[name]


def _flash_first() -> list[SDPBackend]:
    """Backends of scaled_dot_product_attention in the order to try them. Another that is switched off stays so."""
    others = _cur_sdpa_kernel_backends(with_priority=True)
    return [SDPBackend.FLASH_ATTENTION, *(backend for backend in others if backend != SDPBackend.FLASH_ATTENTION)]


register_flash_attention_impl(IMPLEMENTATION, register_fn=partial(_activate, Options()))
