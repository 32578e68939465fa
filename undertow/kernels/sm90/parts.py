"""In how many parts the query heads of a group are divided between CTAs."""

from __future__ import annotations

from undertow.kernels.sm90.plan import TILE_M
from undertow.plan.attention import Attention
from undertow.plan.schema import DType

MOST_ROWS = {DType.F16: 2**16, DType.BF16: 2**19}  # query rows that one accumulator of dK or dV sums
MASKED = (8, 2**17)  # query heads, and their rows, that one item visits where there is a mask
MASKED_IN_TURN = (4, 2**16)  # the same where CTAs take turns as well,
DIVIDED_IN_TURN = (4, 2**14)  # and where such groups are divided at all
WAVE = 128  # CTAs that run at once, about: an H200 has 132 multiprocessors
SHORT = 8  # query tiles of all its heads, with which an item is not divided to fill the machine


def parts_of(attention: Attention, dtype: DType, group: int, rows: int, items: int) -> int:
    """Parts of a group of query heads; each has an equal share of them, and 1 means that groups stay whole.

    rows: query rows of a head, in the mean where sequences are packed. items: of a launch with whole groups.

    The fewest parts with which these hold, or else as many as there are heads. All of it was measured on an H200
    (`docs/hopper.md`), but for windows in turn.

    - At most `MOST_ROWS` rows to an accumulator, because the tensor cores truncate where they add up: fp16 errs by 1.44
      times the ideal after 262144 rows, by 1.03 after 65536. What bf16 loses by its rounding is eight times as much: it
      errs by 1.05 after 524288.
    - Few heads and rows to an item where items differ in length. CTAs of a head drift apart over the heads, and what
      they read and add to no longer meets in L2. They do so sooner where they take turns, short items first. Without a
      mask they do not; in a window they are few.
    - A wave of items, two where they differ in length, unless they are `SHORT`.

    No more than that: each part writes 64 KB of every key/value tile, which another kernel reads.
    """
    tiles, wanted = -(-rows // TILE_M), WAVE * (2 if attention.masked else 1)
    for parts in range(1, group + 1):
        heads = group // parts
        most_heads, most_rows = _most(attention, dtype, parts > 1)
        fits = group % parts == 0 and heads <= (most_heads or heads) and heads * rows <= most_rows
        if fits and (items * parts >= wanted or heads * tiles <= SHORT):
            return parts
    return group


def _most(attention: Attention, dtype: DType, divided: bool) -> tuple[int | None, int]:
    """The most query heads (None: any number) and rows of them all that an item visits."""
    if not attention.masked:
        return None, MOST_ROWS[dtype]
    heads, rows = MASKED
    if attention.deterministic:
        heads, rows_in_turn = DIVIDED_IN_TURN if divided else MASKED_IN_TURN
        is_window = attention.left and attention.right  # of which an item visits a part, however many rows there are
        rows = rows if is_window else rows_in_turn
    return heads, min(rows, MOST_ROWS[dtype])
