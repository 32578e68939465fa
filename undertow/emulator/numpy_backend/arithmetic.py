"""Every name that the `numpy` column of the semantics table may use, gathered for generated code."""

import numpy as np

from . import comparisons, conversions, floats, integers
from .floats import half_add, half_max, half_min
from .rounding import flushed, widen

UFUNCS = (
    "add subtract multiply divide negative absolute minimum maximum bitwise_and bitwise_or bitwise_xor invert copysign"
    " logical_and logical_or logical_xor logical_not equal not_equal less less_equal greater greater_equal copyto"
).split()


def names() -> dict:
    """The namespace of generated block functions: NumPy's elementwise functions and our routines."""
    space: dict = {name: getattr(np, name) for name in UFUNCS}
    space["flushed"] = flushed
    for room in (integers, floats, comparisons, conversions):
        space.update({k: v for k, v in vars(room).items() if callable(v) and not k.startswith("_")})
    return space


__all__ = ["half_add", "half_max", "half_min", "names", "widen"]
