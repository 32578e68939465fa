"""The arithmetic between the GEMMs, on the registers of one thread: one key row, 32 query rows per stage.

No synchronisation here and no addresses. Values come in pairs, because sm_100 multiplies two floats per instruction.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from undertow.kernels.sm100.instructions import packed
from undertow.plan.schema import DType


def exponents(scores: list[Float32], lse_log2: list[Float32], scale_log2: Float32) -> list[Float32]:
    """S * scale_log2 - LSE_log2, the base-2 logarithm of P.

    scale_log2 is softmax_scale * log2(e). LSE_log2 = +inf, as in padding rows, gives -inf.
    """
    out: list[Float32] = []
    for i in range(0, len(scores), 2):
        out += cute.arch.fma_packed_f32x2(
            (scores[i], scores[i + 1]), (scale_log2, scale_log2), (-lse_log2[i], -lse_log2[i + 1])
        )
    return out


def masked(exponents: list[Float32], kept: Int32) -> list[Float32]:
    """-inf, whose P is zero, in the place of every exponent whose bit in `kept` is clear.

    Exponents and not scores are masked: the scale of the scores may be zero or negative.
    """
    nothing = Float32(-Float32.inf)
    return [
        Float32(cutlass.select_((kept & Int32(_bit(i))) != 0, exponent, nothing))
        for i, exponent in enumerate(exponents)
    ]


def probabilities(exponents: list[Float32]) -> list[Float32]:
    """P = 2^exponent. Error: ex2.approx, relative 2^-22 (PTX ISA, ex2)."""
    return [cute.math.exp2(exponent, fastmath=True) for exponent in exponents]


def score_gradients(p: list[Float32], dp: list[Float32], d: list[Float32]) -> list[Float32]:
    """dS = P * (dP - D); softmax_scale is left to dQ and dK."""
    out: list[Float32] = []
    for i in range(0, len(p), 2):
        centred = cute.arch.sub_packed_f32x2((dp[i], dp[i + 1]), (d[i], d[i + 1]))
        out += cute.arch.mul_packed_f32x2((p[i], p[i + 1]), centred)
    return out


def packed_pairs(values: list[Float32], dtype: DType) -> list[Int32]:
    """Neighbours rounded to `dtype`, two a word, the first in the low half."""
    return [packed(values[i], values[i + 1], dtype) for i in range(0, len(values), 2)]


def _bit(index: int) -> int:
    """1 << index as a signed 32-bit number."""
    return (1 << index) - (1 << 32 if index == 31 else 0)
