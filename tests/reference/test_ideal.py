"""The ideal 16-bit pipeline: single rounding, and the error table that budgets are made of."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.cases import CAUSAL, bf16_operands
from undertow.reference import (
    attention_backward,
    attention_forward,
    blocks,
    ideal_backward,
    ideal_sums,
    probabilities,
    round_to,
    row_stats,
)

HALF_TYPES = (torch.bfloat16, torch.float16)


def finite_values(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a 16-bit type in ascending order, float64, zero once."""
    patterns = torch.arange(0, 2**15, dtype=torch.int16).view(dtype).double()
    positive = patterns[torch.isfinite(patterns)]
    return torch.cat([-positive.flip(0)[:-1], positive])


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_round_to_leaves_representable_values(dtype):
    values = finite_values(dtype)
    assert torch.equal(round_to(values, dtype), values)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_round_to_takes_the_even_neighbour_of_every_tie(dtype):
    values = finite_values(dtype)
    below, above = values[:-1], values[1:]
    ties = (below + above) / 2
    lower_is_even = below.to(dtype).view(torch.int16) % 2 == 0
    assert torch.equal(round_to(ties, dtype), torch.where(lower_is_even, below, above))


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_round_to_decides_next_to_a_tie(dtype):
    """A float64 just off a tie goes to its own side; through float32 it would become the tie."""
    values = finite_values(dtype)
    below, above = values[:-1], values[1:]
    ties = (below + above) / 2
    infinity = torch.full_like(ties, torch.inf)
    assert torch.equal(round_to(torch.nextafter(ties, -infinity), dtype), below)
    assert torch.equal(round_to(torch.nextafter(ties, infinity), dtype), above)


@pytest.mark.parametrize(
    ("dtype", "last_finite"), [(torch.bfloat16, 2.0**128 - 2.0**119), (torch.float16, 65520.0)], ids=str
)
def test_round_to_overflows_where_the_exponent_ends(dtype, last_finite):
    edge = torch.tensor([last_finite], dtype=torch.float64)
    inside = torch.nextafter(edge, torch.zeros_like(edge))
    assert round_to(inside, dtype).item() == torch.finfo(dtype).max
    assert round_to(edge, dtype).item() == torch.inf and round_to(-edge, dtype).item() == -torch.inf


@given(st.floats(allow_nan=True, allow_infinity=True, width=32))
def test_round_to_agrees_with_torch_from_float32(number):
    """From float32 torch rounds once, so both must agree on every float32."""
    x = torch.tensor([number], dtype=torch.float64)
    for dtype in HALF_TYPES:
        torch.testing.assert_close(round_to(x, dtype), x.float().to(dtype).double(), rtol=0, atol=0, equal_nan=True)


# Public table of this pipeline's relative error before the outputs are rounded: S 512, causal, q + 2 beta k.
# beta, mean of the largest P of a row, error of dQ, dK, dV in percent
ERROR_TABLE = [
    (0.0, 0.07, 0.19, 0.19, 0.16),
    (0.2, 0.14, 0.24, 0.23, 0.16),
    (0.3, 0.31, 0.32, 0.29, 0.14),
    (0.4, 0.55, 0.51, 0.47, 0.14),
    (0.6, 0.89, 1.6, 1.4, 0.12),
    (1.0, 0.996, 10.8, 8.4, 0.08),
]


def percent(got, want) -> list[float]:
    return [100 * float((g.double() - w).norm() / w.norm()) for g, w in zip(got, want)]


def rounds_to(value: float, printed: float) -> bool:
    """Whether `value` is `printed` to the digits that were printed."""
    digits = len(str(printed).partition(".")[2])
    return abs(value - printed) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize("row", ERROR_TABLE, ids=lambda row: f"beta{row[0]}")
def test_ideal_sums_have_the_published_errors(row):
    beta, peak, *errors = row
    q, k, v, dout = bf16_operands(512)
    q = (q.float() + 2 * beta * k.float()).bfloat16()
    out, lse = attention_forward(q, k, v, CAUSAL)
    largest = [probabilities(b.scores, torch.logsumexp(b.scores, 1)).amax(1) for b in blocks(q, k, v, CAUSAL)]
    assert rounds_to(float(torch.cat(largest).mean()), peak)
    stats = row_stats(out.bfloat16(), dout, lse.float())
    got = percent(ideal_sums(q, k, v, dout, stats, CAUSAL), attention_backward(q, k, v, dout, scoring=CAUSAL))
    assert all(rounds_to(value, printed) for value, printed in zip(got, errors)), got


def test_ideal_sums_with_a_common_part_in_v():
    """V = 100 + randn: D from the rounded O cancels badly, and no kernel that reads a 16-bit O can avoid it."""
    q, k, v, dout = bf16_operands(64)
    v = (v.float() + 100).bfloat16()
    out, lse = attention_forward(q, k, v, CAUSAL)
    got = percent(
        ideal_sums(q, k, v, dout, row_stats(out.bfloat16(), dout, lse.float()), CAUSAL),
        attention_backward(q, k, v, dout, scoring=CAUSAL),
    )
    assert all(rounds_to(value, printed) for value, printed in zip(got, (18.6, 17.9, 0.16))), got


def test_ideal_backward_rounds_the_sums_once():
    q, k, v, dout = bf16_operands(96)
    out, lse = attention_forward(q, k, v)
    stats = row_stats(out.bfloat16(), dout, lse.float())
    for grad, total in zip(ideal_backward(q, k, v, dout, stats), ideal_sums(q, k, v, dout, stats)):
        assert grad.dtype == torch.bfloat16
        assert torch.equal(grad.double(), round_to(total, torch.bfloat16))


def test_ideal_pipeline_with_exact_formats_is_the_reference():
    """With float64 operands nothing is rounded, so ideal and true gradients are the same formulas."""
    q, k, v, dout = (x.double() for x in bf16_operands(40))
    for scoring, with_dlse in itertools.product((CAUSAL,), (False, True)):
        out, lse = attention_forward(q, k, v, scoring)
        dlse = torch.randn(lse.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        dlse = dlse if with_dlse else None
        ideal = ideal_backward(q, k, v, dout, row_stats(out, dout, lse, dlse), scoring)
        for got, want in zip(ideal, attention_backward(q, k, v, dout, dlse, scoring)):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
