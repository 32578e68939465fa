"""Every name that the `numpy` column of the semantics table may use, gathered for generated code."""

import numpy as np

from . import comparisons, conversions, floats, integers
from .floats import half_add, half_max, half_min
from .rounding import flushed, widen

UFUNCS = (
    np.add, np.subtract, np.multiply, np.divide, np.negative, np.absolute, np.minimum, np.maximum, np.bitwise_and,
    np.bitwise_or, np.bitwise_xor, np.invert, np.copysign, np.logical_and, np.logical_or, np.logical_xor,
    np.logical_not, np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal, np.copyto,
)  # fmt: skip


def names() -> dict:
    """The namespace of generated block functions: NumPy's elementwise functions and our routines."""
    space: dict = {function.__name__: function for function in UFUNCS}
    space["flushed"] = flushed
    for room in (integers, floats, comparisons, conversions):
        space.update({k: v for k, v in vars(room).items() if callable(v) and not k.startswith("_")})
    return space


__all__ = ["half_add", "half_max", "half_min", "names", "widen"]
