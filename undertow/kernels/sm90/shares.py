"""How many key/value tiles a CTA takes: as many as pay for filling and draining, few enough to keep all SMs busy.

Standard library only.
"""

from __future__ import annotations

START = 3  # what filling and draining a CTA costs, in query tiles
MOST_TILES = 64  # query tiles of a CTA; more gain nothing, and CTAs of unequal work would end at unequal times


def items_per_cta(items: int, tiles: int, multiprocessors: int) -> int:
    """The number of items that makes the last CTA end first, if all items are alike.

    items: key/value tiles of the launch. tiles: query tiles that an item visits. multiprocessors: each takes one CTA.
    """
    most = max(1, min(MOST_TILES // max(1, tiles), items))
    return min(range(1, most + 1), key=lambda number: (_tiles_until_end(items, tiles, multiprocessors, number), number))


def _tiles_until_end(items: int, tiles: int, multiprocessors: int, number: int) -> int:
    ctas = -(-items // number)
    return -(-ctas // multiprocessors) * (number * tiles + START)
