"""Query heads that share a key/value head: dK and dV are summed in the CTA, in fp32, in any ratio that divides."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.problems import complaints, run
from undertow.inputs import Shape, complete, random_batch
from undertow.kernels.sm100.plan import SCHEDULES
from undertow.reference import Scoring


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (6, 3)])
def test_gradients_are_right_for_grouped_heads(schedule, heads, kv_heads):
    batch = random_batch(Shape(1, 150, 200, heads, kv_heads))
    assert not complaints(batch, run(batch, schedule).gradients)


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 1), (7, 1), (14, 2), (6, 2), (12, 3), (71, 1)])
def test_any_ratio_that_divides(heads, kv_heads):
    batch = random_batch(Shape(1, 70, 64, heads, kv_heads), scoring=Scoring(causal=True))
    assert not complaints(batch, run(batch).gradients)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (12, 3), (4, 2)])
def test_a_query_head_reads_the_key_head_of_its_group(heads, kv_heads):
    """With q = 0 every row of P is 1 / n, so a value row's gradient is the mean dO of its own group alone."""
    generator = torch.Generator().manual_seed(0)
    rows, keys = (1, 32, heads, 64), (1, 32, kv_heads, 64)
    k, v, dout = (torch.randn(size, generator=generator).bfloat16() for size in (keys, keys, rows))
    gradients = run(complete({"q": torch.zeros(rows).bfloat16(), "k": k, "v": v, "dout": dout})).gradients
    own = dout.double().sum(dim=1).reshape(1, kv_heads, heads // kv_heads, 64).sum(dim=2) / 32
    assert torch.allclose(gradients.dv.double(), own[:, None].expand_as(gradients.dv), rtol=2**-8, atol=1e-3)


def test_a_group_is_the_sum_of_its_expanded_heads():
    """dQ is that of the expanded heads bit by bit; dK and dV are summed before they are rounded, so not bit by bit."""
    grouped = random_batch(Shape(1, 130, 130, 4, 2), scoring=Scoring(causal=True))
    k, v = (x.repeat_interleave(2, dim=2) for x in (grouped.k, grouped.v))
    expanded = complete({"q": grouped.q, "k": k, "v": v, "dout": grouped.dout}, grouped.scoring)
    one, other = run(grouped).gradients, run(expanded).gradients
    assert torch.equal(one.dq, other.dq)
    for summed, apart in ((one.dk, other.dk), (one.dv, other.dv)):
        folded = apart.double().unflatten(2, (2, 2)).sum(dim=3)
        assert (summed.double() - folded).norm() < 4e-3 * folded.norm()


def test_heads_of_a_batch_do_not_mix():
    """Every head equals its own run alone (the tail of a head must not spill into the next)."""
    batch = random_batch(Shape(2, 100, 100, 4, 2))
    together = run(batch).gradients
    for element, kv_head in ((0, 1), (1, 0)):
        heads = slice(2 * kv_head, 2 * kv_head + 2)
        alone = complete(
            {
                "q": batch.q[element : element + 1, :, heads],
                "k": batch.k[element : element + 1, :, kv_head : kv_head + 1],
                "v": batch.v[element : element + 1, :, kv_head : kv_head + 1],
                "dout": batch.dout[element : element + 1, :, heads],
            }
        )
        gradients = run(alone).gradients
        assert torch.equal(gradients.dq[0], together.dq[element, :, heads])
        assert torch.equal(gradients.dk[0, :, 0], together.dk[element, :, kv_head])
        assert torch.equal(gradients.dv[0, :, 0], together.dv[element, :, kv_head])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_grouped_heads_under_a_sliding_window(schedule):
    """The shape of gpt-oss, smaller: 8 query heads on 1, 128 keys to the left, rows of several tiles."""
    batch = random_batch(Shape(1, 260, 260, 8, 1), scoring=Scoring(causal=True, window=(127, None)))
    assert not complaints(batch, run(batch, schedule).gradients)
