"""The kernels against the ideal pipeline, element by element: what differs is which way something was rounded."""

from __future__ import annotations

import pytest

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
