"""Laws that attention gradients obey whatever the numbers are: none of these tests needs a second implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reference.cases import SCORINGS, kept_pairs, randn
from undertow.reference import (
    Forward,
    Gradients,
    RowStats,
    Scoring,
    attention_backward,
    attention_forward,
    ideal_sums,
    row_stats,
)

HEAD_DIM = 8


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    scoring: Scoring

    def gradients(self, **changes: Tensor) -> Gradients:
        q, k, v, dout, scoring = self._replace(**changes)
        return attention_backward(q, k, v, dout, scoring=scoring)

    def forward(self) -> Forward:
        return attention_forward(self.q, self.k, self.v, self.scoring)

    def kept(self) -> Tensor:
        return kept_pairs(self.scoring, self.q.shape[1], self.k.shape[1])


@st.composite
def problems(draw, masks=tuple(SCORINGS)):
    batch, kv_heads, group = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)))
    seqlen_q, seqlen_k = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    seed = draw(st.integers(0, 2**31))
    rows, keys = (batch, seqlen_q, kv_heads * group, HEAD_DIM), (batch, seqlen_k, kv_heads, HEAD_DIM)
    q, k, v, dout = (randn(seed + n, *shape) for n, shape in enumerate((rows, keys, keys, rows)))
    return Problem(q, k, v, dout, SCORINGS[draw(st.sampled_from(masks))])


def assert_same(got: Gradients, want: Gradients, atol: float = 1e-12) -> None:
    for name, g, w in zip(Gradients._fields, got, want):
        torch.testing.assert_close(g, w, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def assert_bits(got: Gradients, want: Gradients) -> None:
    for name, g, w in zip(Gradients._fields, got, want):
        assert torch.equal(g, w), name


@given(problems(), st.integers(-60, 60))
def test_a_power_of_two_in_dout_comes_out_bit_for_bit(problem, exponent):
    scale = 2.0**exponent
    plain = problem.gradients()
    assert_bits(problem.gradients(dout=problem.dout * scale), Gradients(*(grad * scale for grad in plain)))


@given(problems(), st.integers(0, 99))
def test_one_vector_added_to_every_v_leaves_dq_and_dk(problem, seed):
    plain, moved = problem.gradients(), problem.gradients(v=problem.v + randn(seed, HEAD_DIM))
    assert_same(moved, plain)


@given(problems(), st.integers(0, 99))
def test_one_vector_added_to_every_k_leaves_all_gradients(problem, seed):
    plain, moved = problem.gradients(), problem.gradients(k=problem.k + randn(seed, HEAD_DIM))
    assert_same(moved, plain)


@given(problems(), st.integers(0, 99))
def test_rows_of_ds_sum_to_zero(problem, seed):
    """With equal keys dQ is softmax_scale * rowsum(dS) * k."""
    equal_keys = torch.ones_like(problem.k) * randn(seed, HEAD_DIM)
    assert problem.gradients(k=equal_keys).dq.abs().max() < 1e-12


@given(problems())
def test_dv_sums_to_dout_over_rows_that_see_a_key(problem):
    batch, _, kv_heads, _ = problem.k.shape
    seen = problem.dout[:, problem.kept().any(dim=1)].sum(dim=1)
    per_kv_head = seen.reshape(batch, kv_heads, -1, HEAD_DIM).sum(dim=2)
    torch.testing.assert_close(problem.gradients().dv.sum(dim=1), per_kv_head, rtol=0, atol=1e-12)


@given(problems(), st.integers(1, 20))
def test_a_power_of_two_may_move_from_scale_to_q(problem, exponent):
    factor = 2.0**exponent
    halved = replace(problem.scoring, softmax_scale=problem.scoring.scale(HEAD_DIM) / factor)
    plain, moved = problem.gradients(), problem._replace(scoring=halved).gradients(q=problem.q * factor)
    assert_bits(moved._replace(dq=moved.dq * factor), plain)


@given(problems(masks=("diagonal",)))
def test_rows_with_one_visible_key_have_no_dq_and_dk(problem):
    grads = problem.gradients()
    assert not grads.dq.any() and not grads.dk.any()


@pytest.mark.parametrize("seqlen", [1, 7])
def test_the_diagonal_window_copies_dout_to_dv(seqlen):
    shape = (2, seqlen, 3, HEAD_DIM)
    q, k, v, dout = (randn(seed, *shape) for seed in range(4))
    assert torch.equal(attention_backward(q, k, v, dout, scoring=Scoring(window=(0, 0))).dv, dout)


@given(problems())
def test_zero_queries_count_the_kept_pairs(problem):
    """With q = 0 every kept pair of a row has P = 1/n, so dO = 1 makes dV_j the sum of 1/n over the rows that see j."""
    heads = problem.q.shape[2]
    kept = problem.kept().double()
    share = (kept / kept.sum(dim=1, keepdim=True).clamp(min=1)).sum(dim=0)
    grads = problem.gradients(q=torch.zeros_like(problem.q), dout=torch.ones_like(problem.dout))
    group = heads // problem.k.shape[2]
    expected = (group * share)[None, :, None, None].expand(problem.k.shape)
    torch.testing.assert_close(grads.dv, expected, rtol=0, atol=1e-12)
    assert not grads.dk.any()


@given(problems(), st.randoms(use_true_random=False))
def test_batch_and_head_permutations_only_permute(problem, random):
    batches = random.sample(range(problem.q.shape[0]), problem.q.shape[0])
    kv_heads = random.sample(range(problem.k.shape[2]), problem.k.shape[2])
    group = problem.q.shape[2] // problem.k.shape[2]
    heads = [kv * group + member for kv in kv_heads for member in range(group)]
    rows, keys = (lambda x: x[batches][:, :, heads]), (lambda x: x[batches][:, :, kv_heads])
    plain = problem.gradients()
    moved = problem.gradients(q=rows(problem.q), k=keys(problem.k), v=keys(problem.v), dout=rows(problem.dout))
    assert_bits(moved, Gradients(rows(plain.dq), keys(plain.dk), keys(plain.dv)))


@given(problems())
def test_grouped_heads_are_expanded_heads_folded(problem):
    batch, seqlen_k, kv_heads, _ = problem.k.shape
    group = problem.q.shape[2] // kv_heads
    expanded = problem.gradients(
        k=problem.k.repeat_interleave(group, dim=2), v=problem.v.repeat_interleave(group, dim=2)
    )
    folded = (x.reshape(batch, seqlen_k, kv_heads, group, HEAD_DIM).sum(dim=3) for x in (expanded.dk, expanded.dv))
    assert_same(problem.gradients(), Gradients(expanded.dq, *folded))


@given(problems(masks=("dense", "scale")), st.data())
def test_chunks_of_keys_with_the_final_statistics_add_up(problem, data):
    cut = data.draw(st.integers(0, problem.k.shape[1]))
    forward = problem.forward()
    stats = row_stats(forward.out, problem.dout, forward.lse)
    parts = [_with_stats(problem, slice(0, cut), stats), _with_stats(problem, slice(cut, None), stats)]
    dk, dv = (torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("dk", "dv"))
    assert_same(Gradients(parts[0].dq + parts[1].dq, dk, dv), problem.gradients())


def _with_stats(problem: Problem, keys: slice, stats: RowStats) -> Gradients:
    """Unrounded (float64) gradients of some keys, given LSE and D of all of them."""
    return ideal_sums(problem.q, problem.k[:, keys], problem.v[:, keys], problem.dout, stats, problem.scoring)


@given(problems(masks=("causal",)))
def test_causal_has_three_spellings(problem):
    if problem.q.shape[1] != problem.k.shape[1]:
        problem = problem._replace(k=problem.q[:, :, : problem.k.shape[2]], v=problem.dout[:, :, : problem.k.shape[2]])
    plain = problem.gradients()
    for window in ((None, 0), (problem.q.shape[1] - 1, 0)):
        assert_bits(problem._replace(scoring=Scoring(window=window)).gradients(), plain)


@settings(max_examples=40)
@given(problems(), st.integers(0, 99))
def test_gradients_are_the_slope_of_our_own_forward(problem, seed):
    """Central difference of <O, dO> along a random direction: catches a mask that forward and backward read apart."""
    step = 1e-5
    directions = [randn(seed + n, *x.shape) for n, x in enumerate(problem[:3])]

    def loss(sign: float) -> float:
        q, k, v = (x + sign * step * direction for x, direction in zip(problem[:3], directions))
        return float((attention_forward(q, k, v, problem.scoring).out * problem.dout).sum())

    slope = (loss(1.0) - loss(-1.0)) / (2 * step)
    inner = sum(float((grad * direction).sum()) for grad, direction in zip(problem.gradients(), directions))
    assert slope == pytest.approx(inner, rel=1e-6, abs=1e-6)
