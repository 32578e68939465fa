"""Which query tiles a key/value tile visits, which of them need a mask, and who else adds to the same dQ tile.

Causal masks and windows are one thing, a band: query row i sees the keys from c - left to c + right, both inclusive,
where c = i + seqlen_k - seqlen_q lines the last row up with the last key. A bound of None does not exist; zero and
negative numbers are bounds like any other. All pairs that are seen make a band along the diagonal, so that the tiles
that hold one are consecutive, for a key/value tile as for a query tile.

Only integers go in and out, and minimum, maximum and choice are arguments: a kernel traces these very functions with
its registers in the place of numbers, and what is tested here is what runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

UNREACHABLE = 2**30  # a distance between a row and a key that no pair has
MAX_SEQLEN = 2**29  # so that sums of two lengths and a bound stay in 32 bits


class Band(NamedTuple):
    """Bounds of the keys that a row sees, relative to c; None is no bound."""

    left: Any = None
    right: Any = None


EVERYTHING = Band()


def band(causal: bool = False, window: tuple[int | None, int | None] = (None, None)) -> Band:
    """The tighter of a causal mask (right = 0) and a window, within 32 bits.

    A window without a single key (left + right < 0) becomes one that is out of everybody's reach.
    """
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is not None and right is not None and left + right < 0:
        return Band(-UNREACHABLE, -UNREACHABLE)
    return Band(*(None if bound is None else max(-UNREACHABLE, min(bound, UNREACHABLE)) for bound in (left, right)))


class Span(NamedTuple):
    """Consecutive rows or tiles: first, and one past the last; empty where they are equal."""

    first: Any
    end: Any

    @property
    def count(self) -> Any:
        return self.end - self.first


class Arithmetic(NamedTuple):
    """What integers need besides operators; `choose(condition, a, b)` is a where the condition holds, else b."""

    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    choose: Callable[[Any, Any, Any], Any]


INTEGERS = Arithmetic(min, max, lambda condition, a, b: a if condition else b)


@dataclass(frozen=True)
class Tiling:
    """The tiles of one sequence of one head. Lengths up to MAX_SEQLEN; `band` as the function of that name gives it."""

    seqlen_q: Any
    seqlen_k: Any
    band: Band = EVERYTHING
    tile_m: int = 128
    tile_n: int = 128
    arithmetic: Arithmetic = INTEGERS

    def query_tiles(self, kv_tile: Any) -> Span:
        """The query tiles that hold a pair with a key of `kv_tile`: those that the tile loop visits."""
        keys = self._existing(kv_tile, self.tile_n, self.seqlen_k)
        seeing = self._clipped(
            Span(self.rows_that_see(keys.first).first, self.rows_that_see(keys.end - 1).end), self.seqlen_q
        )
        return self._tiles(seeing, self.tile_m, keys.count > 0)

    def kv_tiles(self, query_tile: Any) -> Span:
        """The key/value tiles that hold a pair with a row of `query_tile`: those whose dS reaches its dQ."""
        rows = self._existing(query_tile, self.tile_m, self.seqlen_q)
        seen = self._clipped(
            Span(self.keys_seen_by(rows.first).first, self.keys_seen_by(rows.end - 1).end), self.seqlen_k
        )
        return self._tiles(seen, self.tile_n, rows.count > 0)

    def unmasked_query_tiles(self, kv_tile: Any) -> Span:
        """Those of `query_tiles` in which every existing row sees every existing key: they need no mask."""
        low, high, choose = self.arithmetic.minimum, self.arithmetic.maximum, self.arithmetic.choose
        visited = self.query_tiles(kv_tile)
        keys = self._existing(kv_tile, self.tile_n, self.seqlen_k)
        from_row, to_row = self.rows_that_see(keys.end - 1).first, self.rows_that_see(keys.first).end
        first, end = visited
        if from_row is not None:
            first = low(high((high(from_row, 0) + self.tile_m - 1) // self.tile_m, first), end)
        if to_row is not None:
            whole = choose(to_row >= self.seqlen_q, end, high(to_row, 0) // self.tile_m)
            end = high(low(whole, end), first)
        return Span(first, end)

    def rank(self, kv_tile: Any, query_tile: Any, descending: bool) -> Any:
        """How many key/value tiles add to the dQ of `query_tile` before `kv_tile` does, if they add in order."""
        tiles = self.kv_tiles(query_tile)
        return tiles.end - 1 - kv_tile if descending else kv_tile - tiles.first

    def rows_that_see(self, key: Any) -> Span:
        """The rows that see a key, without regard to which rows exist; None where there is no bound."""
        left, right = self.band
        diagonal = key + self.seqlen_q - self.seqlen_k
        return Span(None if right is None else diagonal - right, None if left is None else diagonal + left + 1)

    def keys_seen_by(self, row: Any) -> Span:
        """The keys that a row sees, without regard to which keys exist; None where there is no bound."""
        left, right = self.band
        centre = row + self.seqlen_k - self.seqlen_q
        return Span(None if left is None else centre - left, None if right is None else centre + right + 1)

    def _existing(self, tile: Any, size: int, length: Any) -> Span:
        """Rows or keys of a tile that exist; the end lies before the first where the tile does not exist."""
        return Span(tile * size, self.arithmetic.minimum((tile + 1) * size, length))

    def _clipped(self, span: Span, length: Any) -> Span:
        first, end = span
        return Span(
            0 if first is None else self.arithmetic.maximum(first, 0),
            length if end is None else self.arithmetic.minimum(end, length),
        )

    def _tiles(self, span: Span, size: int, exists: Any) -> Span:
        """The tiles that a span lies in; none if it is empty, which an end before its first also says."""
        first = span.first // size
        end = (self.arithmetic.maximum(span.end, 0) + size - 1) // size
        return Span(first, self.arithmetic.choose((span.first < span.end) & exists, end, first))
