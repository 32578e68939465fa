"""The arithmetic between the GEMMs, on the registers of one thread: two key rows, 32 query columns.

No synchronisation here and no addresses. Registers of an accumulator count 8-column groups, then the two rows, then the
two neighbouring columns.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from undertow.kernels.sm100.instructions import packed
from undertow.plan.schema import DType

UNSEEN = -math.inf  # exponent of a P of zero


def column_of(register: int) -> int:
    """The query column of a register, less 2 (lane % 4)."""
    return register // 4 * 8 + register % 2


def row_of(register: int) -> int:
    """Which of the thread's key rows a register belongs to."""
    return register // 2 % 2


def probabilities(exponents: list[Float32]) -> list[Float32]:
    """P = 2^exponent. Error: ex2.approx, relative 2^-22 (PTX ISA, ex2)."""
    return [cute.math.exp2(exponent, fastmath=True) for exponent in exponents]


def bounded(exponents: list[Float32]) -> list[Float32]:
    """Exponents of at most 1, which no pair that exists reaches by more than the rounding of LSE.

    Keys that do not exist have a score of 0, and 2^-LSE may overflow: dQ would then add infinity times their K, zero.
    NaN stays NaN.
    """
    return [cute.arch.fmin(exponent, Float32(1.0), nan=True) for exponent in exponents]


def masked(exponents: list[Float32], start: int, seen: tuple[Int32 | None, Int32 | None]) -> list[Float32]:
    """-inf in the place of exponents of pairs that are not seen.

    start: their first register. seen: the first column that sees the thread's first key and one past the last, counted
    from the thread's first column; its second key, 8 further, is seen 8 columns later. None is no bound.
    """
    (first, end), out = seen, []
    for register, exponent in enumerate(exponents, start):
        column = Int32(column_of(register) - 8 * row_of(register))
        if first is not None:
            exponent = Float32(cutlass.select_(column >= first, exponent, Float32(UNSEEN)))
        if end is not None:
            exponent = Float32(cutlass.select_(column < end, exponent, Float32(UNSEEN)))
        out.append(exponent)
    return out


def packed_pairs(values: list[Float32], dtype: DType) -> list[Int32]:
    """Neighbours rounded to `dtype`, two a word, the first in the low half."""
    return [packed(values[i], values[i + 1], dtype) for i in range(0, len(values), 2)]
