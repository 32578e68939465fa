"""In how many parts the query heads of a group are divided between CTAs."""

from __future__ import annotations

from undertow.plan.attention import Attention

MOST_HEADS = 8  # query heads that one item visits where there is a mask
MOST_ROWS = 2**16  # query rows that one accumulator of dK or dV sums
WAVE = 128  # CTAs that run at once, about: an H200 has 132 multiprocessors


def parts_of(attention: Attention, group: int, rows: int, items: int) -> int:
    """Parts of a group of query heads; each has an equal share of them, and 1 means that groups stay whole.

    rows: query rows of a head, in the mean where sequences are packed. items: of a launch with whole groups.

    The fewest parts with which these hold, or else as many as there are heads:

    - At most `MOST_ROWS` rows to an accumulator, because the tensor cores truncate where they add up: fp16 errs by 1.44
      times the ideal after 262144 rows, by 1.03 after 65536 (H200).
    - At most `MOST_HEADS` heads to an item where items differ in length. CTAs of a head drift apart over the heads, and
      what they read and add to no longer meets in L2. Causal 32:1 of 512 rows took 2.12 million cycles with 32 heads to
      an item, 1.83, 1.41 and 1.32 with 16, 8 and 4, and adding up the parts 0.04, 0.08 and 0.14 (H200). Without a mask
      nothing is won: 1.79, and with 8 heads 1.91.
    - Groups of more heads than that fill a wave of CTAs.

    Smaller groups are divided for the sake of rows alone: parts cost a kernel and 64 KB each of every key/value tile.
    """
    is_large = group > MOST_HEADS
    found = (parts for parts in range(1, group + 1) if group % parts == 0)
    for parts in found:
        heads = group // parts
        short = heads <= MOST_HEADS or not attention.masked
        if heads * rows <= MOST_ROWS and (not is_large or (short and items * parts >= WAVE)):
            return parts
    return group
