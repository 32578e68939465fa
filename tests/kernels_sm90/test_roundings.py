"""The kernels against the ideal pipeline, element by element: what differs is which way something was rounded."""

from __future__ import annotations

import pytest
import torch

from tools.cross_check import CASES, difference, largest_terms
from undertow import emulated
from undertow.inputs import random_batch
from undertow.reference import ideal_backward, row_stats


@pytest.mark.parametrize("case", CASES)
def test_one_rounding_of_an_operand_and_one_of_the_sum_explain_every_element(case):
    shape, scoring, dtype = CASES[case]
    batch = random_batch(shape, 0, scoring, dtype)
    gradients = emulated.backward(batch, deterministic=True, arch="sm90").gradients
    stats = row_stats(batch.out, batch.dout, batch.lse)
    ideal = ideal_backward(batch.q, batch.k, batch.v, batch.dout, stats, batch.scoring)
    for ours, best, terms in zip(gradients, ideal, largest_terms(batch)):
        apart = difference(ours, best, terms)
        assert apart["equal"] > 0.9 and apart["roundings"] <= 1, apart


@pytest.mark.parametrize("wrong", [2.0, torch.nan])
def test_one_element_that_is_wrong_is_told(wrong):
    """Off by both roundings twice, or no number at all, among elements that are exact."""
    shape, scoring, dtype = CASES["one-tile"]
    batch = random_batch(shape, 0, scoring, dtype)
    stats = row_stats(batch.out, batch.dout, batch.lse)
    exact = ideal_backward(batch.q, batch.k, batch.v, batch.dout, stats, scoring).dv.double()
    terms, moved = largest_terms(batch).dv, exact.clone()
    place = torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(exact[0, 5, 0, 7].abs()))
    moved[0, 5, 0, 7] += wrong * (place + torch.finfo(dtype).eps * terms[0, 5, 0, 7])
    apart = difference(exact.to(dtype), moved, terms)
    assert difference(exact.to(dtype), exact, terms)["roundings"] == 0
    assert not apart["roundings"] <= 1 and apart["equal"] > 0.99
