"""Error budgets: they admit a float32 pipeline on any data, degenerate data included, and nothing much worse."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from undertow.reference import Gradients, attention_forward, round_to
from undertow.tolerance import FLOAT32_ROUNDOFF, relative_error, yardstick

LOG2E = 1.4426950408889634
SCALE = 0.125


class Saved(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor


def saved(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Saved:
    """bf16 operands and the forward's rounded O and float32 LSE."""
    q, k, v, dout = (x.bfloat16() for x in (q, k, v, dout))
    out, lse = attention_forward(q, k, v)
    return Saved(q, k, v, dout, round_to(out, torch.bfloat16).bfloat16(), lse.float())


def random_operands(seqlen_q: int, seqlen_k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (seqlen_q, seqlen_k, seqlen_k, seqlen_q)
    q, k, v, dout = (torch.randn(1, length, 1, 64, generator=generator) for length in lengths)
    return q, k, v, dout


def float32_pipeline(given: Saved, ds_factor: float = 1.0) -> Gradients:
    """What a kernel computes: float32 sums, bf16 operands P and dS, bf16 results; D summed in another order than dP."""
    q, k, v, dout, out = (x[0, :, 0].float() for x in (given.q, given.k, given.v, given.dout, given.out))
    p = torch.exp2(q @ k.T * (SCALE * LOG2E) - (given.lse[0, 0] * LOG2E)[:, None])
    d = (dout * out).flip(1).sum(dim=1, keepdim=True)
    ds = (ds_factor * p * (dout @ v.T - d)).bfloat16().float()
    p = p.bfloat16().float()
    results = (SCALE * (ds @ k), SCALE * (ds.T @ q), p.T @ dout)
    return Gradients(*(x.bfloat16()[None, :, None] for x in results))


def peaked(q, k, v, dout):
    return q + 4 * k, k, v, dout


def common_part_in_v(q, k, v, dout):
    return q, k, v + 100, dout


def scores_of_minus_1e5(q, k, v, dout):
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 448, -1880
    return q, k, v, dout


def equal_keys(q, k, v, dout):
    return q, 0 * k + 1.5, v, dout


def equal_values(q, k, v, dout):
    return q, k, 0 * v + 1.5, dout


def zero_queries(q, k, v, dout):
    return 0 * q, k, v, dout


def zero_keys(q, k, v, dout):
    return q, 0 * k, v, dout


def zero_dout(q, k, v, dout):
    return q, k, v, 0 * dout


SPECIAL = (
    peaked,
    common_part_in_v,
    scores_of_minus_1e5,
    equal_keys,
    equal_values,
    zero_queries,
    zero_keys,
    zero_dout,
)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2), (3, 1), (200, 1), (1, 200), (129, 127), (256, 256)], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_a_float32_pipeline_is_within_budget(shape, seed):
    given = saved(*random_operands(*shape, seed=seed))
    measure = yardstick(given)
    assert measure.accepts(measure.errors(float32_pipeline(given)))


@pytest.mark.parametrize("make", SPECIAL, ids=lambda make: make.__name__)
def test_a_float32_pipeline_is_within_budget_on_special_data(make):
    given = saved(*make(*random_operands(64, 64)))
    measure = yardstick(given)
    assert measure.accepts(measure.errors(float32_pipeline(given)))


@pytest.mark.parametrize("shape", [(16, 32), (64, 64), (129, 127)], ids=str)
def test_one_percent_too_much_ds_is_out_of_budget(shape):
    given = saved(*random_operands(*shape))
    measure = yardstick(given)
    errors = measure.errors(float32_pipeline(given, ds_factor=1.01))
    assert not measure.accepts(errors)
    assert errors.dq > measure.budget.dq and errors.dk > measure.budget.dk and errors.dv <= measure.budget.dv


@pytest.mark.parametrize("shape", [(64, 64), (256, 256)], ids=str)
def test_the_floor_is_small_beside_the_ideal_error_of_random_data(shape):
    measure = yardstick(saved(*random_operands(*shape)))
    assert all(0 < floor < 0.005 * ideal for floor, ideal in zip(measure.floor, measure.ideal))


def test_one_key_is_measured_against_the_terms_that_cancel():
    """1x1: the true dQ and dK are zero and the ideal pipeline gets them; float32 noise is right, more is not."""
    noise = []
    for seed in range(10):
        given = saved(*random_operands(1, 1, seed))
        measure = yardstick(given)
        assert not measure.reference.dq.any() and measure.ideal == (0, 0, 0)
        assert measure.floor.dq < 10 * FLOAT32_ROUNDOFF  # sqrt(64) roundings and the sum of two such errors
        noise.append(measure.errors(float32_pipeline(given)).dq)
        leaked = Gradients(*(grad.clone() for grad in measure.reference))
        leaked.dq[0, 0, 0, 0] = 1e-3 * measure.denominators[0]
        assert measure.errors(leaked).dq == pytest.approx(1e-3) and not measure.accepts(measure.errors(leaked))
    assert any(noise)  # else this test would not have met the case that the floor is for


def test_the_denominator_of_a_gradient_that_is_not_zero_is_its_norm():
    measure = yardstick(saved(*random_operands(32, 32)))
    doubled = Gradients(*(2 * grad for grad in measure.reference))
    assert measure.errors(doubled) == pytest.approx((1, 1, 1))
    assert measure.errors(measure.reference) == (0, 0, 0)


def test_all_zero_problems_accept_only_zero():
    given = saved(*zero_dout(*random_operands(8, 8)))
    measure = yardstick(given)
    assert measure.budget == (0, 0, 0) and measure.errors(measure.reference) == (0, 0, 0)
    wrong = measure.reference._replace(dv=torch.full_like(measure.reference.dv, 1e-30))
    assert measure.errors(wrong).dv == math.inf and not measure.accepts(measure.errors(wrong))


def test_nan_is_never_within_budget():
    measure = yardstick(saved(*random_operands(8, 8)))
    broken = measure.reference._replace(dk=torch.full_like(measure.reference.dk, math.nan))
    assert math.isnan(measure.errors(broken).dk) and not measure.accepts(measure.errors(broken))


def test_relative_error_is_frobenius():
    reference = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(reference + torch.tensor([[0.0, 3.0], [4.0, 0.0]]), reference) == pytest.approx(1.0)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
