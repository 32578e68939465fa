"""undertow inside what people already run: torch's attention, flash-attn-4's backward, Hugging Face models.

Importing a module of this room activates nothing; each has a call that does, and one that undoes it. What the kernels
do not support goes to whoever computed it before, is logged once, and raises in strict mode.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = ("flash_attn_4", "sdpa", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
