"""In which order the CTAs of a launch take their work, as integers: linear CTA number to key/value tile and head.

The hardware starts CTAs in the order of their numbers (not promised by the CUDA programming guide, relied upon for
speed). CTAs that run at the same time share what they read through L2, so heads come in bundles whose query side fits
there; within a bundle all heads take their first tile, then all their second, so that, where tiles differ in work, the
long ones start first and the short ones fill the end. The heads of a batch element follow those of the one before, and
a bundle may have heads of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from undertow.plan.tiles import INTEGERS, Arithmetic

L2_BYTES = 48 * 2**20  # of the query side of a bundle: less than half of a B200's 126 MB, for its two halves
ROW_BYTES = 2 * 64 * 2 + 64 * 4 + 2 * 4  # Q, dO and the fp32 dQ of one query row, its LSE and D


class Place(NamedTuple):
    """What one CTA owns."""

    kv_tile: Any
    kv_head: Any
    batch: Any


@dataclass(frozen=True)
class Grid:
    """All CTAs of a launch. heads_per_bundle: key/value heads whose CTAs are interleaved."""

    kv_tiles: Any
    kv_heads: Any
    batches: Any
    heads_per_bundle: Any = 1
    descending: bool = False
    arithmetic: Arithmetic = INTEGERS

    @property
    def num_ctas(self) -> Any:
        return self.kv_tiles * self.kv_heads * self.batches

    def place(self, number: Any) -> Place:
        """What the CTA of a linear number owns: bundles one after another, tiles, heads fastest."""
        bundle, within = _divided(number, self.kv_tiles * self.heads_per_bundle)
        first = bundle * self.heads_per_bundle
        heads = self.arithmetic.minimum(self.heads_per_bundle, self.kv_heads * self.batches - first)  # the last: fewer
        tile, head = _divided(within, heads)
        batch, kv_head = _divided(first + head, self.kv_heads)
        return Place(self.kv_tiles - 1 - tile if self.descending else tile, kv_head, batch)


def heads_per_bundle(seqlen_q: int, group: int, most: int, l2_bytes: int = L2_BYTES) -> int:
    """Key/value heads, of `most`, whose query side fits in `l2_bytes` together; `group` query heads to a head."""
    return max(1, min(most, l2_bytes // max(1, seqlen_q * group * ROW_BYTES)))


def _divided(number: Any, by: Any) -> tuple[Any, Any]:
    quotient = number // by
    return quotient, number - quotient * by
