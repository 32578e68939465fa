"""The float64 reference against automatic differentiation of an attention written another way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.reference.cases import CAUSAL, SCORINGS, SHAPES, kept_pairs, operands, randn
from undertow import reference
from undertow.reference import ProblemError, Scoring, attention_backward, attention_forward

ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
ALL_SCORINGS = pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS.keys())


def differentiable_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """O and LSE with every head at once and kv heads repeated; rows without keys give O = 0, LSE = -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = scoring.scale(q.shape[3]) * torch.einsum("bihd,bjhd->bhij", q, k)
    kept = kept_pairs(scoring, q.shape[1], k.shape[1])
    weights = torch.where(kept, torch.exp(scores), 0.0)
    total = weights.sum(dim=3)
    seen = kept.any(dim=1)
    safe_total = torch.where(seen, total, 1.0)
    lse = torch.where(seen, torch.log(safe_total), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", weights / safe_total[..., None], v), lse


@ALL_SHAPES
@ALL_SCORINGS
def test_forward_is_softmax_attention(shape, scoring):
    q, k, v, _ = operands(shape)
    got, (out, lse) = attention_forward(q, k, v, scoring), differentiable_attention(q, k, v, scoring)
    torch.testing.assert_close(got.out, out, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.lse, lse, rtol=0, atol=1e-12)


@ALL_SHAPES
@ALL_SCORINGS
@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out+lse"])
def test_backward_is_the_derivative(shape, scoring, with_dlse):
    q, k, v, dout = operands(shape)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = differentiable_attention(q, k, v, scoring)
    dlse = torch.where(lse > -math.inf, randn(4, *lse.shape), 0.0) if with_dlse else None
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + (torch.where(lse > -math.inf, lse, 0.0) * dlse).sum()
    expected = torch.autograd.grad(loss, (q, k, v))
    with torch.no_grad():
        grads = attention_backward(q, k, v, dout, dlse, scoring)
    for got, want in zip(grads, expected):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_blocks_of_rows_add_up(monkeypatch):
    q, k, v, dout = operands(SHAPES["more-queries"])
    whole, whole_out = attention_backward(q, k, v, dout, scoring=CAUSAL), attention_forward(q, k, v, CAUSAL)
    monkeypatch.setattr(reference, "BLOCK_ROWS", 4)
    for got, want in zip(attention_backward(q, k, v, dout, scoring=CAUSAL), whole):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    assert torch.equal(attention_forward(q, k, v, CAUSAL).lse, whole_out.lse)


def test_rows_without_keys_are_out_of_everything():
    q, k, v, dout = operands((1, 128, 3, 1, 1, 8))
    dout[:, :125] = 1e30
    out, lse = attention_forward(q, k, v, CAUSAL)
    dq, dk, dv = attention_backward(q, k, v, dout, scoring=CAUSAL)
    assert not out[:, :125].any() and not dq[:, :125].any()
    assert (lse[..., :125] == -math.inf).all() and torch.isfinite(lse[..., 125:]).all()
    alone = attention_backward(q[:, 125:], k, v, dout[:, 125:], scoring=CAUSAL)
    assert torch.equal(dq[:, 125:], alone.dq) and torch.equal(dk, alone.dk) and torch.equal(dv, alone.dv)


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0)], ids=["no-queries", "no-keys"])
def test_empty_sequences_have_zero_gradients(lengths):
    q, k, v, dout = operands((2, *lengths, 2, 2, 8))
    forward = attention_forward(q, k, v)
    assert not forward.out.any() and (forward.lse == -math.inf).all()
    assert not any(grad.any() for grad in attention_backward(q, k, v, dout))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": (1, 15, 2, 8)}, r"v has shape \(1, 15, 2, 8\), k has \(1, 16, 2, 8\)"),
        ({"k": (1, 16, 3, 8), "v": (1, 16, 3, 8)}, "k has 3 heads, q has 2"),
        ({"k": (2, 16, 2, 8), "v": (2, 16, 2, 8)}, "batch and head_dim must be equal"),
        ({"q": (16, 2, 8)}, r"q has shape \(16, 2, 8\): must be \(batch, seqlen, heads, head_dim\)"),
        ({"dout": (1, 1, 2, 8)}, r"dout has shape \(1, 1, 2, 8\), q has \(1, 16, 2, 8\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    names = dict(zip(("q", "k", "v", "dout"), operands(SHAPES["square"])))
    names.update({name: randn(5, *shape) for name, shape in change.items()})
    with pytest.raises(ProblemError, match=message):
        attention_backward(**names)


def test_scale_must_be_finite():
    q, k, v, _ = operands(SHAPES["square"])
    with pytest.raises(ProblemError, match="softmax_scale=nan"):
        attention_forward(q, k, v, Scoring(softmax_scale=math.nan))
