"""In how many parts the query heads of a group are divided between CTAs."""

from __future__ import annotations

from undertow.kernels.sm90.plan import TILE_M
from undertow.plan.attention import Attention

MOST_HEADS = 8  # query heads that one item visits where there is a mask
MOST_ROWS = 2**16  # query rows that one accumulator of dK or dV sums
WAVE = 128  # CTAs that run at once, about: an H200 has 132 multiprocessors
SHORT = 8  # query tiles of all its heads, with which an item is not divided to fill the machine


def parts_of(attention: Attention, group: int, rows: int, items: int) -> int:
    """Parts of a group of query heads; each has an equal share of them, and 1 means that groups stay whole.

    rows: query rows of a head, in the mean where sequences are packed. items: of a launch with whole groups.

    The fewest parts with which these hold, or else as many as there are heads. All of it was measured on an H200
    (`docs/hopper.md`).

    - At most `MOST_ROWS` rows to an accumulator, because the tensor cores truncate where they add up: fp16 errs by 1.44
      times the ideal after 262144 rows, by 1.03 after 65536.
    - At most `MOST_HEADS` heads to an item where items differ in length. CTAs of a head drift apart over the heads, and
      what they read and add to no longer meets in L2. Without a mask they do not.
    - A wave of items, two where they differ in length, unless they are `SHORT`.

    No more than that: each part writes 64 KB of every key/value tile, which another kernel reads.
    """
    tiles, wanted = -(-rows // TILE_M), WAVE * (2 if attention.masked else 1)
    for parts in range(1, group + 1):
        heads = group // parts
        fits = heads * rows <= MOST_ROWS and (heads <= MOST_HEADS or not attention.masked)
        if group % parts == 0 and fits and (items * parts >= wanted or heads * tiles <= SHORT):
            return parts
    return group
