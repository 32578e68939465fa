"""The arithmetic between the GEMMs, on the registers of one thread: one key row, 32 query rows per stage.

No synchronisation here and no addresses. Values come in pairs, because sm_100 multiplies two floats per instruction.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from undertow.kernels.sm100.instructions import packed
from undertow.plan.schema import DType

LOG2_E = math.log2(math.e)
UNSEEN_EXPONENT = -math.inf  # P is zero
UNSEEN_TANH = -1.8e19  # P is zero, as the cap is no smaller than 1e-16; its square is finite, so the weight is zero too
TANH_SWITCH = 0.55
TANH_COEFFICIENTS = (-0.33332947, 0.13320725, -0.05267181, 0.01643757)  # of x^2 in (tanh(x) / x - 1) / x^2


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


def masked(values: list[Float32], kept: Int32, unseen: float) -> list[Float32]:
    """`unseen` in the place of every value whose bit in `kept` is clear.

    Exponents or tangents are masked, not scores: the scale of the scores may be zero or negative.
    """
    nothing = Float32(unseen)
    return [Float32(cutlass.select_((kept & Int32(_bit(i))) != 0, value, nothing)) for i, value in enumerate(values)]


def probabilities(exponents: list[Float32]) -> list[Float32]:
    """P = 2^exponent. Error: ex2.approx, relative 2^-22 (PTX ISA, ex2)."""
    return [cute.math.exp2(exponent, fastmath=True) for exponent in exponents]


def hyperbolic_tangents(scores: list[Float32], scale: Float32) -> list[Float32]:
    """tanh(S * scale), relative error below 16 * 2^-24.

    Below 0.55 an odd polynomial, fitted for the smallest largest relative error, 4e-8; above it 1 - 2 / (1 + e^2x),
    which has no relative error to speak of there. The machine's own tanh (PTX ISA, tanh.approx) errs by 2^-11, which
    times the cap would be an error of P beyond all budgets.
    """
    out: list[Float32] = []
    for i in range(0, len(scores), 2):
        x = cute.arch.mul_packed_f32x2((scores[i], scores[i + 1]), (scale, scale))
        squared = cute.arch.mul_packed_f32x2(x, x)
        polynomial = _pair(TANH_COEFFICIENTS[-1])
        for coefficient in TANH_COEFFICIENTS[-2::-1]:
            polynomial = cute.arch.fma_packed_f32x2(polynomial, squared, _pair(coefficient))
        near_zero = cute.arch.fma_packed_f32x2(cute.arch.mul_packed_f32x2(polynomial, squared), x, x)
        for half in range(2):
            power = cute.math.exp2(x[half] * Float32(2 * LOG2_E), fastmath=True)
            far = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(power + Float32(1.0))
            out.append(Float32(cutlass.select_(squared[half] < Float32(TANH_SWITCH**2), near_zero[half], far)))
    return out


def times_slopes(p: list[Float32], tanh: list[Float32]) -> list[Float32]:
    """P * (1 - tanh^2): the weight of dP - D in dS where scores are capped."""
    out: list[Float32] = []
    for i in range(0, len(p), 2):
        pair = (tanh[i], tanh[i + 1])
        slopes = cute.arch.fma_packed_f32x2(pair, (-tanh[i], -tanh[i + 1]), _pair(1.0))
        out += cute.arch.mul_packed_f32x2((p[i], p[i + 1]), slopes)
    return out


def score_gradients(weight: list[Float32], dp: list[Float32], d: list[Float32]) -> list[Float32]:
    """dS = weight * (dP - D), where the weight is P or `times_slopes`; softmax_scale is left to dQ and dK."""
    out: list[Float32] = []
    for i in range(0, len(weight), 2):
        centred = cute.arch.sub_packed_f32x2((dp[i], dp[i + 1]), (d[i], d[i + 1]))
        out += cute.arch.mul_packed_f32x2((weight[i], weight[i + 1]), centred)
    return out


def packed_pairs(values: list[Float32], dtype: DType) -> list[Int32]:
    """Neighbours rounded to `dtype`, two a word, the first in the low half."""
    return [packed(values[i], values[i + 1], dtype) for i in range(0, len(values), 2)]


def _pair(value: float) -> tuple[Float32, Float32]:
    return Float32(value), Float32(value)


def _bit(index: int) -> int:
    """1 << index as a signed 32-bit number."""
    return (1 << index) - (1 << 32 if index == 31 else 0)
