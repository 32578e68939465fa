"""The share of a CTA: several key/value tiles, one after another, in the order of `undertow.plan.grid`.

Between two of them nothing drains: the first scores of the next are computed in the burst that adds up the last of the
one before. Where sequences are short this is most of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from undertow.kernels.sm100.work import Packings, Scalars, Work, kv_tiles, work_of


@dataclass(frozen=True)
class ShareScalars(Scalars):
    """The run-time numbers of a launch. items_per_cta: how many key/value tiles a CTA takes, the last CTA fewer."""

    items_per_cta: Int32


def any_scalars() -> ShareScalars:
    """Numbers to compile with: all of them are parameters of the kernel."""
    return ShareScalars(*[Int32(1)] * 4, *[Float32(1.0)] * 4, Int32(1))


@dataclass(frozen=True)
class Share:
    """The items [first, end) of a CTA: key/value tiles, as `undertow.plan.grid` numbers them.

    mdK: (batch, seqlen_k, kv_heads, 64).
    """

    plan: cutlass.Constexpr
    scalars: ShareScalars
    mdK: cute.Tensor
    query_heads: Int32
    packings: Any
    first: Int32
    end: Int32

    def work(self, number: Int32) -> Work:
        """What an item is."""
        return work_of(self.plan, self.scalars, self.mdK, self.query_heads, self.packings, number)


def num_items(plan: Any, mdK: cute.Tensor, packings: Packings | None) -> Int32:
    """Key/value tiles of a launch."""
    batches, seqlen_k, kv_heads, _ = mdK.shape
    return kv_tiles(plan, seqlen_k, packings) * kv_heads * batches


def share(plan: Any, scalars: ShareScalars, mdK: cute.Tensor, query_heads: Int32, packings: Packings | None) -> Share:
    """The share of this CTA."""
    number, _, _ = cute.arch.block_idx()
    first = number * scalars.items_per_cta
    end = cutlass.min(first + scalars.items_per_cta, num_items(plan, mdK, packings))
    return Share(plan, scalars, mdK, query_heads, packings, first, end)
