"""Error budgets that come from the data, never from a hand-tuned tolerance.

A gradient is measured by its relative Frobenius error against float64, and must stay within

    budget = 1.25 * (error of the ideal 16-bit pipeline on the same data) + floor

The first term is what rounding P, dS and the outputs once costs; it follows the data (0.2 % for random inputs, 19 % if
D cancels badly). A quarter more is room for other rounding points, not for other mathematics.

The floor is what float32 sums add, and matters only where the first term vanishes: with one key, P = 1 and
dP - D = 0 exactly, so the ideal error is 0 while a kernel, which adds dP and D up in different orders, is left with
float32 noise. It is the root mean square of these roundings, u = 2^-24 each (one float32 operation, to nearest):

    in the exponent  u (sqrt(d) |softmax_scale| |q|.|k| + |S| + |LSE| + 4)   sum of d products, two roundings, ex2's 4 u
    under a softcap  the first term times its slope, plus 8 u |S|            tanh
    in dP            u sqrt(d) |dO|.|v|                                      sum of d products
    in D             u sqrt(d) |dO|.|O|                                      the same, common to all keys of a row

carried to dQ, dK, dV through the formulas of `undertow.reference` as independent errors. sqrt(d) is the usual growth of
a sum's rounding error if roundings are independent, with every partial sum taken as large as the sum of magnitudes, so
the floor is a generous mean rather than a bound; on random inputs it is 0.2 % of the first term.

Convention for a gradient that is zero (or so small that float32 cannot tell it from zero, below u times the terms that
cancel in it): its error is taken relative to those terms, |dO|.|v| and |dO|.|O| in the place of dP - D, instead of to
itself. Numerator, ideal error and floor share the denominator, so the verdict does not depend on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from undertow.reference import (
    DENSE,
    Block,
    Gradients,
    RowStats,
    Scoring,
    attention_backward,
    attention_forward,
    blocks,
    ideal_backward,
    probabilities,
    row_stats,
    sink_gradient,
)

IDEAL_FACTOR = 1.25
FLOAT32_ROUNDOFF = 2.0**-24
TANH_ROUNDOFFS = 8  # of the float32 formula for tanh, relative
EX2_ROUNDOFFS = 4  # ex2.approx.ftz.f32: at most 2 ulp, PTX ISA "ex2"


class Errors(NamedTuple):
    """One relative Frobenius error per gradient."""

    dq: float
    dk: float
    dv: float


class SavedForward(Protocol):
    """What a backward pass is given: q, k, v, dout, and what the forward stored (undertow.inputs.Batch is one)."""

    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def dout(self) -> Tensor: ...
    @property
    def out(self) -> Tensor: ...
    @property
    def lse(self) -> Tensor: ...


@dataclass(frozen=True)
class Yardstick:
    """The true gradients of one batch and how near a 16-bit kernel can come to them."""

    reference: Gradients  # float64
    denominators: tuple[float, ...]  # of the relative errors of dQ, dK, dV
    ideal: Errors
    floor: Errors

    @property
    def budget(self) -> Errors:
        """Largest errors that are still right."""
        return Errors(*(IDEAL_FACTOR * ideal + floor for ideal, floor in zip(self.ideal, self.floor)))

    def errors(self, grads: Gradients) -> Errors:
        """Relative Frobenius errors of `grads`; NaN if a gradient holds NaN."""
        return _relative(grads, self.reference, self.denominators)

    def accepts(self, errors: Errors) -> bool:
        """Whether every error is within its budget; NaN is not."""
        return all(error <= budget for error, budget in zip(errors, self.budget))


def yardstick(batch: SavedForward, scoring: Scoring = DENSE, dlse: Tensor | None = None) -> Yardstick:
    """Measure of all gradients of `batch`, from its q, k, v, dout and the out and lse that the kernel will read.

    The true gradients depend on q, k, v, dout and dlse only; the ideal pipeline reads the kernels' out and lse.
    """
    q, k, v, dout = batch.q, batch.k, batch.v, batch.dout
    stats = row_stats(batch.out, dout, batch.lse, dlse)
    reference = attention_backward(q, k, v, dout, dlse, scoring)
    noise, magnitudes = _float32_noise(batch, stats, scoring)
    denominators = tuple(_denominator(grad, terms) for grad, terms in zip(reference, magnitudes))
    ideal = _relative(ideal_backward(q, k, v, dout, stats, scoring), reference, denominators)
    floor = Errors(*(_quotient(error, denominator) for error, denominator in zip(noise, denominators)))
    return Yardstick(reference, denominators, ideal, floor)


def sink_error(batch: SavedForward, dsink: Tensor, scoring: Scoring, dlse: Tensor | None = None) -> tuple[float, float]:
    """Relative error of the sink's gradient, and its budget: as for the others, from the stored out and lse."""
    q, k, v, dout = batch.q, batch.k, batch.v, batch.dout
    forward = attention_forward(q, k, v, scoring)
    true = sink_gradient(q, k, v, row_stats(forward.out, dout, forward.lse, dlse), scoring)
    ideal = sink_gradient(q, k, v, row_stats(batch.out, dout, batch.lse, dlse), scoring)
    magnitudes = row_stats(batch.out.abs(), -dout.abs(), batch.lse, None if dlse is None else dlse.abs())
    noise = FLOAT32_ROUNDOFF * math.sqrt(q.shape[-1]) * sink_gradient(q, k, v, magnitudes, scoring)
    denominator = _denominator(true, _norm(noise) / FLOAT32_ROUNDOFF)
    budget = IDEAL_FACTOR * _quotient(_norm(ideal - true), denominator) + _quotient(_norm(noise), denominator)
    return _quotient(_norm(dsink.double() - true), denominator), budget


def relative_error(x: Tensor, reference: Tensor) -> float:
    """Relative Frobenius error of x against a reference of the same shape; 0 if both are 0, inf if only x is not."""
    return _quotient(_norm(x.double() - reference.double()), _norm(reference))


def _relative(grads: Gradients, reference: Gradients, denominators: tuple[float, ...]) -> Errors:
    distances = (_norm(grad.double() - want) for grad, want in zip(grads, reference))
    return Errors(*(_quotient(distance, denominator) for distance, denominator in zip(distances, denominators)))


def _denominator(reference: Tensor, magnitude: float) -> float:
    norm = _norm(reference)
    return norm if norm > FLOAT32_ROUNDOFF * magnitude else magnitude


def _quotient(distance: float, denominator: float) -> float:
    if denominator == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / denominator


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))


def _float32_noise(batch: SavedForward, stats: RowStats, scoring: Scoring) -> tuple[Errors, Errors]:
    """Expected norm of the float32 noise in dQ, dK, dV, and the norm of the terms that cancel in them."""
    noise, terms = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for block in blocks(batch.q, batch.k, batch.v, scoring):
        block_noise, block_terms = _block_noise(batch, block, stats, scoring)
        noise += block_noise
        terms += block_terms
    return Errors(*noise.sqrt().tolist()), Errors(*terms.sqrt().tolist())


def _block_noise(batch: SavedForward, block: Block, stats: RowStats, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Squared noise and squared terms of one block, three entries each: dQ, dK, dV."""
    do, out = batch.dout[block.where].double(), batch.out[block.where].double()
    lse, d = stats.lse[block.row_index].double(), stats.d[block.row_index].double()[:, None]
    scale = scoring.scale(batch.q.shape[-1])
    sum_u = FLOAT32_ROUNDOFF * math.sqrt(batch.q.shape[-1])

    p = probabilities(block.scores, lse)
    dp = do @ block.v.T
    exponent, slope_noise = _score_noise(block, lse, scoring, p > 0)
    dp_terms = do.abs() @ block.v.abs().T
    d_terms = (do.abs() * out.abs()).sum(dim=1, keepdim=True)

    weight = block.sloped(p)
    per_pair = (
        (weight * sum_u * dp_terms) ** 2 + (weight * (dp - d) * exponent) ** 2 + (p * (dp - d) * slope_noise) ** 2
    )
    per_row = (sum_u * d_terms) ** 2
    cancelling = weight**2 * (dp_terms**2 + d_terms**2)
    q2, k2, do2 = ((x**2).sum(dim=1) for x in (block.q, block.k, do))
    # D's error is common to a row: it meets sum_j P_ij k_j in dQ, but each row's own q_i in dK
    dq = scale**2 * ((per_pair @ k2).sum() + (per_row[:, 0] @ (weight @ block.k) ** 2).sum())
    dk = scale**2 * (q2 @ (per_pair + weight**2 * per_row)).sum()
    dv = (do2 @ (p * exponent) ** 2).sum()
    terms = (scale**2 * (cancelling @ k2).sum(), scale**2 * (q2 @ cancelling).sum(), (do2 @ p**2).sum())
    return torch.stack((dq, dk, dv)), torch.stack(terms)


def _score_noise(block: Block, lse: Tensor, scoring: Scoring, seen: Tensor) -> tuple[Tensor, Tensor | float]:
    """Noise of the exponent of P, and of the slope that a softcap gives the scores."""
    u = FLOAT32_ROUNDOFF
    product = u * math.sqrt(block.q.shape[-1]) * abs(scoring.scale(block.q.shape[-1]))
    product = product * (block.q.abs() @ block.k.abs().T)
    rounded = u * torch.where(seen, block.scores.abs() + lse.abs()[:, None] + EX2_ROUNDOFFS, 0.0)
    if block.slope is None or scoring.softcap is None:
        return product + rounded, 0.0
    tanh = (1 - block.slope).clamp(min=0).sqrt()
    tanh_noise = block.slope * product / scoring.softcap + TANH_ROUNDOFFS * u * tanh
    return scoring.softcap * tanh_noise + rounded, 2 * tanh * tanh_noise
