"""In how many parts the query heads of a group are divided between CTAs."""

from __future__ import annotations

from undertow.plan.attention import Attention

MOST_HEADS = 4  # query heads to an item
MOST_ROWS = 2**16  # query rows that one accumulator of dK or dV sums


def parts_of(attention: Attention, group: int, rows: int) -> int:
    """Parts of a group of query heads; each has an equal share of them, and 1 means that groups stay whole.

    rows: query rows of a head, in the mean where sequences are packed.

    The fewest parts that leave an item at most `MOST_HEADS` query heads and `MOST_ROWS` rows, if there are such.
    """
    del attention
    found = (parts for parts in range(1, group + 1) if group % parts == 0)
    fitting = (parts for parts in found if group // parts <= MOST_HEADS and group // parts * rows <= MOST_ROWS)
    return next(fitting, group)
