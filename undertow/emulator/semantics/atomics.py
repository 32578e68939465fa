"""How an atomic or a reducing copy combines the old value with the new one."""

import numpy as np

from ..numpy_backend import arithmetic

ATOMIC_TYPES = "b32 b64 u32 u64 s32 s64 f32 f64 f16 bf16 f16x2 bf16x2"
_SIMPLE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def combine(op: str, type_name: str, old: np.ndarray, new: np.ndarray, swap: np.ndarray | None = None) -> np.ndarray:
    """Combine bit patterns elementwise.

    Args: op: and or xor exch add inc dec min max cas; type_name: PTX type of the elements (x2: packed pairs);
    old, new, swap: unsigned arrays of the type's width; for cas `new` is the comparison value, `swap` the value stored.
    Returns: unsigned array. Float adds are rounded once to nearest even; f32 adds keep subnormals.
    """
    if op in _SIMPLE:
        return _SIMPLE[op](old, new)
    if op == "exch":
        return new.copy()
    if op == "cas":
        assert swap is not None
        return np.where(old == new, swap, old)
    if op == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    half = type_name.removesuffix("x2")
    if half in ("f16", "bf16"):
        a, b = (np.ascontiguousarray(x).view(np.uint16) for x in (old, new))
        out = np.empty_like(a)
        if op == "add":
            arithmetic.half_add(a, b, out, half, (False, False, False))
        else:
            function = arithmetic.half_min if op == "min" else arithmetic.half_max
            function(a, b, out, half, (False, False, False))
        return out.view(old.dtype)
    dtype = np.dtype(f"{type_name[0].replace('s', 'i').replace('b', 'u')}{old.dtype.itemsize}")
    a, b = old.view(dtype), new.view(dtype)
    if op == "add":
        with np.errstate(all="ignore"):
            return (a + b).view(old.dtype)
    return (np.fmin(a, b) if op == "min" else np.fmax(a, b)).view(old.dtype)
