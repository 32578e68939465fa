"""Floating-point routines that the `numpy` column of the semantics table calls; flags follow the destination."""

from fractions import Fraction

import numpy as np

from ..errors import UnsupportedPtx
from .rounding import add_odd, flushed, fma_f32, fma_odd, narrow, round_f32, round_f32_odd, saturated, widen

How = tuple[str, bool, bool]
"""Rounding mode (n, z, m, p), flush subnormals, saturate."""

CANONICAL_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)


def _finish(d: np.ndarray, value: np.ndarray, ftz: bool, sat: bool) -> None:
    if ftz:
        value = flushed(value)
    np.copyto(d, saturated(value) if sat else value)


def _inputs(ftz: bool, *values) -> list[np.ndarray]:
    return [flushed(np.asarray(v)) if ftz else np.asarray(v) for v in values]


def float_add32(a, b, d, how: How) -> None:
    """f32 sum in any rounding mode."""
    mode, ftz, sat = how
    a, b = _inputs(ftz, a, b)
    value = np.add(a, b) if mode == "n" else round_f32(add_odd(a.astype(np.float64), b.astype(np.float64)), mode)
    _finish(d, value, ftz, sat)


def float_sub32(a, b, d, how: How) -> None:
    """f32 difference in any rounding mode."""
    float_add32(a, np.negative(b), d, how)


def float_mul32(a, b, d, how: How) -> None:
    """f32 product in any rounding mode."""
    mode, ftz, sat = how
    a, b = _inputs(ftz, a, b)
    value = np.multiply(a, b) if mode == "n" else round_f32(np.multiply(a, b, dtype=np.float64), mode)
    _finish(d, value, ftz, sat)


def float_fma32(a, b, c, d, how: How) -> None:
    """f32 fused multiply-add in any rounding mode."""
    mode, ftz, sat = how
    if how == ("n", False, False):
        fma_f32(a, b, c, d)
        return
    a, b, c = _inputs(ftz, a, b, c)
    _finish(d, round_f32(fma_odd(a, b, c), mode), ftz, sat)


def float_div32(a, b, d, how: How) -> None:
    """f32 quotient; a float64 quotient of f32 values lies on the right side of every f32 rounding boundary."""
    mode, ftz, sat = how
    a, b = _inputs(ftz, a, b)
    value = np.divide(a, b) if mode == "n" else round_f32(np.divide(a, b, dtype=np.float64), mode)
    _finish(d, value, ftz, sat)


def _only_nearest(mode: str) -> None:
    if mode != "n":
        raise UnsupportedPtx("f64 arithmetic in a directed rounding mode")


def float_add64(a, b, d, how: How) -> None:
    """f64 sum."""
    _only_nearest(how[0])
    np.add(a, b, d)


def float_sub64(a, b, d, how: How) -> None:
    """f64 difference."""
    _only_nearest(how[0])
    np.subtract(a, b, d)


def float_mul64(a, b, d, how: How) -> None:
    """f64 product."""
    _only_nearest(how[0])
    np.multiply(a, b, d)


def float_div64(a, b, d, how: How) -> None:
    """f64 quotient."""
    _only_nearest(how[0])
    np.divide(a, b, d)


def float_fma64(a, b, c, d, how: How) -> None:
    """f64 fused multiply-add, exact through rationals: slow and right."""
    _only_nearest(how[0])
    out = np.multiply(a, b) + c
    a, b, c = (np.broadcast_to(v, out.shape) for v in (a, b, c))
    flat = out.reshape(-1)
    for i, (x, y, z) in enumerate(zip(a.ravel().tolist(), b.ravel().tolist(), c.ravel().tolist(), strict=True)):
        if np.isfinite([x, y, z]).all():
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            if exact:
                flat[i] = _to_float(exact)
    np.copyto(d, out)


def _to_float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def reciprocal(a, d, mode: str, ftz: bool) -> None:
    """1 / a, rounded once."""
    if d.dtype == np.float64:
        _only_nearest(mode)
        np.divide(1.0, a, d)
        return
    (a,) = _inputs(ftz, a)
    _finish(d, round_f32(np.divide(1.0, a, dtype=np.float64), mode), ftz, False)


def square_root(a, d, mode: str, ftz: bool) -> None:
    """Square root, rounded once."""
    if d.dtype == np.float64:
        _only_nearest(mode)
        np.sqrt(a, d)
        return
    (a,) = _inputs(ftz, a)
    _finish(d, round_f32(np.sqrt(a, dtype=np.float64), mode), ftz, False)


def _approximate(function):
    def routine(a, d, ftz: bool) -> None:
        if ftz:
            a = flushed(np.asarray(a))
        value = function(np.asarray(a, np.float64)).astype(d.dtype)
        np.copyto(d, flushed(value) if ftz else value)

    routine.__doc__ = "Float64 value of the function, rounded once; subnormals flushed if asked."
    return routine


approximate_lg2 = _approximate(np.log2)
approximate_rcp = _approximate(lambda x: 1.0 / x)
approximate_rsqrt = _approximate(lambda x: 1.0 / np.sqrt(x))
approximate_sqrt = _approximate(np.sqrt)
approximate_sin = _approximate(np.sin)
approximate_cos = _approximate(np.cos)
approximate_tanh = _approximate(np.tanh)


def approximate_ex2(a, d, ftz: bool) -> None:
    """2 to the power a: float64 exponential rounded once to f32; with ftz, results below 2^-126 are zero."""
    value = np.exp2(a, dtype=np.float64)
    if ftz:
        # a subnormal input is 2^0 = 1 with or without flushing, so only the result needs it
        np.multiply(value, value >= 2.0**-126, d, casting="unsafe")
    else:
        np.copyto(d, value, casting="unsafe")


def _extreme(plain, propagating, is_max: bool):
    """Build min or max: the number wins over NaN unless .NaN; -0 is less than +0."""

    def choose(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
        value = propagating(a, b) if nan else plain(a, b)
        both_zero = (a == 0) & (b == 0)
        negative = np.signbit(a) & np.signbit(b) if is_max else np.signbit(a) | np.signbit(b)
        zero = np.copysign(a.dtype.type(0), np.where(negative, a.dtype.type(-1), a.dtype.type(1)))
        value = np.where(both_zero, zero, value)
        if value.dtype == np.float32:
            value = np.where(np.isnan(value), CANONICAL_NAN, value)
        return value

    def routine(a, b, d, how: tuple[bool, bool, bool]) -> None:
        ftz, nan, xorsign_abs = how
        a, b = _inputs(ftz, a, b)
        if xorsign_abs:
            sign = np.where(np.signbit(a) ^ np.signbit(b), a.dtype.type(-1), a.dtype.type(1))
            np.copyto(d, np.copysign(choose(np.abs(a), np.abs(b), nan), sign))
        else:
            np.copyto(d, choose(a, b, nan))

    def three(a, b, c, d, ftz: bool, nan: bool) -> None:
        a, b, c = _inputs(ftz, a, b, c)
        np.copyto(d, choose(choose(a, b, nan), c, nan))

    def half(a, b, d, kind: str, how: tuple[bool, bool, bool]) -> None:
        ftz, nan, xorsign_abs = how
        out = np.empty(d.shape, np.float32)
        routine(_widened(a, kind, ftz), _widened(b, kind, ftz), out, (False, nan, xorsign_abs))
        np.copyto(d, narrow(out, kind))

    return routine, three, half


float_min, float_min_three, half_min = _extreme(np.fmin, np.minimum, False)
float_max, float_max_three, half_max = _extreme(np.fmax, np.maximum, True)


def test_property(a, d, test: str) -> None:
    """testp: classify."""
    smallest = np.finfo(np.asarray(a).dtype).smallest_normal
    np.copyto(
        d,
        {
            "finite": lambda: np.isfinite(a), "infinite": lambda: np.isinf(a), "number": lambda: ~np.isnan(a),
            "notanumber": lambda: np.isnan(a), "normal": lambda: np.isfinite(a) & (np.abs(a) >= smallest),
            "subnormal": lambda: (a != 0) & (np.abs(a) < smallest),
        }[test](),
    )  # fmt: skip


def _widened(bits, kind: str, ftz: bool = False) -> np.ndarray:
    value = widen(np.asarray(bits), kind)
    if ftz:
        smallest = np.float32(2.0**-14 if kind == "f16" else 2.0**-126)
        value = np.where(np.abs(value) < smallest, np.copysign(np.float32(0), value), value)
    return value


def widen_f16(bits) -> np.ndarray:
    """f16 bit patterns to f32."""
    return widen(np.asarray(bits), "f16")


def widen_bf16(bits) -> np.ndarray:
    """bf16 bit patterns to f32."""
    return widen(np.asarray(bits), "bf16")


def _finish_half(d, value: np.ndarray, kind: str, flags: tuple[bool, bool, bool]) -> None:
    ftz, sat, relu = flags
    if sat:
        value = saturated(value)
    if relu:
        value = np.where(value < 0, np.float32(0), value)
    bits = narrow(value, kind)
    if ftz:
        small = (bits & (0x7C00 if kind == "f16" else 0x7F80)) == 0
        bits = np.where(small, bits & 0x8000, bits).astype(np.uint16)
    np.copyto(d, bits)


def _half_binary(operation):
    def routine(a, b, d, kind: str, flags: tuple[bool, bool, bool]) -> None:
        ftz = flags[0]
        value = operation(_widened(a, kind, ftz).astype(np.float64), _widened(b, kind, ftz).astype(np.float64))
        _finish_half(d, round_f32_odd(value), kind, flags)

    routine.__doc__ = "Half-precision operation: exact (or rounded to odd), then rounded once."
    return routine


half_add = _half_binary(add_odd)
half_sub = _half_binary(lambda a, b: add_odd(a, -b))
half_mul = _half_binary(np.multiply)


def half_fma(a, b, c, d, kind: str, flags: tuple[bool, bool, bool]) -> None:
    """Half-precision fused multiply-add, rounded once."""
    a, b, c = (_widened(x, kind, flags[0]) for x in (a, b, c))
    value = fma_odd(a, b, c)
    _finish_half(d, round_f32_odd(value), kind, flags)


def half_neg(a, d, kind: str, ftz: bool) -> None:
    """Flip the sign."""
    np.copyto(d, (narrow(_widened(a, kind, True), kind) if ftz else np.asarray(a)) ^ np.uint16(0x8000))


def half_abs(a, d, kind: str, ftz: bool) -> None:
    """Clear the sign."""
    np.copyto(d, (narrow(_widened(a, kind, True), kind) if ftz else np.asarray(a)) & np.uint16(0x7FFF))


def half_ex2(a, d, kind: str, ftz: bool) -> None:
    """2 to the power a, rounded once from float64."""
    value = np.exp2(_widened(a, kind, ftz).astype(np.float64))
    _finish_half(d, round_f32_odd(value), kind, (ftz, False, False))


def half_tanh(a, d, kind: str, ftz: bool) -> None:
    """Hyperbolic tangent, rounded once from float64."""
    _finish_half(d, round_f32_odd(np.tanh(_widened(a, kind, ftz).astype(np.float64))), kind, (ftz, False, False))
