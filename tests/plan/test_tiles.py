"""Tile ranges against brute force: every pair of row and key of small problems is asked one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.plan.tiles import MAX_SEQLEN, UNREACHABLE, Band, Span, Tiling, band

LENGTHS = st.integers(0, 40)
BOUNDS = st.none() | st.integers(-45, 45) | st.sampled_from([-(2**31), 2**31 - 1, 2**40])
PROBLEMS = st.tuples(LENGTHS, LENGTHS, st.booleans(), st.tuples(BOUNDS, BOUNDS))
TILES = st.tuples(st.integers(1, 9), st.integers(1, 9))


def is_seen(row: int, key: int, problem) -> bool:
    """The definition, word for word."""
    seqlen_q, seqlen_k, causal, (left, right) = problem
    c = row + seqlen_k - seqlen_q
    after_left = left is None or key >= c - left
    before_right = right is None or key <= c + right
    return after_left and before_right and (not causal or key <= c)


def tiling(problem, tiles) -> Tiling:
    seqlen_q, seqlen_k, causal, window = problem
    return Tiling(seqlen_q, seqlen_k, band(causal, window), *tiles)


def pairs(problem, tiles, query_tile: int, kv_tile: int) -> list[bool]:
    """Whether each existing pair of a tile is seen."""
    (seqlen_q, seqlen_k, *_), (tile_m, tile_n) = problem, tiles
    rows = range(query_tile * tile_m, min((query_tile + 1) * tile_m, seqlen_q))
    keys = range(kv_tile * tile_n, min((kv_tile + 1) * tile_n, seqlen_k))
    return [is_seen(row, key, problem) for row in rows for key in keys]


def number_of_tiles(problem, tiles) -> tuple[int, int]:
    return -(-problem[0] // tiles[0]), -(-problem[1] // tiles[1])


@given(PROBLEMS, TILES)
def test_a_key_tile_visits_exactly_the_tiles_that_hold_a_pair(problem, tiles):
    query, kv = number_of_tiles(problem, tiles)
    for n in range(kv):
        visited = tiling(problem, tiles).query_tiles(n)
        assert list(range(*visited)) == [m for m in range(query) if any(pairs(problem, tiles, m, n))]
        assert visited.count == len(range(*visited)), "a span never ends before it begins"


@given(PROBLEMS, TILES)
def test_a_query_tile_gets_dq_from_exactly_the_tiles_that_visit_it(problem, tiles):
    query, kv = number_of_tiles(problem, tiles)
    described = tiling(problem, tiles)
    for m in range(query):
        assert list(range(*described.kv_tiles(m))) == [n for n in range(kv) if m in range(*described.query_tiles(n))]


@given(PROBLEMS, TILES)
def test_exactly_the_visited_tiles_with_an_unseen_pair_need_a_mask(problem, tiles):
    for n in range(number_of_tiles(problem, tiles)[1]):
        visited = tiling(problem, tiles).query_tiles(n)
        unmasked = tiling(problem, tiles).unmasked_query_tiles(n)
        assert list(range(*unmasked)) == [m for m in range(*visited) if all(pairs(problem, tiles, m, n))]
        assert visited.first <= unmasked.first <= unmasked.end <= visited.end


@given(PROBLEMS, TILES, st.booleans())
def test_ranks_count_the_tiles_that_come_before(problem, tiles, descending):
    described = tiling(problem, tiles)
    for m in range(number_of_tiles(problem, tiles)[0]):
        adding = list(range(*described.kv_tiles(m)))
        order = adding[::-1] if descending else adding
        assert [described.rank(n, m, descending) for n in order] == list(range(len(order)))


@given(PROBLEMS, TILES)
def test_tiles_beyond_the_last_key_visit_nothing(problem, tiles):
    kv = number_of_tiles(problem, tiles)[1]
    for n in range(kv, kv + 3):
        assert tiling(problem, tiles).query_tiles(n).count == 0
        assert tiling(problem, tiles).unmasked_query_tiles(n).count == 0


@given(PROBLEMS)
def test_thresholds_of_a_key_are_the_rows_that_see_it(problem):
    seqlen_q, seqlen_k, *_ = problem
    described = tiling(problem, (8, 8))
    for key in range(seqlen_k):
        first, end = described.rows_that_see(key)
        rows = [row for row in range(seqlen_q) if (first is None or row >= first) and (end is None or row < end)]
        assert rows == [row for row in range(seqlen_q) if is_seen(row, key, problem)]


def test_causal_is_the_tighter_of_both_bounds():
    assert band(True) == band(True, (None, 5)) == band(False, (None, 0)) == Band(None, 0)
    assert band(True, (3, -2)) == Band(3, -2)
    assert band(False, (7, None)) == Band(7, None)


@pytest.mark.parametrize("window", [(7, -8), (-1, 0), (-8, 7), (-(2**40), 2**31)])
def test_a_window_without_keys_is_nobodys_window(window):
    empty = Tiling(64, 64, band(False, window))
    assert [empty.query_tiles(n).count for n in range(2)] == [0, 0]


def test_the_worked_example_of_the_documents():
    """512 causal rows and keys: the diagonal tile of each column is masked, those below it are not."""
    causal = Tiling(512, 512, band(causal=True))
    assert [causal.query_tiles(n) for n in range(4)] == [Span(n, 4) for n in range(4)]
    assert [causal.unmasked_query_tiles(n) for n in range(4)] == [Span(n + 1, 4) for n in range(4)]
    sliding = Tiling(512, 512, band(causal=True, window=(128, None)))
    assert [sliding.query_tiles(n) for n in range(4)] == [Span(0, 2), Span(1, 3), Span(2, 4), Span(3, 4)]
    assert all(sliding.unmasked_query_tiles(n).count == 0 for n in range(4))


@pytest.mark.parametrize("left", [None, -UNREACHABLE, 0, UNREACHABLE])
@pytest.mark.parametrize("right", [None, -UNREACHABLE, 0, UNREACHABLE])
def test_every_intermediate_result_fits_32_bits(left, right):
    """A kernel computes with 32-bit registers: the largest lengths and bounds leave none of them."""
    values: list[int] = []

    class Watched(int):
        def _keep(self, value: int) -> Watched:
            values.append(value)
            return Watched(value)

        def __add__(self, other):
            return self._keep(int(self) + int(other))

        __radd__ = __add__

        def __sub__(self, other):
            return self._keep(int(self) - int(other))

        def __mul__(self, other):
            return self._keep(int(self) * int(other))

        def __floordiv__(self, other):
            return self._keep(int(self) // int(other))

    for seqlen_q, seqlen_k in ((1, MAX_SEQLEN), (MAX_SEQLEN, 1), (MAX_SEQLEN, MAX_SEQLEN)):
        bounds = Band(*(None if bound is None else Watched(bound) for bound in (left, right)))
        described = Tiling(Watched(seqlen_q), Watched(seqlen_k), bounds)
        for tile in {0, -(-seqlen_k // 128) - 1}:
            described.unmasked_query_tiles(Watched(tile))
        for tile in {0, -(-seqlen_q // 128) - 1}:
            described.rank(Watched(0), Watched(tile), True)
    assert values and all(-(2**31) <= value < 2**31 for value in values)
