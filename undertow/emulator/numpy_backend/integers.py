"""Integer routines that the `numpy` column of the semantics table calls; the destination comes last."""

from typing import Any

import numpy as np

FULL = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: 0xFFFFFFFFFFFFFFFF}


def _unsigned(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def _store(d: np.ndarray, value) -> None:
    np.copyto(d, value, casting="unsafe")


def add_sat(a, b, d) -> None:
    """Sum clamped to s32."""
    _store(d, np.clip(np.add(a, b, dtype=np.int64), -(2**31), 2**31 - 1))


def sub_sat(a, b, d) -> None:
    """Difference clamped to s32."""
    _store(d, np.clip(np.subtract(a, b, dtype=np.int64), -(2**31), 2**31 - 1))


def _high_unsigned(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper 64 bits of unsigned 64-bit products, from 32-bit halves."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (other >> half)


def high_product(a, b) -> np.ndarray:
    """Upper half of the products, in the type of the operands."""
    a, b = np.asarray(a), np.asarray(b)
    size = a.dtype.itemsize
    if size < 8:
        wide = a.dtype.kind + str(2 * size)
        return (np.multiply(a, b, dtype=wide) >> (8 * size)).astype(a.dtype)
    high = _high_unsigned(_unsigned(a), _unsigned(b))
    if a.dtype.kind == "u":
        return high
    high = high - np.where(a < 0, _unsigned(b), np.uint64(0)) - np.where(b < 0, _unsigned(a), np.uint64(0))
    return high.view(np.int64)


def mul_hi(a, b, d) -> None:
    """Upper half of the product."""
    _store(d, high_product(a, b))


def mul_wide(a, b, d) -> None:
    """Product in twice the width."""
    np.multiply(a, b, d, dtype=d.dtype, casting="unsafe")


def mad_wide(a, b, c, d) -> None:
    """Product in twice the width, plus c."""
    _store(d, np.multiply(a, b, dtype=d.dtype, casting="unsafe") + c)


def mad_lo(a, b, c, d) -> None:
    """Lower half of the product, plus c."""
    np.add(np.multiply(a, b), c, d)


def mad_hi(a, b, c, d) -> None:
    """Upper half of the product, plus c."""
    _store(d, high_product(a, b) + c)


def _low_24(x) -> np.ndarray:
    x = np.asarray(x)
    return x & x.dtype.type(0xFFFFFF) if x.dtype.kind == "u" else (x << x.dtype.type(8)) >> x.dtype.type(8)


def mul24_lo(a, b, d) -> None:
    """Lower half of the product of 24-bit values."""
    _store(d, _low_24(a) * _low_24(b))


def mad24_lo(a, b, c, d) -> None:
    """Lower half of the product of 24-bit values, plus c."""
    _store(d, _low_24(a) * _low_24(b) + c)


def sad(a, b, c, d) -> None:
    """c plus the distance of a and b."""
    _store(d, np.where(np.less(a, b), np.subtract(b, a), np.subtract(a, b)) + c)


def int_div(a, b, d) -> None:
    """Quotient rounded to zero; all bits set where the divisor is zero."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = np.floor_divide(a, safe)
    if a.dtype.kind == "i":
        quotient = quotient + (((a < 0) != (safe < 0)) & (quotient * safe != a))
        quotient = np.where(safe == -1, np.negative(a), quotient)
    _store(
        d, np.where(b == 0, _unsigned(np.array(FULL[a.dtype.itemsize], f"u{a.dtype.itemsize}")).view(a.dtype), quotient)
    )


def int_rem(a, b, d) -> None:
    """Remainder with the sign of the dividend; the dividend where the divisor is zero."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "i":
        safe = np.where(safe == -1, b.dtype.type(1), safe)
    _store(d, np.where(b == 0, a, np.fmod(a, safe)))


def min_relu(a, b, d) -> None:
    """Minimum, at least 0."""
    np.maximum(np.minimum(a, b), 0, out=d)


def max_relu(a, b, d) -> None:
    """Maximum, at least 0."""
    np.maximum(np.maximum(a, b), 0, out=d)


def popc(a, d) -> None:
    """Count ones."""
    _store(d, np.bitwise_count(a))


def _leading_zeros(a) -> np.ndarray:
    """Count zeros above the highest set bit, by binary search."""
    a = np.array(_unsigned(a), copy=True)
    bits = 8 * a.dtype.itemsize
    count = np.zeros(a.shape, np.uint32)
    step = bits // 2
    while step:
        empty = a >> a.dtype.type(bits - step) == 0
        count[...] = count + np.where(empty, step, 0)
        a = np.where(empty, a << a.dtype.type(step), a)
        step //= 2
    return count + (a >> a.dtype.type(bits - 1) == 0)


def clz(a, d) -> None:
    """Count zeros above the highest one."""
    _store(d, _leading_zeros(a))


def bfind(a, d, shift_amount: bool) -> None:
    """Position of the highest bit that differs from the sign; 0xffffffff if there is none."""
    a = np.asarray(a)
    value = _unsigned(np.where(a < 0, ~a, a)) if a.dtype.kind == "i" else a
    zeros = _leading_zeros(value)
    bits = 8 * a.dtype.itemsize
    _store(d, np.where(value == 0, np.uint32(0xFFFFFFFF), zeros if shift_amount else np.uint32(bits - 1) - zeros))


def brev(a, d) -> None:
    """Reverse the bits."""
    a = np.atleast_1d(np.asarray(a))
    table = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)
    raw = table[np.ascontiguousarray(a).view(np.uint8)].reshape(*a.shape, a.dtype.itemsize)[..., ::-1]
    _store(d, np.ascontiguousarray(raw).view(a.dtype).reshape(a.shape))


def _masks(length: np.ndarray, bits: int) -> np.ndarray:
    """`length` ones, all of them from `bits` on."""
    dtype = np.dtype(f"u{bits // 8}")
    full = dtype.type(FULL[bits // 8])
    short = np.minimum(length, bits - 1).astype(dtype)
    return np.where(length >= bits, full, (dtype.type(1) << short) - dtype.type(1))


def bfe(a, b, c, d) -> None:
    """Bit field extract: see the row for what lies past the end."""
    a = np.asarray(a)
    bits = 8 * a.dtype.itemsize
    value = _unsigned(a)
    position, length = (np.asarray(x, np.int64) & 0xFF for x in (b, c))
    shifted = np.where(position < bits, value >> np.minimum(position, bits - 1).astype(value.dtype), 0)
    mask = _masks(length, bits)
    result = shifted & mask
    if a.dtype.kind == "i":
        last = np.minimum(position + length - 1, bits - 1)
        sign = (length > 0) & ((value >> np.maximum(last, 0).astype(value.dtype)) & value.dtype.type(1) == 1)
        available = _masks(np.clip(bits - position, 0, bits), bits)
        result = np.where(sign, (result & available) | ~(mask & available), result)
    _store(d, np.asarray(result, value.dtype).view(d.dtype) if d.dtype.itemsize == value.itemsize else result)


def bfi(a, b, p, c, d) -> None:
    """Insert the low `c` bits of a into b at bit p."""
    a, b = np.asarray(a), np.asarray(b)
    bits = 8 * a.dtype.itemsize
    position, length = (np.asarray(x, np.int64) & 0xFF for x in (p, c))
    shift = np.minimum(position, bits - 1).astype(a.dtype)
    inside = position < bits
    mask = np.where(inside, _masks(length, bits) << shift, a.dtype.type(0))
    _store(d, (b & ~mask) | (np.where(inside, a << shift, a.dtype.type(0)) & mask))


def dp4a(a, b, c, d, a_type: str, b_type: str) -> None:
    """c plus the dot product of four signed or unsigned bytes."""
    total = np.asarray(c, np.int64)
    for shift in range(0, 32, 8):
        parts = []
        for value, kind in ((a, a_type), (b, b_type)):
            byte = (np.asarray(value) >> np.uint32(shift)).astype(np.uint8)
            parts.append(byte.view(np.int8).astype(np.int64) if kind == "s32" else byte.astype(np.int64))
        total = total + parts[0] * parts[1]
    _store(d, total)


def _carry_sum(terms: list[np.ndarray], bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum of unsigned values and whether it passed the width."""
    total, carry = terms[0], np.zeros(np.shape(terms[0]), bool)
    for term in terms[1:]:
        following = total + term
        carry = carry | (following < total)
        total = following
    return total, carry


def add_carry(a, b, carry_in, carry_out, d) -> None:
    """Add with optional carry in (array) and out (array written)."""
    terms = [_unsigned(a), _unsigned(b)]
    if carry_in is not None:
        terms.append(carry_in.astype(terms[0].dtype))
    total, carry = _carry_sum(terms, 8 * terms[0].itemsize)
    if carry_out is not None:
        carry_out[...] = carry
    _store(d, total.view(d.dtype))


def sub_borrow(a, b, borrow_in, borrow_out, d) -> None:
    """Subtract with optional borrow in and out."""
    a, b = _unsigned(a), _unsigned(b)
    first = a - b
    borrow = a < b
    if borrow_in is not None:
        taken = borrow_in.astype(a.dtype)
        second = first - taken
        borrow = borrow | (first < taken)
        first = second
    if borrow_out is not None:
        borrow_out[...] = borrow
    _store(d, first.view(d.dtype))


def mad_carry(a, b, c, half: str, carries: tuple[Any, Any], d) -> None:
    """Multiply, take one half of the product, add c with carry."""
    product = np.multiply(_unsigned(a), _unsigned(b)) if half == "lo" else _unsigned(high_product(a, b))
    add_carry(product, c, *carries, d)


def shl(a, b, d) -> None:
    """Shift left; amounts past the width give zero."""
    bits = 8 * d.dtype.itemsize
    if np.ndim(b) == 0 and b < bits:
        np.left_shift(a, d.dtype.type(b), d)
        return
    amount = np.minimum(b, bits - 1).astype(d.dtype)
    _store(d, np.where(np.less(b, bits), np.left_shift(a, amount), d.dtype.type(0)))


def shr(a, b, d) -> None:
    """Shift right; amounts past the width give zero, or the sign for signed types."""
    bits = 8 * d.dtype.itemsize
    if np.ndim(b) == 0 and b < bits:
        np.right_shift(a, d.dtype.type(b), d)
        return
    amount = np.minimum(b, bits - 1).astype(d.dtype)
    shifted = np.right_shift(a, amount)
    _store(d, shifted if d.dtype.kind == "i" else np.where(np.less(b, bits), shifted, d.dtype.type(0)))


def shf(a, b, c, d, direction: str, mode: str) -> None:
    """Funnel shift of the 64-bit value b:a."""
    amount = np.asarray(c) & np.uint32(31) if mode == "wrap" else np.minimum(c, np.uint32(32))
    amount = amount.astype(np.uint64)
    value = np.asarray(b).astype(np.uint64) << np.uint64(32) | a
    _store(d, (value << amount) >> np.uint64(32) if direction == "l" else value >> amount)


def lop3(a, b, c, lut, d) -> None:
    """Bitwise function of three inputs by truth table."""
    table = int(np.asarray(lut).flat[0])
    a, b, c = np.asarray(a), np.asarray(b), np.asarray(c)
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    _store(d, result)


_PRMT_MODES = {
    "f4e": [0x3210, 0x4321, 0x5432, 0x6543],
    "b4e": [0x5670, 0x6701, 0x7012, 0x0123],
    "rc8": [0x0000, 0x1111, 0x2222, 0x3333],
    "ecl": [0x3210, 0x3211, 0x3222, 0x3333],
    "ecr": [0x0000, 0x1110, 0x2210, 0x3210],
    "rc16": [0x1010, 0x3232, 0x1010, 0x3232],
}


def prmt(a, b, c, d, mode: str | None) -> None:
    """Pick four of the eight bytes of b:a; bit 3 of a selector repeats the byte's sign."""
    both = np.asarray(b).astype(np.uint64) << np.uint64(32) | a
    select = np.asarray(c).astype(np.uint32)
    if mode:
        select = np.array(_PRMT_MODES[mode], np.uint32)[select & 3]
    result = np.uint32(0)
    for i in range(4):
        nibble = select >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result = result | np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    _store(d, result)


def select(a, b, c, d) -> None:
    """Choose a where c is true."""
    np.copyto(d, np.where(c, a, b))
