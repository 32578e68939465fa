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
from undertow.kernels.sm90.instructions import multiply_add
from undertow.plan.schema import DType

LOG2_E = math.log2(math.e)
ROWS = 2  # key rows of a thread: r and r + 8


def column_of(register: int) -> int:
    """The query column of a register, less 2 (lane % 4)."""
    return register // 4 * 8 + register % 2


def row_of(register: int) -> int:
    """Which of the thread's key rows a register belongs to."""
    return register // 2 % 2


def statistic_of(register: int) -> int:
    """Which of a thread's 32 values of LSE or D belongs to a register."""
    return register // 4 * 2 + register % 2


def probabilities(scores: list[Float32], lse_log2: list[Float32], scale_log2: Float32) -> list[Float32]:
    """P = 2^(S * scale_log2 - LSE_log2). LSE_log2 = +inf, as in padding rows, gives 0. Error: PTX ISA, ex2.approx."""
    return [
        cute.math.exp2(multiply_add(score, scale_log2, -lse), fastmath=True)
        for score, lse in zip(scores, lse_log2)
    ]


def masked(p: list[Float32], columns: list[int], rows: list[int], seen: list[tuple[Int32, Int32]]) -> list[Float32]:
    """P with zeros where the key is not seen. seen: first column and one past the last, for each of the key rows."""
    out = []
    for value, column, row in zip(p, columns, rows):
        first, end = seen[row]
        kept = (Int32(column) >= first) & (Int32(column) < end)
        out.append(Float32(cutlass.select_(kept, value, Float32(0.0))))
    return out


def packed_pairs(values: list[Float32], dtype: DType) -> list[Int32]:
    """Neighbours rounded to `dtype`, two a word, the first in the low half."""
    return [packed(values[i], values[i + 1], dtype) for i in range(0, len(values), 2)]
