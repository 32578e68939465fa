"""Regions of a plan that share tensor memory: findings in the words of the two regions.

`alias-lifetime` is `race` with a plan at hand: one region is written while another that lies over the same columns is
still to be read, or is read after it has been overwritten. The text names them as the plan's guards do: "P over S".
"""

from __future__ import annotations


def aliased(earlier: tuple[str, bool], later: tuple[str, bool]) -> str:
    """`P over S`: the region that is written over the one that is read; each side is (region, whether it is written).

    Where both sides write, the later one lies over the earlier one.
    """
    (first, first_writes), (second, second_writes) = earlier, later
    if first_writes and not second_writes:
        return f"{first} over {second}"
    return f"{second} over {first}"
