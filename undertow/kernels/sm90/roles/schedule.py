"""The schedule warp: claims items for the CTA, one after another, and says what they are.

Claims are made by an atomic addition, in the order of `undertow.plan.grid`. So CTAs that run at the same time work on
neighbours, which share what they read, and nobody is idle before the last item is claimed. For both, claims are made
late: when the load warp has brought all but the last query tiles of the item before. In deterministic mode an item
waits for items with smaller numbers only; those were claimed before, by CTAs that run, and late claims keep what is
claimed and not begun from holding up the turns after it.

Nobody hears of a tile that no query row sees: this warp writes its zeros itself. The other roles finish an item in the
bursts of the next one, so they could not let go of it if more tiles without work followed than there are stages.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from undertow.kernels.sm90.context import ScheduleContext
from undertow.kernels.sm90.plan import ITEM_AHEAD, ITEM_PIPELINES, ITEM_STAGES
from undertow.kernels.sm90.roles.epilogue import ROWS_PER_STEP, VECTORS
from undertow.kernels.sm90.work import EXISTS, described, parts_of, words_of
from undertow.kernels.sm100.arguments import VECTOR_BYTES
from undertow.kernels.sm100.instructions import opaque, store_vector
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE
from undertow.kernels.sm100.sequences import LANES
from undertow.kernels.sm100.work import Work, grid_of, work_of


@cute.jit
def schedule(c: ScheduleContext):
    """Claim items until there are none, or as many as the CTA may have; then say that there are no more."""
    total = grid_of(c.plan, c.scalars, _extents(c), c.packings).num_ctas
    item, claims, exists = Int32(0), Int32(0), Int32(1)
    while exists > 0:
        for name in ITEM_PIPELINES:
            c.channels[name].wait("empty", item - (ITEM_AHEAD if name == "schedule_load_item" else ITEM_STAGES))
        number = _claim(c) if claims < c.scalars.most_items else total
        claims += 1
        exists, is_empty = Int32(number < total), Int32(0)
        if exists > 0:
            if cutlass.const_expr(c.plan.attention.split):
                _write_keys(c, item, number)
            work = work_of(c.plan, c.scalars, _extents(c), c.query_heads, c.packings, number)
            is_empty = Int32(work.trips == 0)
            if is_empty > 0:
                _write_zeros(c, work, number)
            else:
                _write(c, item, described(work), Int32(1))
        else:
            _write(c, item, [], Int32(0))
        if is_empty == 0:
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


def _extents(c: ScheduleContext) -> tuple[Int32, Int32, Int32]:
    """As `work_of` wants them: every part of a group is a key/value head. Nothing is kept in registers for it."""
    batches, seqlen_k, kv_heads, _ = c.mdK.shape
    return batches, seqlen_k, kv_heads * opaque(parts_of(c.scalars)) if c.plan.attention.split else kv_heads


@cute.jit
def _write_keys(c: ScheduleContext, item: Int32, number: Int32):
    """The words of `work.KEY_WORDS`, by one lane; early, because the warp has few registers for what comes next."""
    place = grid_of(c.plan, c.scalars, _extents(c), c.packings).place(number)
    if cute.arch.lane_idx() == 0:
        of_item = words_of(c.smem, item)
        for index, word in enumerate((place.kv_head // parts_of(c.scalars), place.kv_tile)):
            of_item[EXISTS + 1 + index] = word


@cute.jit
def _write_zeros(c: ScheduleContext, work: Work, number: Int32):
    """Write the dK and dV of a tile that no query row sees, or its part of their sums."""
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(c.plan.attention.split):
        tile = grid_of(c.plan, c.scalars, _extents(c), c.packings).place(number).kv_tile
        first = c.mPartial[work.batch, work.kv_head, Int64(tile), None].iterator
        for step in cutlass.range(2 * DQ_ACCUMULATOR_TILE // (4 * LANES), unroll=1):
            store_vector("global", (first + (step * LANES + lane) * 4).toint(), [Float32(0.0)] * 4)
    else:
        start = work.kv_tile * c.plan.tile_n
        for step in cutlass.range(c.plan.tile_n // ROWS_PER_STEP, unroll=1):
            key = start + step * ROWS_PER_STEP + lane // VECTORS
            for target in (c.mdV, c.mdK):
                row = target[work.batch, work.k.first + key, work.kv_head, None].iterator
                address = row.toint() + lane % VECTORS * VECTOR_BYTES
                store_vector("global", address, [Int32(0)] * 4, predicate=key < work.k.kept)


@cute.jit
def _write(c: ScheduleContext, item: Int32, words: list, exists: Int32):
    """By one lane."""
    if cute.arch.lane_idx() == 0:
        of_item = words_of(c.smem, item)
        for index, word in enumerate(words):
            of_item[index] = word
        of_item[EXISTS] = exists
