"""Picture of the tiles of a head under several masks: which are visited, which are masked, who adds to dQ when."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.plan.attention import Attention
from undertow.plan.drawing import MUTED, Drawing
from undertow.plan.tiles import Band, Tiling

TILES = 5  # of queries and of keys
CELL, LEFT, TOP, GAP = 42, 78, 84, 34  # pixels: a tile, row names, above the first row, between panels
VISITED, SKIPPED = "#cfe2fb", "#f1f2f4"


def tile_turns(bands: Sequence[tuple[str, Band]]) -> str:
    """SVG with a panel per mask: `bands` are its name and its bounds in tiles.

    A column is a CTA, numbered in the order in which CTAs start in deterministic mode. The number in a tile says how
    many CTAs add to that dQ before this one does.
    """
    panel = TILES * CELL + GAP
    width, height = LEFT + len(bands) * panel, TOP + TILES * CELL + 68
    drawing = Drawing(width, height, "Tiles and turns: " + ", ".join(name for name, _ in bands))
    for index, (name, bounds) in enumerate(bands):
        _panel(drawing, LEFT + index * panel, name, bounds)
    for row in range(TILES):
        drawing.text(LEFT - 12, TOP + row * CELL + 26, f"dQ {row}", anchor="end", ink=MUTED)
    drawing.text(LEFT - 12, TOP - 12, "CTA", anchor="end", ink=MUTED)
    below = TOP + TILES * CELL + 26
    drawing.text(24, below, "number: how many CTAs add to that dQ before this one; hatched: a tile with a mask")
    drawing.text(24, below + 22, "a CTA goes down its column; a grey tile has no pair and no trip")
    return drawing.svg()


def _panel(drawing: Drawing, left: float, name: str, bounds: Band) -> None:
    """One mask: key tiles are columns, query tiles are rows, and a tile is one row and one key."""
    tiling = Tiling(TILES, TILES, bounds, 1, 1)
    attention = Attention(left=bounds.left is not None, right=bounds.right is not None, deterministic=True)
    descending = attention.descending
    drawing.text(left, TOP - 48, f"**{name}**", size=17)
    drawing.text(left, TOP - 30, f"{'descending' if descending else 'ascending'} order", size=13, ink=MUTED)
    diagonal = _edges(tiling)
    for key in range(TILES):
        number = TILES - key if descending else key + 1
        drawing.text(left + key * CELL + CELL / 2, TOP - 10, str(number), anchor="middle", ink=MUTED)
        visited = range(*tiling.query_tiles(key))
        for row in range(TILES):
            x, y = left + key * CELL, TOP + row * CELL
            drawing.box(x, y, CELL, CELL, VISITED if row in visited else SKIPPED)
            if row not in visited:
                continue
            if (row, key) in diagonal:
                drawing.hatch(x, y, CELL, CELL)
            rank = tiling.rank(key, row, descending)
            drawing.text(x + CELL / 2, y + 27, f"**{rank}**", size=17, anchor="middle")


def _edges(tiling: Tiling) -> set[tuple[int, int]]:
    """Tiles on the rim of the band. In whole tiles they are seen whole; of their rows and keys some pairs are not."""
    left, right = tiling.band
    at = {distance for distance in (None if left is None else -left, right) if distance is not None}
    return {(row, row + distance) for row in range(TILES) for distance in at}
