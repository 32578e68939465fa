"""The order of the CTAs: everybody gets a place, nobody the same, long tiles and shared heads first."""

from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from undertow.plan.attention import Attention
from undertow.plan.grid import L2_BYTES, ROW_BYTES, Grid, Place, heads_per_bundle
from undertow.plan.tiles import Tiling, band

SMALL = st.integers(1, 6)
BOUNDS = st.none() | st.integers(-45, 45)


@given(SMALL, SMALL, SMALL, SMALL, st.booleans())
def test_every_tile_of_every_head_has_exactly_one_cta(tiles, heads, batches, bundle, descending):
    grid = Grid(tiles, heads, batches, min(bundle, heads * batches), descending)
    places = [grid.place(number) for number in range(grid.num_ctas)]
    assert sorted(places) == [Place(t, h, b) for t in range(tiles) for h in range(heads) for b in range(batches)]


@given(SMALL, SMALL, SMALL, SMALL, st.booleans())
def test_tiles_of_a_head_come_in_order(tiles, heads, batches, bundle, descending):
    grid = Grid(tiles, heads, batches, min(bundle, heads * batches), descending)
    taken: dict[tuple[int, int], list[int]] = {}
    for number in range(grid.num_ctas):
        tile, head, batch = grid.place(number)
        taken.setdefault((batch, head), []).append(tile)
    expected = list(range(tiles))[:: -1 if descending else 1]
    assert all(tiles_of_head == expected for tiles_of_head in taken.values())


def test_a_bundle_takes_the_same_tile_of_its_heads_at_once():
    """Three heads in bundles of two: head 2 is a bundle of its own."""
    grid = Grid(2, 3, 1, heads_per_bundle=2)
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    assert [grid.place(number)[:2] for number in range(6)] == order


def test_a_bundle_may_have_heads_of_two_batch_elements():
    """Two elements of three heads in bundles of four: the last bundle has two."""
    grid = Grid(2, 3, 2, heads_per_bundle=4)
    first, last = [(0, 0), (1, 0), (2, 0), (0, 1)], [(1, 1), (2, 1)]
    order = [Place(tile, *head) for heads in (first, last) for tile in range(2) for head in heads]
    assert [grid.place(number) for number in range(12)] == order


def test_bundles_fit_their_share_of_l2():
    for seqlen, group in ((1, 1), (512, 1), (4096, 8), (32768, 4)):
        heads = heads_per_bundle(seqlen, group, 64)
        assert 1 <= heads <= 64
        assert heads == 1 or heads * group * seqlen * ROW_BYTES <= L2_BYTES
        assert heads == 64 or (heads + 1) * group * seqlen * ROW_BYTES > L2_BYTES
    assert heads_per_bundle(0, 1, 3) == 3
    assert heads_per_bundle(8192, 1, 32, 4 * 8192 * ROW_BYTES) == 4


def trips_in_order(tiling: Tiling, heads: int, bundle: int) -> list[list[int]]:
    """Query tiles that each CTA visits, one list per bundle, in the order in which the CTAs start."""
    attention = Attention(left=tiling.band.left is not None, right=tiling.band.right is not None)
    grid = Grid(-(-tiling.seqlen_k // tiling.tile_n), heads, 1, min(bundle, heads), attention.descending)
    bundles: dict[int, list[int]] = {}
    for number in range(grid.num_ctas):
        kv_tile, head, _ = grid.place(number)
        bundles.setdefault(head // grid.heads_per_bundle, []).append(tiling.query_tiles(kv_tile).count)
    return list(bundles.values())


@given(st.integers(1, 60), st.integers(1, 60), BOUNDS, st.sampled_from(["right", "left", "none"]), SMALL, SMALL)
def test_the_longest_tiles_of_a_bundle_come_first(seqlen_q, seqlen_k, bound, side, heads, bundle):
    """Causal and other right bounds: the first keys are seen by most rows. Bounded on the left only: the last ones."""
    window = {"right": (None, bound), "left": (bound, None), "none": (None, None)}[side]
    for trips in trips_in_order(Tiling(seqlen_q, seqlen_k, band(window=window), 8, 8), heads, bundle):
        assert trips == sorted(trips, reverse=True)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 45), SMALL, SMALL)
def test_a_causal_window_ends_with_its_shortest_tiles(seqlen_q, surplus, left, heads, bundle):
    """At least as many rows as keys: the window is whole in every tile but the last ones, which end with the rows."""
    tiling = Tiling(seqlen_q + surplus, seqlen_q, band(causal=True, window=(left, None)), 8, 8)
    for trips in trips_in_order(tiling, heads, bundle):
        assert trips == sorted(trips, reverse=True)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(-45, 45), st.integers(-45, 45))
def test_under_a_window_no_tile_is_long(seqlen_q, seqlen_k, left, right):
    """So that it matters little that tiles at either end of the sequence, where rows are missing, are shorter."""
    tiling = Tiling(seqlen_q, seqlen_k, band(window=(left, right)), 8, 8)
    most = -(-(left + right + 8) // 8) + 1
    assert max(max(trips) for trips in trips_in_order(tiling, 1, 1)) <= max(0, most)


def test_the_longest_tiles_come_first_at_full_size():
    """The order of a causal head of 32768 tokens: 256 trips, then 255, and the shortest fill the end."""
    (trips,) = trips_in_order(Tiling(32768, 32768, band(causal=True)), 1, 1)
    assert trips == list(range(256, 0, -1))
    assert not Attention(right=True).descending and Attention(left=True).descending


@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.booleans(),
    st.tuples(BOUNDS, BOUNDS),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_turns_come_in_the_order_in_which_ctas_start(seqlen_q, seqlen_k, causal, window, heads, bundle):
    """The n-th CTA to start that adds to a query tile is the n-th to add: nobody waits for one that starts later."""
    tiling = Tiling(seqlen_q, seqlen_k, band(causal, window), 8, 8)
    left, right = tiling.band
    attention = Attention(left=left is not None, right=right is not None, deterministic=True)
    grid = Grid(-(-seqlen_k // 8), heads, 1, min(bundle, heads), attention.descending)
    added: dict[tuple[int, int], int] = {}
    for number in range(grid.num_ctas):
        kv_tile, head, _ = grid.place(number)
        for query_tile in range(*tiling.query_tiles(kv_tile)):
            rank = tiling.rank(kv_tile, query_tile, attention.descending)
            assert rank == added.get((head, query_tile), 0)
            added[head, query_tile] = rank + 1


def test_under_a_causal_mask_nobody_waits_for_its_turn():
    """Each CTA adds to its s-th query tile as the s-th of all that add to it."""
    tiling = Tiling(1024, 1024, band(causal=True))
    for kv_tile in range(8):
        visited = range(*tiling.query_tiles(kv_tile))
        assert [tiling.rank(kv_tile, tile, descending=True) for tile in visited] == list(range(len(visited)))


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.tuples(BOUNDS, BOUNDS),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_taking_turns_never_deadlocks_however_few_ctas_are_resident(seqlen_q, seqlen_k, causal, window, heads, slots):
    """CTAs start in order as slots become free, and each adds to its query tiles one after the other.

    Every slot goes on as far as turns allow before the next is looked at, last CTA first, which favours waiting.
    """
    tiling = Tiling(seqlen_q, seqlen_k, band(causal, window), 8, 8)
    left, right = tiling.band
    descending = Attention(left=left is not None, right=right is not None, deterministic=True).descending
    grid = Grid(-(-seqlen_k // 8), heads, 1, heads, descending)
    waiting, turns, resident = list(range(grid.num_ctas)), collections.Counter(), []
    while waiting or resident:
        while waiting and len(resident) < slots:
            kv_tile, head, _ = grid.place(waiting.pop(0))
            resident.append((kv_tile, head, list(range(*tiling.query_tiles(kv_tile)))))
        progress = False
        for kv_tile, head, tiles in reversed(resident):
            while tiles and turns[head, tiles[0]] == tiling.rank(kv_tile, tiles[0], descending):
                turns[head, tiles.pop(0)] += 1
                progress = True
        done = [cta for cta in resident if not cta[2]]
        resident = [cta for cta in resident if cta[2]]
        assert progress or done, f"{len(resident)} CTAs wait for one that has not started"
