"""Draws: seeded, paired, and what they say of numbers whose distribution is known."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

import numpy as np
import pytest

from undertow.timing.chip import Chip, Constant
from undertow.timing.predict import Draw, Drawer, Draws, draw, held, sensitivity

BOUNDS = {"a": (0.0, 10.0), "b": (0.0, 1.0), "still": (3.0, 3.0)}


def constant(name: str, low: float, high: float, unit: str = "cycles") -> Constant:
    return Constant(name, (low + high) / 2, low, high, unit, "a test", date(2026, 1, 1), "assumed")


def chip(**more: Constant) -> Chip:
    constants = {name: constant(name, *bounds) for name, bounds in BOUNDS.items()}
    return Chip("made up", "", "sm_90a", 4, {**constants, **more})


def both(constants: Mapping[str, float], seed: int) -> dict[str, float]:
    """Two kernels whose ratio is always two; the seed moves neither."""
    return {"one": constants["a"] + 1, "other": 2 * constants["a"] + 2, "seed": seed}


def drawn(count: int = 200, seed: int = 0, jobs: int = 1) -> Draws:
    return draw(Drawer(chip(), seed, both), count, jobs)


def test_the_point_is_at_the_best_guesses():
    assert drawn(2).predict(lambda one: one.found["one"]).point == 6


def test_median_and_band_are_those_of_a_uniform_constant():
    predicted = drawn(2000).predict(lambda one: one.found["one"])
    assert predicted.median == pytest.approx(6, abs=0.4)
    assert predicted.band == pytest.approx((1.5, 10.5), abs=0.3)
    assert len(predicted.draws) == 2000


def test_the_ratio_of_paired_draws_has_no_band():
    ratio = drawn().predict(lambda one: one.found["other"] / one.found["one"])
    assert ratio.band == pytest.approx((2, 2))


def test_the_same_seed_gives_the_same_draws_in_any_number_of_processes():
    assert drawn(9) == drawn(9, jobs=2)
    assert drawn(9).drawn[0].constants != drawn(9, seed=1).drawn[0].constants
    assert drawn(3).drawn == drawn(9).drawn[:3]


def test_every_draw_has_a_seed_of_its_own():
    assert len({one.found["seed"] for one in drawn(50).drawn}) == 50


def test_what_matters_comes_first_and_what_stands_still_is_left_out():
    found = drawn(300).predict(lambda one: one.found["one"]).sensitivity
    assert list(found) == ["a", "b"]
    assert found["a"] == pytest.approx(1)
    assert abs(found["b"]) < 0.2


def test_ranks_see_through_a_curve_and_through_ties():
    values = np.array([1.0, 8.0, 27.0, 64.0])
    assert sensitivity(values, [{"x": x} for x in (1.0, 2.0, 3.0, 4.0)])["x"] == pytest.approx(1)
    switch = sensitivity(values, [{"x": x} for x in (1.0, 1.0, 0.0, 0.0)])["x"]
    assert switch == pytest.approx(-2 / 5**0.5)


def test_a_held_constant_is_drawn_as_it_is_held_and_moves_no_other():
    port = constant("port", 0.0, 1.0, "switch")
    free, still = chip(port=port), held(chip(port=port), port=1.0)
    for seed in range(5):
        assert still.draw(seed) == {**free.draw(seed), "port": 1.0}
    assert still.point()["port"] == 1


def test_one_draw_is_refused():
    with pytest.raises(ValueError, match="draws=1: must be at least 2"):
        draw(Drawer(chip(), 0, both), 1, 1)


def test_draws_that_all_agree_have_no_sensitivity():
    same = [Draw({"a": 1.0}, {"x": 5}), Draw({"a": 2.0}, {"x": 5})]
    assert Draws(chip(), same[0], tuple(same)).predict(lambda one: one.found["x"]).sensitivity == {}
