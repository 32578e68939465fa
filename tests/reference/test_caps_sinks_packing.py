"""Softcap, learnable sinks and packed sequences in the float64 reference, against automatic differentiation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.reference.cases import SHAPES, kept_pairs, operands, randn
from undertow.reference import (
    ProblemError,
    Scoring,
    Sequences,
    attention_backward,
    attention_forward,
    row_stats,
    sink_gradient,
)
from undertow.tolerance import sink_error, yardstick

SINKS = randn(7, 6)
SCORINGS = {
    "softcap": Scoring(softcap=0.7),
    "softcap-causal": Scoring(softcap=0.7, causal=True),
    "sink": Scoring(sink=SINKS),
    "sink-window": Scoring(sink=SINKS, window=(4, 2)),
    "sink-softcap-causal": Scoring(sink=SINKS, softcap=2.0, causal=True, softmax_scale=-0.4),
}


def differentiable_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sink: Tensor | None):
    """O and LSE of one batch of heads; a sink is one more column of scores, whose value is zero."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = scoring.scale(q.shape[3]) * torch.einsum("bihd,bjhd->bhij", q, k)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    kept = kept_pairs(scoring, q.shape[1], k.shape[1])
    weights = torch.where(kept, torch.exp(scores), 0.0)
    total = weights.sum(dim=3)
    if sink is not None:
        total = total + torch.exp(sink)[None, :, None]
    some = total > 0
    safe = torch.where(some, total, 1.0)
    return torch.einsum("bhij,bjhd->bihd", weights / safe[..., None], v), torch.where(some, torch.log(safe), -math.inf)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_everything_is_the_derivative(shape, scoring):
    q, k, v, dout = operands(shape)
    heads = shape[3]
    sink = None if scoring.sink is None else scoring.sink[:heads].clone().requires_grad_()
    scoring = Scoring(**{**vars(scoring), "sink": None if sink is None else sink.detach()})
    wanted = [x.requires_grad_() for x in (q, k, v)] + ([] if sink is None else [sink])
    out, lse = differentiable_attention(q, k, v, scoring, sink)
    dlse = torch.where(lse > -math.inf, randn(4, *lse.shape), 0.0)
    loss = (out * dout).sum() + (torch.where(lse > -math.inf, lse, 0.0) * dlse).sum()
    expected = torch.autograd.grad(loss, wanted)
    with torch.no_grad():
        forward = attention_forward(q, k, v, scoring)
        got = list(attention_backward(q, k, v, dout, dlse, scoring))
        if sink is not None:
            got.append(sink_gradient(q, k, v, row_stats(forward.out, dout, forward.lse, dlse), scoring))
    torch.testing.assert_close(forward.out, out.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(forward.lse, lse.detach(), rtol=0, atol=1e-12)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_cap_far_above_the_scores_is_no_cap():
    q, k, v, dout = operands(SHAPES["square"])
    capped, free = (attention_backward(q, k, v, dout, scoring=Scoring(softcap=cap)) for cap in (1e8, None))
    for one, other in zip(capped, free):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def packed_problem() -> tuple[tuple[Tensor, ...], Sequences]:
    """Three sequences, the first without queries, the last used in part; NaN in rows of nobody."""

    def offsets(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    sequences = Sequences(offsets(0, 0, 7, 12), offsets(0, 4, 9, 15), offsets(0, 7, 3), offsets(4, 5, 4))
    q, dout = (randn(seed, 14, 4, 8) for seed in (0, 3))
    k, v = (randn(seed, 15, 2, 8) for seed in (1, 2))
    for x in (q, dout):
        x[[10, 11, 12, 13]] = math.nan
    for x in (k, v):
        x[[13, 14]] = math.nan
    return (q, k, v, dout), sequences


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1), "softcap": 1.5}], ids=str)
def test_packed_sequences_are_dense_ones_side_by_side(options):
    (q, k, v, dout), sequences = packed_problem()
    scoring = Scoring(sequences=sequences, **options)
    forward, grads = attention_forward(q, k, v, scoring), attention_backward(q, k, v, dout, scoring=scoring)
    covered = torch.zeros(14, dtype=torch.bool)
    for rows, keys in sequences.used():
        of_q, of_k = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        parts = (q[None, of_q], k[None, of_k], v[None, of_k])
        alone = attention_backward(*parts, dout[None, of_q], scoring=Scoring(**options))
        assert torch.equal(forward.out[of_q], attention_forward(*parts, Scoring(**options)).out[0])
        for got, want, where in zip(grads, alone, (of_q, of_k, of_k)):
            assert torch.equal(got[where], want[0])
        covered[of_q] = True
    assert not forward.out[~covered].any() and (forward.lse[:, ~covered] == -math.inf).all()
    assert not grads.dq[~covered].any() and not grads.dk[13:].any() and not grads.dv[13:].any()


@pytest.mark.parametrize(
    ("scoring", "message"),
    [
        (Scoring(softcap=0.0), "softcap=0.0: must be positive and finite"),
        (Scoring(softcap=math.nan), "softcap=nan: must be positive and finite"),
        (Scoring(sequences=packed_problem()[1]), r"q has shape .*: must be \(rows, heads, head_dim\)"),
    ],
)
def test_what_is_no_attention_is_named(scoring, message):
    q, k, v, _ = operands(SHAPES["square"])
    with pytest.raises(ProblemError, match=message):
        attention_forward(q, k, v, scoring)


class Saved:
    """A bf16 batch with a sink, as a kernel would read it."""

    def __init__(self, scoring: Scoring):
        numbers = (randn(seed, 1, 64, 2, 64).bfloat16() for seed in range(4))
        self.q, self.k, self.v, self.dout = numbers
        forward = attention_forward(self.q, self.k, self.v, scoring)
        self.out, self.lse = forward.out.bfloat16(), forward.lse.float()


def test_the_budget_of_a_sink_is_that_of_the_stored_forward():
    scoring = Scoring(sink=torch.tensor([0.5, 2.0]))
    batch = Saved(scoring)
    stats = row_stats(batch.out, batch.dout, batch.lse)
    ideal = sink_gradient(batch.q, batch.k, batch.v, stats, scoring)
    error, budget = sink_error(batch, ideal.float(), scoring)
    assert 0 < error <= budget < 0.05
    assert sink_error(batch, 1.1 * ideal.float(), scoring)[0] > budget


def test_the_floor_under_a_softcap_is_small_beside_the_ideal_error():
    scoring = Scoring(softcap=3.0)
    measure = yardstick(Saved(scoring), scoring)
    assert all(0 < floor < 0.01 * ideal for floor, ideal in zip(measure.floor, measure.ideal))
