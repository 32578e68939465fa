"""Verdicts about published ratios: in the published quantity, and honest about what is no test."""

from __future__ import annotations

import math

import pytest

from undertow.timing.ablation import CYCLES, POWER, THROUGHPUT, in_published_order, judge, published_ratios
from undertow.timing.results import Prediction


def predicted(median: float, low: float, high: float) -> Prediction:
    return Prediction(median, median, (low, high), (low, median, high), {})


def test_traced_tiles_are_compared_in_cycles():
    verdicts = judge({("split", "dense"): predicted(1.2, 1.1, 1.3)}, {})
    (verdict,) = verdicts
    assert verdict.published.low == pytest.approx(1.2346, abs=1e-4)
    assert (verdict.band, verdict.word) == ((1.1, 1.3), "inside")


def test_throughput_is_compared_through_the_power_limit():
    (verdict,) = judge({}, {("slots", "causal"): predicted(1.05, 1.02, 1.10)})
    assert verdict.median == pytest.approx(1.05**POWER)
    assert verdict.band == pytest.approx((1.02**POWER, 1.10**POWER))
    assert verdict.word == "inside"


@pytest.mark.parametrize(
    ("low", "high", "word"), [(1.0, 1.01, "outside"), (1.0, 1.053, "partly inside"), (1.2, 1.3, "outside")]
)
def test_what_misses_is_called_so(low, high, word):
    (verdict,) = judge({}, {("slots", "causal"): predicted((low + high) / 2, low, high)})
    assert verdict.word == word
    assert not verdict.inside


def test_the_pair_that_gives_the_power_is_no_test_of_it():
    assert pytest.approx(math.log(1.150) / math.log(1.234), abs=1e-3) == POWER
    dependent = [p for p in published_ratios() if not p.independent]
    assert [(p.schedule, p.mask, p.quantity) for p in dependent] == [("split", "dense", THROUGHPUT)]


def test_everything_published_is_there_once():
    ratios = published_ratios()
    assert len({(p.schedule, p.mask, p.quantity) for p in ratios}) == len(ratios) == 8
    assert sum(p.quantity == CYCLES for p in ratios) == 2


def test_the_published_order():
    medians = {"aliased": 3900.0, "slots": 3700.0, "signals": 3500.0, "split": 3160.0}
    assert in_published_order(medians)
    assert not in_published_order({**medians, "signals": 3950.0})
    assert not in_published_order({**medians, "split": 3600.0})
