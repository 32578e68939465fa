"""Exact intermediate results and single roundings, on arrays.

`add_odd` and `fma_odd` give float64 results rounded to odd: enough information to round once more, in any mode, to a
type with at most 51 significant bits as if from the exact value.
"""

import numpy as np

SMALLEST_NORMAL = {np.dtype("f2"): np.float16(2.0**-14), np.dtype("f4"): np.float32(2.0**-126)}


def flushed(x: np.ndarray) -> np.ndarray:
    """Turn f32 subnormals into zeros of the same sign; f64 values stay as they are."""
    if np.asarray(x).dtype == np.float64:
        return x
    return np.where(np.abs(x) < SMALLEST_NORMAL[np.dtype("f4")], np.copysign(np.float32(0), x), x)


def saturated(x: np.ndarray) -> np.ndarray:
    """Clamp to [0, 1]; NaN and -0 become +0."""
    return np.where(x > 0, np.minimum(x, 1), x.dtype.type(0)).astype(x.dtype)


def _to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Move a rounded float64 sum one step towards its error if that makes its last bit odd."""
    bits = np.atleast_1d(total).view(np.int64)
    step = np.sign(error) * np.sign(total)
    inexact = (error > 0) | (error < 0)
    change = np.where(inexact & ((bits & 1) == 0), step, 0)
    return (bits + change.astype(np.int64)).view(np.float64).reshape(np.shape(total))


def add_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 values, rounded to odd."""
    total = a + b
    if not np.isfinite(total).all():
        return np.where(np.isfinite(total), add_odd(*(np.where(np.isfinite(total), v, 0.0) for v in (a, b))), total)
    back = total - a
    error = (a - (total - back)) + (b - back)
    return _to_odd(total, error)


def fma_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c for values whose product is exact in float64 (f32, f16, bf16 inputs), rounded to odd."""
    return add_odd(np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64))


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> None:
    """f32 fused multiply-add, nearest even.

    The float64 sum is rounded again to f32; that is wrong only where its low 29 bits are exactly one half ulp of f32
    (or where the f32 result is subnormal), and only there the slower exact sum is taken.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    halfway = (np.atleast_1d(total).view(np.int64) & 0x1FFFFFFF) == 0x10000000
    suspicious = halfway | ((np.abs(total) < 2.0**-126) & (total != 0))
    if suspicious.any():
        total = add_odd(product, np.asarray(c, np.float64))
    np.copyto(d, total, casting="unsafe")


def round_f32(x: np.ndarray, mode: str) -> np.ndarray:
    """Round float64 values (exact or rounded to odd) to f32: n nearest even, z to zero, m down, p up."""
    x = np.asarray(x, np.float64)
    near = x.astype(np.float32)
    if mode == "n":
        return near
    wide = near.astype(np.float64)
    if mode == "z":
        return np.where(np.abs(wide) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    if mode == "m":
        return np.where(wide > x, np.nextafter(near, np.float32(-np.inf)), near)
    return np.where(wide < x, np.nextafter(near, np.float32(np.inf)), near)


def round_f32_odd(x: np.ndarray) -> np.ndarray:
    """Round float64 to f32 towards zero, setting the last bit if anything was lost."""
    x = np.asarray(x, np.float64)
    cut = np.atleast_1d(round_f32(x, "z"))
    lost = (cut.astype(np.float64) != x) & np.isfinite(x)
    return (cut.view(np.uint32) | lost.astype(np.uint32)).view(np.float32).reshape(np.shape(x))


def f32_to_bf16(x: np.ndarray, mode: str = "n") -> np.ndarray:
    """Round f32 to bf16 bit patterns (uint16); NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    if mode == "n":
        out = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        negative = bits >> np.uint32(31) != 0
        away = {"z": np.zeros_like(negative), "m": negative, "p": ~negative}.get(mode)
        if mode == "a":
            out = (bits + np.uint32(0x8000)) >> np.uint32(16)
        else:
            lost = (bits & np.uint32(0xFFFF)) != 0
            finite = (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
            out = (bits >> np.uint32(16)) + (away & lost & finite)
    return np.where(np.isnan(x), 0x7FFF, out).astype(np.uint16)


def f32_to_f16(x: np.ndarray, mode: str = "n") -> np.ndarray:
    """Round f32 to f16 bit patterns (uint16); NaN becomes 0x7fff."""
    x = np.asarray(x, np.float32)
    near = x.astype(np.float16)
    wide = near.astype(np.float32)
    zero, inf = np.float16(0), np.float16(np.inf)
    if mode == "z":
        near = np.where(np.abs(wide) > np.abs(x), np.nextafter(near, zero), near)
    elif mode == "m":
        near = np.where(wide > x, np.nextafter(near, -inf), near)
    elif mode == "p":
        near = np.where(wide < x, np.nextafter(near, inf), near)
    return np.where(np.isnan(x), 0x7FFF, np.ascontiguousarray(near).view(np.uint16).reshape(x.shape)).astype(np.uint16)


def widen(bits: np.ndarray, kind: str) -> np.ndarray:
    """Turn f16 or bf16 bit patterns into f32 values."""
    bits = np.ascontiguousarray(bits)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(x: np.ndarray, kind: str, mode: str = "n") -> np.ndarray:
    """Round f32 to f16 or bf16 bit patterns."""
    return f32_to_f16(x, mode) if kind == "f16" else f32_to_bf16(x, mode)
