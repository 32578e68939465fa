"""Whether the CTAs of a launch take turns at dQ though nobody asks for the deterministic mode.

Then the first to add to a share of dQ stores it, and preprocess does not write the zeros that all others are added to.
"""

from __future__ import annotations

from undertow.kernels.sm90.parts import WAVE
from undertow.kernels.sm90.plan import TILE_N
from undertow.plan.attention import Attention
from undertow.plan.tiles import Band

MOST_ADDERS = 16  # key/value tiles that add to a query tile
MOST_ALONE = 32  # the same where every query head has keys of its own,
MOST_DIVIDED = 8  # and where there is a mask and groups are divided
ITEMS_PER_CTA = 8


def takes_turns(attention: Attention, group: int, seqlen_k: int, band: Band, items: int) -> bool:
    """Whether turns cost less than the zeros, which are a fixed part of a pass and a large one of short passes.

    attention: with its groups divided or not. group: query heads to a head of keys. seqlen_k: keys of a sequence, in
    the mean where sequences are packed. items: of the launch.

    Measured on an H200 (`docs/hopper.md`): whole passes of 64k tokens take 3 to 12% less at 512 to 2048 rows, with
    turns, 1 to 2% at 4096 if there are no groups, and as long or longer beyond. Launches with a few items for every CTA
    take up to 20% longer, because their CTAs begin together and wait for one another. With a softcap nothing was
    measured, and nothing is done.
    """
    left, right = band
    adders = -(-seqlen_k // TILE_N)
    if left is not None and right is not None:
        adders = min(adders, max(0, left + right) // TILE_N + 2)
    most = MOST_ALONE if group == 1 else MOST_DIVIDED if attention.split and attention.masked else MOST_ADDERS
    return not attention.softcap and adders <= most and items >= ITEMS_PER_CTA * WAVE
