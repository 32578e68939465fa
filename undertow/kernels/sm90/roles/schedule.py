"""The schedule warp: claims items for the CTA, one after another, and says what they are.

Claims are made by an atomic addition, in the order of `undertow.plan.grid`. So CTAs that run at the same time work on
neighbours, which share what they read, and nobody is idle before the last item is claimed. For both, claims are made
late: when the load warp has brought all but the last query tiles of the item before. In deterministic mode an item
waits for items with smaller numbers only; those were claimed before, by CTAs that run, and late claims keep what is
claimed and not begun from holding up the turns after it.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from undertow.kernels.sm90.context import ScheduleContext
from undertow.kernels.sm90.plan import ITEM_AHEAD, ITEM_PIPELINES, ITEM_STAGES
from undertow.kernels.sm90.work import EXISTS, described, words_of
from undertow.kernels.sm100.work import kv_tiles, work_of


@cute.jit
def schedule(c: ScheduleContext):
    """Claim items until there are none, or as many as the CTA may have; then say that there are no more."""
    batches, seqlen_k, kv_heads, _ = c.mdK.shape
    total = kv_tiles(c.plan, seqlen_k, c.packings) * kv_heads * batches
    item, exists = Int32(0), Int32(1)
    while exists > 0:
        for name in ITEM_PIPELINES:
            c.channels[name].wait("empty", item - (ITEM_AHEAD if name == "schedule_load_item" else ITEM_STAGES))
        number = _claim(c) if item < c.scalars.most_items else total
        exists = Int32(number < total)
        if exists > 0:
            work = work_of(c.plan, c.scalars, c.mdK, c.query_heads, c.packings, number)
            _write(c, item, described(work), Int32(1))
        else:
            _write(c, item, [], Int32(0))
        cute.arch.sync_warp()
        for name in ITEM_PIPELINES:
            c.channels[name].arrive("full", item)
        item += 1


@cute.jit
def _claim(c: ScheduleContext) -> Int32:
    """The number of the next item of the launch, or one that does not exist."""
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(c.mClaims.iterator, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(number, 0)


@cute.jit
def _write(c: ScheduleContext, item: Int32, words: list, exists: Int32):
    """By one lane."""
    if cute.arch.lane_idx() == 0:
        of_item = words_of(c.smem, item)
        for index, word in enumerate(words):
            of_item[index] = word
        of_item[EXISTS] = exists
