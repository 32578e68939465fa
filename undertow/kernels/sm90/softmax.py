"""The arithmetic between the GEMMs, on the registers of one thread: two key rows, 32 query columns.

No synchronisation here and no addresses. Registers of an accumulator count 8-column groups, then the two rows, then the
two neighbouring columns.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from undertow.kernels.sm100.instructions import packed
from undertow.kernels.sm100.softmax import LOG2_E, TANH_COEFFICIENTS, TANH_SWITCH
from undertow.plan.schema import DType

UNSEEN = -math.inf  # exponent of a P of zero
NARROW = 100.0  # a softcap up to which what tanh errs by, 7e-5 of P at most, is a third of what P's rounding to f16 may
MOST_EXPONENT = 60.0  # where tanh has long been 1, and the product of two powers is a number, as its reciprocal


def column_of(register: int) -> int:
    """The query column of a register, less 2 (lane % 4)."""
    return register // 4 * 8 + register % 2


def row_of(register: int) -> int:
    """Which of the thread's key rows a register belongs to."""
    return register // 2 % 2


def probabilities(exponents: list[Float32]) -> list[Float32]:
    """P = 2^exponent. Error: ex2.approx, relative 2^-22 (PTX ISA, ex2)."""
    return [cute.math.exp2(exponent, fastmath=True) for exponent in exponents]


def hyperbolic_tangents(scores: list[Float32], scale: Float32, softcap_log2: Float32) -> list[Float32]:
    """tanh(S * scale). Error: below 12 * 2^-24, with caps above `NARROW` also below 24 * 2^-24 of it.

    Of the 12, a sum, the product of two, its reciprocal and what gives one of the two back from it have 10 (rcp.approx
    errs by 2^-23: PTX ISA). 1 - 2 / (1 + e^2x) has the rounding of 1 where x is near zero. Times a cap of 50 that is
    far less than P loses by its own rounding; caps beyond need the polynomial of `sm100.softmax` there. Two reciprocals
    are had by one, of their product: 16 a cycle, for them and exponentials, are what these kernels wait for.
    """
    factor = scale * Float32(2 * LOG2_E)
    sums = [_one_more(cute.arch.fmin(score * factor, Float32(MOST_EXPONENT))) for score in scores]
    tanh = cute.make_rmem_tensor((len(scores),), Float32)
    for first in range(0, len(sums), 2):
        both = cute.arch.rcp_approx(sums[first] * sums[first + 1])
        for place, other in ((first, first + 1), (first + 1, first)):
            tanh[place] = cute.math.fma(Float32(-2.0), both * sums[other], Float32(1.0))
    _sharpen(tanh, scores, scale, softcap_log2 > Float32(NARROW * LOG2_E))
    return [tanh[index] for index in range(len(scores))]


def _one_more(exponent: Float32) -> Float32:
    return cute.math.exp2(exponent, fastmath=True) + Float32(1.0)


@cute.jit
def _sharpen(tanh: cute.Tensor, scores: list, scale: Float32, wanted: Boolean):
    """Replace tangents near zero by those of a polynomial, which has no relative error to speak of there."""
    if wanted:
        for index in cutlass.range_constexpr(len(scores)):
            x = scores[index] * scale
            squared = x * x
            polynomial = Float32(TANH_COEFFICIENTS[-1])
            for coefficient in TANH_COEFFICIENTS[-2::-1]:
                polynomial = cute.math.fma(polynomial, squared, Float32(coefficient))
            near_zero = cute.math.fma(polynomial * squared, x, x)
            tanh[index] = Float32(cutlass.select_(squared < Float32(TANH_SWITCH**2), near_zero, tanh[index]))


def capped_exponents(
    tanh: list[Float32], softcap_log2: Float32, start: int, lse_log2: dict[int, Float32]
) -> list[Float32]:
    """softcap_log2 * tanh - LSE_log2. start: the first register. lse_log2: -LSE * log2(e) by `column_of`."""
    return [
        cute.math.fma(tangent, softcap_log2, lse_log2[column_of(register)])
        for register, tangent in enumerate(tanh, start)
    ]


def times_slopes(p: list[Float32], tanh: list[Float32]) -> list[Float32]:
    """P * (1 - tanh^2): the weight of dP - D in dS where scores are capped."""
    return [weight * cute.math.fma(-tangent, tangent, Float32(1.0)) for weight, tangent in zip(p, tanh)]


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
