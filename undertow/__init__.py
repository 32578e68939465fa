"""FlashAttention backward for Blackwell at head dim 64, and the machine that proves it without a GPU.

Importing this package loads nothing heavy: neither torch nor the kernel compiler. Ask for the room you need:
`undertow.reference` (float64 mathematics), `undertow.emulator` (runs PTX), `undertow.plan` (kernels as data),
`undertow.kernels` (the kernels), `undertow.emulated` (all of it at once: tensors in, gradients out),
`undertow.attention` (functions for PyTorch) and `undertow.integrations` (our backward pass inside torch, flash-attn-4
and Hugging Face models). What a user calls is offered here too, and loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.attention import attention_backward, explain, flash_attn_func, flash_attn_varlen_func
    from undertow.integrations.flash_attn_4 import patch_fa4, unpatch_fa4
    from undertow.integrations.sdpa import disable, enable

__version__ = "0.1.0"

_HOMES = {  # name offered here -> the module that has it, imported when the name is first asked for
    "attention_backward": "undertow.attention",
    "disable": "undertow.integrations.sdpa",
    "enable": "undertow.integrations.sdpa",
    "explain": "undertow.attention",
    "flash_attn_func": "undertow.attention",
    "flash_attn_varlen_func": "undertow.attention",
    "patch_fa4": "undertow.integrations.flash_attn_4",
    "unpatch_fa4": "undertow.integrations.flash_attn_4",
}

__all__ = [
    "attention_backward",
    "disable",
    "enable",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "patch_fa4",
    "unpatch_fa4",
]


def __getattr__(name: str) -> Any:
    if name == "integrations":  # the one room that people reach by name: undertow.integrations.transformers.register()
        return importlib.import_module("undertow.integrations")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
