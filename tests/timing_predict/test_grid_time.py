"""CTAs on SMs by hand: the order of a launch, its last wave, and what a few CTAs say of all others."""

from __future__ import annotations

import pytest

from undertow.plan.grid import Grid
from undertow.plan.tiles import Band, Tiling
from undertow.timing.grid_time import CtaTime, TileCounts, Work, launch_time, solve, tile_counts, work_of

FREE = {"cta_turnover_cycles": 0.0, "launch_cycles": 0.0}
PER_TILE = CtaTime(fixed=0.0, unmasked=1.0, masked=1.0)


def work(*tiles: int) -> Work:
    return Work.of([TileCounts(count, 0) for count in tiles])


def test_a_cta_takes_the_sm_that_is_free_first():
    assert launch_time(work(3, 1, 1, 2), PER_TILE, 2, FREE) == 4  # 3 | 1, 1, 2
    assert launch_time(work(1, 1, 2, 3), PER_TILE, 2, FREE) == 4  # 1, 2 | 1, 3


def test_the_last_wave_counts_in_full():
    assert launch_time(work(*[5] * 132), PER_TILE, 132, FREE) == 5
    assert launch_time(work(*[5] * 133), PER_TILE, 132, FREE) == 10


def test_ctas_change_over_between_but_not_after_them():
    constants = {"cta_turnover_cycles": 100.0, "launch_cycles": 7.0}
    assert launch_time(work(5, 5, 5), PER_TILE, 1, constants) == 7 + 15 + 2 * 100
    assert launch_time(work(5, 4), PER_TILE, 1, constants) == 7 + 9 + 100


def test_fewer_ctas_than_sms_take_as_long_as_the_longest():
    assert launch_time(work(2, 9), PER_TILE, 132, FREE) == 9


def test_equal_and_unequal_ctas_are_counted_alike():
    equal = launch_time(work(*[3] * 10), PER_TILE, 4, FREE)
    nearly = launch_time(Work.of([TileCounts(3, 0)] * 9 + [TileCounts(2, 1)]), PER_TILE, 4, FREE)
    assert equal == nearly == 9


def test_times_of_a_cta_follow_from_three():
    truth = CtaTime(fixed=4000.0, unmasked=1500.0, masked=1700.0)
    counts = (TileCounts(9, 1), TileCounts(3, 1), TileCounts(5, 2))
    found = solve([(each, truth.cycles(each)) for each in counts])
    assert (found.fixed, found.unmasked, found.masked) == pytest.approx((4000, 1500, 1700))


def test_without_masked_tiles_two_are_enough():
    found = solve([(TileCounts(10, 0), 19000.0), (TileCounts(4, 0), 10000.0)])
    assert (found.fixed, found.unmasked, found.masked) == pytest.approx((4000, 1500, 1500))


def test_ctas_that_do_not_differ_say_nothing():
    with pytest.raises(AssertionError):
        solve([(TileCounts(4, 0), 1.0), (TileCounts(4, 0), 2.0)])


def test_a_causal_cta_masks_the_diagonal_of_every_query_head():
    tiling = Tiling(1024, 1024, Band(None, 0))
    assert tile_counts(tiling, 0) == (7, 1, 1)
    assert tile_counts(tiling, 7, heads=4) == (0, 4, 1)


def test_a_dense_launch_is_all_tiles():
    found = work_of(Grid(16, 2, 3), Tiling(2048, 2048), heads=4)
    assert found == Work.of([TileCounts(64, 0)] * 96)
    assert (found.tiles, found.masked_share) == ((96 * 64, 0, 96), 0.0)


def test_causal_heads_of_a_bundle_all_begin_with_their_longest():
    found = work_of(Grid(3, 2, 1, heads_per_bundle=2), Tiling(384, 384, Band(None, 0)))
    assert [found.kinds[kind].tiles for kind in found.order] == [3, 3, 2, 2, 1, 1]
    assert (found.tiles, found.masked_share) == ((6, 6, 6), 0.5)


def test_ctas_that_stay_begin_once_and_have_no_turnover():
    stays = CtaTime(fixed=100.0, unmasked=1.0, masked=1.0, item=10.0)
    constants = {"cta_turnover_cycles": 1e6, "launch_cycles": 7.0}
    assert launch_time(work(5, 5, 5), stays, 1, constants) == 7 + 100 + 15 + 2 * 10
    assert launch_time(work(3, 1, 1, 2), stays, 2, constants) == 7 + 100 + 5 + 10  # 3, 2 | 1, 1


def test_what_an_item_adds_follows_from_one_cta_that_takes_several():
    truth = CtaTime(fixed=4000.0, unmasked=1500.0, masked=1700.0, item=300.0)
    counts = (TileCounts(9, 1), TileCounts(3, 1), TileCounts(5, 2), TileCounts(15, 6, 3))
    found = solve([(each, truth.cycles(each)) for each in counts])
    assert (found.fixed, found.unmasked, found.masked, found.item) == pytest.approx((4000, 1500, 1700, 300))
