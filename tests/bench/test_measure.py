"""Turns, blocks and what is told of them, on a clock that is made up."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.stand_ins import FakeMonitor, FakeStopwatch
from undertow.bench.measure import Method, measure, percentile, turn
from undertow.bench.providers import Participant
from undertow.reference import Gradients


def participant(name: str, made: list[str]) -> Participant:
    def gradients(raw: object) -> Gradients:
        raise AssertionError("nobody judges here")

    return Participant(name, lambda: made.append(name), gradients)


def test_the_second_round_is_reversed():
    assert [turn("abc", index) for index in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_everybody_has_a_turn_in_every_round():
    made: list[str] = []
    named = {name: participant(name, made) for name in "abc"}
    monitor = FakeMonitor()
    timings = measure(list(named.values()), Method(rounds=3), FakeStopwatch(lambda *_: 0.01), monitor)
    assert "".join(made[::2]) == "abc" + "cba" + "abc"  # a warm-up and a block each
    assert monitor.watched == 9
    assert {name: timing.calls for name, timing in timings.items()} == dict.fromkeys("abc", 3 * 25)


@pytest.mark.parametrize(("seconds", "calls"), [(0.001, 250), (0.1, 3), (2.0, 3), (0.07, 4)])
def test_a_block_lasts_a_quarter_of_a_second_and_three_calls(seconds, calls):
    timings = measure([participant("a", [])], Method(rounds=1), FakeStopwatch(lambda *_: seconds), FakeMonitor())
    assert timings["a"].calls == calls


def test_what_is_told_of_blocks():
    # blocks 1, 3, 5 warm up; 2, 4, 6 count: 10, 20 and 30 ms, as many calls of each
    stopwatch = FakeStopwatch(lambda work, block: (0.01, 0.01, 0.01, 0.02, 0.01, 0.03)[block - 1])
    timing = measure([participant("a", [])], Method(rounds=3), stopwatch, FakeMonitor())["a"]
    assert timing.blocks_ms == [10.0, 20.0, 30.0]
    assert (timing.p20_ms, timing.median_ms, timing.p80_ms) == (10.0, 20.0, 30.0)
    assert (timing.clock_mhz, timing.power_w, timing.throttle_reasons) == (1800.0, 600.0, 0b1110)


def test_without_samples_nothing_is_told_of_clocks():
    timing = measure([participant("a", [])], Method(rounds=1), FakeStopwatch(lambda *_: 0.1), FakeMonitor(False))["a"]
    assert (timing.clock_mhz, timing.power_w, timing.throttle_reasons) == (None, None, None)


def test_calls_are_made_inside_what_a_participant_needs_around_them():
    made: list[str] = []

    class Around:
        def __enter__(self):
            made.append("(")

        def __exit__(self, *_):
            made.append(")")

    one = participant("a", made)
    inside = Participant(one.name, one.call, one.gradients, Around)
    measure([inside], Method(rounds=1), FakeStopwatch(lambda *_: 0.1), FakeMonitor())
    assert made == ["(", "a", "a", ")"]


@given(st.lists(st.floats(0.1, 1e3), min_size=1, max_size=30), st.sampled_from([0, 20, 50, 80, 100]))
def test_percentiles_are_those_of_numpy(values, percent):
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert percentile(values, 50) == pytest.approx(statistics.median(values))
