"""The order of the CTAs: everybody gets a place, nobody the same, long tiles and shared heads first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from undertow.plan.attention import Attention
from undertow.plan.grid import L2_BYTES, ROW_BYTES, Grid, Place, heads_per_bundle
from undertow.plan.tiles import Tiling, band

SMALL = st.integers(1, 6)
BOUNDS = st.none() | st.integers(-45, 45)


@given(SMALL, SMALL, SMALL, SMALL, st.booleans())
def test_every_tile_of_every_head_has_exactly_one_cta(tiles, heads, batches, bundle, descending):
    grid = Grid(tiles, heads, batches, min(bundle, heads), descending)
    places = [grid.place(number) for number in range(grid.num_ctas)]
    assert sorted(places) == [Place(t, h, b) for t in range(tiles) for h in range(heads) for b in range(batches)]


@given(SMALL, SMALL, SMALL, SMALL, st.booleans())
def test_tiles_of_a_head_come_in_order(tiles, heads, batches, bundle, descending):
    grid = Grid(tiles, heads, batches, min(bundle, heads), descending)
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


def test_bundles_fit_their_share_of_l2():
    for seqlen, group in ((1, 1), (512, 1), (4096, 8), (32768, 4)):
        heads = heads_per_bundle(seqlen, group, 64)
        assert 1 <= heads <= 64
        assert heads == 1 or heads * group * seqlen * ROW_BYTES <= L2_BYTES
        assert heads == 64 or (heads + 1) * group * seqlen * ROW_BYTES > L2_BYTES
    assert heads_per_bundle(0, 1, 3) == 3


def test_the_longest_tiles_come_first():
    """Causal: the first keys are seen by most rows. Bounded on the left only: the last ones."""
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
