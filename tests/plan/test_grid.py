"""The order of the CTAs: everybody gets a place, nobody the same, long tiles and shared heads first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from undertow.plan.attention import Attention
from undertow.plan.grid import L2_BYTES, ROW_BYTES, Grid, Place, heads_per_bundle

SMALL = st.integers(1, 6)


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
