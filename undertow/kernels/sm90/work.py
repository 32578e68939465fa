"""The share of a CTA: several key/value tiles, one after another, in the order of `undertow.plan.grid`.

Between two of them nothing drains: the first scores of the next are computed in the burst that adds up the last of the
one before. Where sequences are short this is most of the time. What the items are is worked out once, by one thread
each, and read from shared memory by whoever gets there: divisions and bisections would hold up every role.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from undertow.kernels.sm90.plan import MOST_ITEMS
from undertow.kernels.sm100.bind import SharedMemory
from undertow.kernels.sm100.sequences import Rows, dense_rows
from undertow.kernels.sm100.work import Packings, Scalars, Work, kv_tiles, work_of
from undertow.plan.schema import Plan

DENSE_WORDS = ("kv_tile", "kv_head", "batch", "group", "first_tile", "end_tile", "first_unmasked", "end_unmasked")
PACKED_WORDS = (*DENSE_WORDS, "workspace_tile", "q_first", "q_used", "k_first", "k_kept", "k_used")


@dataclass(frozen=True)
class ShareScalars(Scalars):
    """The run-time numbers of a launch. items_per_cta: how many key/value tiles a CTA takes, the last CTA fewer."""

    items_per_cta: Int32


def any_scalars() -> ShareScalars:
    """Numbers to compile with: all of them are parameters of the kernel."""
    return ShareScalars(*[Int32(1)] * 4, *[Float32(1.0)] * 4, Int32(1))


@dataclass(frozen=True)
class Share:
    """The items of a CTA, [0, count). extents: rows of the tensors of query rows, and of those of keys."""

    plan: cutlass.Constexpr
    scalars: ShareScalars
    smem: SharedMemory
    extents: tuple[Int32, Int32]
    count: Int32

    def work(self, item: Int32) -> Work:
        """What an item is."""
        names = PACKED_WORDS if self.plan.attention.packed else DENSE_WORDS
        words = _words(self.smem)
        of = {name: words[index, item] for index, name in enumerate(names)}
        queries, keys = self.extents
        q, k = dense_rows(queries), dense_rows(keys)
        if self.plan.attention.packed:
            q = Rows(of["q_first"], of["q_used"], of["q_used"], queries)  # how many are kept no role asks
            k = Rows(of["k_first"], of["k_kept"], of["k_used"], keys)
        bounds = (self.scalars.left, self.scalars.right)
        place, tiles = ([of[name] for name in part] for part in (DENSE_WORDS[:4], DENSE_WORDS[4:]))
        return Work(self.plan, *place, q, k, of.get("workspace_tile", Int32(0)), *bounds, *tiles)


def num_items(plan: Plan, mdK: cute.Tensor, packings: Packings | None) -> Int32:
    """Key/value tiles of a launch."""
    batches, seqlen_k, kv_heads, _ = mdK.shape
    return kv_tiles(plan, seqlen_k, packings) * kv_heads * batches


@cute.jit
def share(smem: SharedMemory, scalars: ShareScalars, of: tuple, packings: Packings | None) -> Share:
    """The share of this CTA; its items are in shared memory after the next barrier of the CTA.

    of: mdK, (batch, seqlen_k, kv_heads, 64), and the number of query heads.
    """
    mdK, query_heads = of
    plan = smem.plan
    number, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    first = number * scalars.items_per_cta
    count = cutlass.min(scalars.items_per_cta, num_items(plan, mdK, packings) - first)
    if thread < count:
        work = work_of(plan, scalars, mdK, query_heads, packings, first + thread)
        words = _words(smem)
        for index, word in enumerate(_of_item(work)):
            words[index, thread] = word
    return Share(plan, scalars, smem, (scalars.seqlen_q, mdK.shape[1]), count)


def _of_item(work: Work) -> list[Any]:
    words = [getattr(work, name) for name in DENSE_WORDS]
    if work.plan.attention.packed:
        words += [work.workspace_tile, work.q.first, work.q.used, work.k.first, work.k.kept, work.k.used]
    return words


def _words(smem: SharedMemory) -> cute.Tensor:
    """The region as (words of an item, items)."""
    region = smem.plan.smem_region("sItems")
    pointer = cute.recast_ptr(smem.base + smem.plan.smem_offsets["sItems"], dtype=Int32)
    return cute.make_tensor(pointer, cute.make_layout((region.columns, MOST_ITEMS), stride=(1, region.columns)))
