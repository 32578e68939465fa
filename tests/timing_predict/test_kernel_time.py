"""A schedule as two recorded CTAs: what replays say of any CTA, and what moves them."""

from __future__ import annotations

import pytest

from undertow.commands.recorded import Problem, recorded, seen_pairs
from undertow.inputs import Shape
from undertow.plan.tiles import Band
from undertow.timing.chip import read_chip
from undertow.timing.grid_time import TileCounts
from undertow.timing.kernel_time import Kernels, assumed_of, first_cta, sample_shapes
from undertow.timing.predict import PORT, PORTS, Drawer, draw, held
from undertow.timing.run import run

CHIP = read_chip("b200")
DENSE = Problem(Shape(8, 8192, 8192, 32), Band())
BANDS = {"dense": Band(), "causal": Band(None, 0), "left": Band(300, None), "window": Band(300, 100)}


@pytest.fixture(scope="module")
def split() -> Kernels:
    return recorded("sm100", ["split"], DENSE, CHIP.point())


def test_a_cta_of_the_recorded_size_takes_what_it_took(split):
    replayed = split(CHIP.point(), 0)["split"]
    for cta in split.recorded["split"]:
        assert replayed.cta.cycles(cta.counts) == pytest.approx(run(cta.trace, CHIP.point(), 0).cycles)


def test_the_slope_over_ctas_is_the_steady_state(split):
    replayed = split(CHIP.point(), 0)["split"]
    assert replayed.cta.unmasked == pytest.approx(replayed.per_tile, rel=0.05)
    assert replayed.cta.fixed > 0
    assert replayed.tile(0.0) == replayed.cta.unmasked


def test_the_port_of_operands_moves_the_tile_and_nothing_else_is_drawn_anew(split):
    tiles = {}
    for port, shared in PORTS.items():
        draws = draw(Drawer(held(CHIP, **{PORT: shared}), 0, split), 4, 1)
        predicted = draws.predict(lambda one: one.found["split"].tile(0.0))
        assert PORT not in predicted.sensitivity
        tiles[port] = predicted.draws
    assert all(own < shared for own, shared in zip(tiles["own"], tiles["shared"]))


def test_the_same_seed_says_the_same(split):
    once, again, other = (draw(Drawer(CHIP, seed, split), 3, 1) for seed in (0, 0, 1))
    assert once == again
    assert once.drawn[0].found != other.drawn[0].found


def test_a_timeline_says_what_it_assumes(split):
    timeline = split.timeline("split", CHIP.point(), 0, CHIP)
    assert (timeline.kernel, timeline.chip) == ("split", "b200")
    assert PORT in timeline.assumed
    assert set(timeline.assumed) <= set(assumed_of(CHIP))


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_recorded_ctas_differ_in_all_that_is_asked_of_them(band):
    descending = band.left is not None and band.right is None
    counts = [first_cta(shape, descending) for shape in sample_shapes(band)]
    assert all(each.tiles >= 8 for each in counts)  # less has no steady state
    assert len({each.tiles for each in counts}) > 1
    masked = {each.masked for each in counts}
    assert masked == {0} if band == Band() else len(masked) > 1


def test_work_and_operations_of_a_causal_launch():
    problem = Problem(Shape(2, 1024, 1024, 8, 2), Band(None, 0))
    assert problem.work.kinds[0] == TileCounts(4 * 7, 4)  # the longest first, all query heads of its group
    assert len(problem.work.order) == 2 * 2 * 8
    assert problem.work.masked_share == pytest.approx(8 / 36)
    assert problem.flops == 2.5 * 4 * 64 * 1024 * 1024 / 2 * 8 * 2


def test_pairs_of_a_window_are_counted_as_by_hand():
    assert seen_pairs(4, 4, Band(1, 0)) == 1 + 2 + 2 + 2
    assert seen_pairs(2, 4, Band(None, 0)) == 3 + 4
    assert seen_pairs(3, 5, Band()) == 15
