"""Conversion routines that the `numpy` column of the semantics table calls."""

import numpy as np

from .rounding import f32_to_bf16, f32_to_f16, flushed, narrow, round_f32, round_f32_odd, saturated, widen

_ROUND = {"n": np.rint, "z": np.trunc, "m": np.floor, "p": np.ceil}


def convert_integer(a, d, sat: bool) -> None:
    """Integer to integer: keep the low bits, or clamp."""
    if sat:
        low, high = np.iinfo(d.dtype).min, np.iinfo(d.dtype).max
        limits = np.iinfo(np.asarray(a).dtype)
        a = np.clip(a, max(low, limits.min), min(high, limits.max))
    np.copyto(d, a, casting="unsafe")


def _value(a, kind: str, ftz: bool) -> np.ndarray:
    a = widen(np.asarray(a), kind) if kind in ("f16", "bf16") else np.asarray(a)
    return flushed(a) if ftz and kind == "f32" else a


def float_to_integer(a, d, source: str, mode: str, ftz: bool) -> None:
    """Round, clamp to the target's range, NaN to zero."""
    x = _ROUND[mode](_value(a, source, ftz).astype(np.float64))
    info = np.iinfo(d.dtype)
    x = np.where(np.isnan(x), 0.0, x)
    too_high, too_low = x >= float(info.max), x <= float(info.min)
    safe = np.where(too_high | too_low, 0.0, x)
    np.copyto(
        d, np.where(too_high, d.dtype.type(info.max), np.where(too_low, d.dtype.type(info.min), safe.astype(d.dtype)))
    )


def integer_to_float(a, d, target: str, mode: str, sat: bool) -> None:
    """Round once to the target; 64-bit sources go through extended precision, which holds them exactly."""
    a = np.clip(a, 0, 1) if sat else np.asarray(a)
    if target == "f64":
        np.copyto(d, a, casting="unsafe")
    elif target == "f32" and mode == "n":
        np.copyto(d, a.astype(np.float32))
    else:
        exact = a.astype(np.float64)
        if a.dtype.itemsize == 8:
            lost = np.sign(a.astype(np.longdouble) - exact.astype(np.longdouble)).astype(np.int64)
            bits = np.atleast_1d(exact).view(np.int64)
            step = np.where((lost != 0) & (bits & 1 == 0), lost * np.sign(np.atleast_1d(exact)).astype(np.int64), 0)
            exact = (bits + step).view(np.float64).reshape(a.shape)
        if target == "f32":
            np.copyto(d, round_f32(exact, mode))
        else:
            np.copyto(d, narrow(round_f32_odd(exact), target, mode))


def float_to_float(a, d, source: str, target: str, rnd: str | None, flags: tuple[bool, bool, bool]) -> None:
    """Round once from one float type to another; modes ending in i round to an integral value instead."""
    ftz, sat, relu = flags
    x = _value(a, source, ftz)
    mode = (rnd or "rn")[1]
    if rnd and rnd.endswith("i"):
        x, mode = _ROUND[mode](x), "n"
    elif rnd == "rna":
        mode = "a"
    if sat:
        x = saturated(x)
    if relu:
        x = np.where(x < 0, x.dtype.type(0), x)
    if target == "f64":
        np.copyto(d, x)
    elif target == "f32":
        out = round_f32(x, mode) if x.dtype == np.float64 else x
        np.copyto(d, flushed(out) if ftz else out)
    else:
        np.copyto(d, narrow(round_f32_odd(x) if x.dtype == np.float64 else x, target, mode))


def pack_bf16x2(a, b, d) -> None:
    """Round two f32 to bf16, nearest even, first source in the upper half."""
    upper, lower = _bf16_word(a), _bf16_word(b)
    np.bitwise_and(upper, np.uint32(0xFFFF0000), upper)
    np.right_shift(lower, np.uint32(16), lower)
    np.bitwise_or(upper, lower, d)


def _bf16_word(x) -> np.ndarray:
    """bf16 in the upper half of each word; the lower half is rubbish."""
    bits = np.atleast_1d(x).view(np.uint32)
    word = (bits >> np.uint32(16)) & np.uint32(1)
    word += bits
    word += np.uint32(0x7FFF)
    if np.isnan(x).any():
        word[np.isnan(np.atleast_1d(x))] = np.uint32(0x7FFF0000)
    return word


def pack_half(a, b, d, kind: str, how: tuple[str, bool, bool]) -> None:
    """Round two f32 to f16 or bf16 in any mode, first source in the upper half."""
    mode, relu, satfinite = how
    halves = []
    for x in (a, b):
        x = np.asarray(x)
        if relu:
            x = np.where(x < 0, np.float32(0), x)
        bits = (f32_to_f16 if kind == "f16" else f32_to_bf16)(x, mode).astype(np.uint32)
        if satfinite:
            largest = 0x7BFF if kind == "f16" else 0x7F7F
            infinite = (bits & 0x7FFF) == largest + 1
            bits = np.where(infinite, (bits & 0x8000) | largest, bits).astype(np.uint32)
        halves.append(bits)
    np.copyto(d, halves[0] << np.uint32(16) | halves[1])


def to_tf32(a, d, rnd: str, relu: bool, satfinite: bool) -> None:
    """Round f32 to the 10 mantissa bits of tf32; the low 13 bits become zero."""
    x = np.atleast_1d(np.where(a < 0, np.float32(0), a) if relu else np.asarray(a))
    bits = np.ascontiguousarray(x).view(np.uint32)
    if rnd == "rna":
        out = bits + np.uint32(0x1000)
    elif rnd == "rn":
        out = bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    else:
        out = bits
    out = out & np.uint32(0xFFFFE000)
    if satfinite:
        out = np.where((out & 0x7FFFFFFF) == 0x7F800000, (out & 0x80000000) | 0x7F7FE000, out)
    np.copyto(d, np.where(np.isnan(x), np.uint32(0x7FFFFFFF), out), casting="unsafe")
