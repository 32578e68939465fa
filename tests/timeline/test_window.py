"""Which tile is shown, and how spans are cut to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.timeline.handmade import TILE, timeline
from undertow.timeline.rows import Row, rows_of
from undertow.timeline.window import PictureError, joined, steady, ticks
from undertow.timing.results import Kind, Span


def test_the_typical_tile_of_the_second_half_is_shown():
    made = replace(timeline(), tile_begins=(0.0, 1000.0, 2000.0, 2900.0, 3901.0, 5200.0), cycles_per_tile=1000.0)
    assert (steady(made).begin, steady(made).end, steady(made).tile) == (2900.0, 3901.0, 3)
    assert steady(made, tiles=2).tile == 3


@pytest.mark.parametrize(("tiles", "complaint"), [(0, "at least 1"), (4, "has 3 whole tiles")])
def test_tiles_that_are_not_there_are_refused(tiles, complaint):
    with pytest.raises(PictureError, match=complaint):
        steady(timeline(), tiles)


def test_spans_are_cut_at_both_ends_and_moved():
    window = steady(timeline())
    spans = [
        Span("tensor", "QK", Kind.WORK, window.begin - 50, window.begin + 10),
        Span("tensor", "dP", Kind.WORK, window.end - 5, window.end + 50),
        Span("tensor", "dK", Kind.WORK, window.end, window.end + 50),
    ]
    cut = [(span.name, span.begin, span.end) for span in window.clipped(spans)]
    assert cut == [("QK", 0, 10), ("dP", TILE - 5, TILE)]


def test_equal_neighbours_are_one_box():
    parts = [Span("r", "softmax", Kind.WORK, at, at + 10, 0) for at in (0, 10, 20.5)]
    other = [Span("r", "softmax", Kind.WORK, 30.5, 40, 1), Span("r", "softmax", Kind.WORK, 60, 70, 1)]
    assert [(span.begin, span.end) for span in joined([*parts, *other])] == [(0, 30.5), (30.5, 40), (60, 70)]


def test_rows_are_in_the_order_of_who_feeds_whom():
    rows = rows_of(timeline())
    assert [row.name for row in rows] == [
        "tensor",
        "compute warp 4",
        "compute warp 5",
        "load warp 13",
        "tma",
        "reduce warp 0",
    ]
    assert [(row.role, row.warp) for row in rows[:2]] == [("tensor", None), ("compute", 4)]


@pytest.mark.parametrize(
    ("name", "role", "warp"),
    [("compute warp 11", "compute", 11), ("warp 3", "warp", 3), ("tensor", "tensor", None), ("tma", "tma", None)],
)
def test_rows_without_a_plan_are_warps_too(name, role, warp):
    row = Row(name, ())
    assert (row.role, row.warp) == (role, warp)


@pytest.mark.parametrize(("cycles", "last", "count"), [(2980, 2500, 6), (95, 90, 10), (12_500, 12_000, 7)])
def test_ticks_are_round(cycles, last, count):
    assert (ticks(cycles)[-1], len(ticks(cycles))) == (last, count)
