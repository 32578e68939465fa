"""Predictions as distributions: a chip's constants drawn from their ranges, seeded and in parallel.

Every schedule is replayed with the same draws, so that the ratio of two schedules is formed draw by draw and its band
is that of a ratio, not of two independent numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from undertow.pool import each
from undertow.timing.chip import Chip
from undertow.timing.results import Prediction

POINT = -1  # the place of the replay at the best guesses, before all draws
BAND = (0.05, 0.95)
PORT = "mma_shares_port"  # the switch that matters most, and that nobody has measured on SM100
PORTS = {"shared": 1.0, "own": 0.0}


@dataclass(frozen=True)
class Draw:
    """One set of constants, and what was found with it, by name."""

    constants: Mapping[str, float]
    found: Mapping[Any, Any]


@dataclass(frozen=True)
class Draws:
    """What was found at the best guesses, and with every draw."""

    chip: Chip
    point: Draw
    drawn: tuple[Draw, ...]

    def predict(self, number: Callable[[Draw], float]) -> Prediction:
        """The distribution of a number that is read off one draw."""
        values = np.array([number(draw) for draw in self.drawn])
        low, median, high = np.quantile(values, (BAND[0], 0.5, BAND[1]))
        return Prediction(
            float(number(self.point)),
            float(median),
            (float(low), float(high)),
            tuple(values.tolist()),
            sensitivity(values, [draw.constants for draw in self.drawn]),
        )


@dataclass(frozen=True)
class Drawer:
    """Finds what one draw gives; callable, and picklable for other processes.

    find: from constants and the number of the draw to what is found, by name.
    """

    chip: Chip
    seed: int
    find: Callable[[Mapping[str, float], int], Mapping[Any, Any]]

    def __call__(self, place: int) -> Draw:
        constants = self.chip.point() if place == POINT else self.chip.draw(self.draw_seed(place))
        return Draw(constants, self.find(constants, self.draw_seed(place)))

    def draw_seed(self, place: int) -> int:
        """The seed of a draw: another for every place, and for every seed of the whole."""
        return int(np.random.SeedSequence([self.seed, place - POINT]).generate_state(1)[0])


def draw(drawer: Drawer, count: int, jobs: int, step: Callable[[str], None] = lambda text: None) -> Draws:
    """The point and `count` draws. jobs: processes.

    Raises: ValueError for less than two draws, of which nothing can be said.
    """
    if count < 2:
        raise ValueError(f"draws={count}: must be at least 2")
    found: dict[int, Draw] = {}
    places = [POINT, *range(count)]
    for position, result in each(drawer, places, jobs):
        found[places[position]] = result
        step(f"{len(found)} of {len(places)} draws done")
    return Draws(drawer.chip, found[POINT], tuple(found[place] for place in range(count)))


def held(chip: Chip, **values: float) -> Chip:
    """The chip with constants held at values, whatever their ranges."""
    unknown = sorted(values.keys() - chip.constants.keys())
    assert not unknown, f"{chip.name} has no {', '.join(unknown)}"
    fixed = {name: replace(chip.constants[name], value=x, low=x, high=x) for name, x in values.items()}
    return replace(chip, constants={**chip.constants, **fixed})


def sensitivity(values: np.ndarray, constants: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Rank correlation of the values with every constant that was drawn, the strongest first."""
    ranked = _ranks(values)
    found = {}
    for name in constants[0]:
        drawn = np.array([draw[name] for draw in constants])
        if drawn.min() != drawn.max() and values.min() != values.max():
            found[name] = float(np.corrcoef(ranked, _ranks(drawn))[0, 1])
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Places in ascending order; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
