"""The reduce warps: add each tile's dQ to the fp32 accumulator in global memory, one warp per compute warpgroup.

A compute warpgroup stages its share, 64 query rows, in a buffer of its own, and arrives at `dq_full`; the warp starts
one bulk reduce-add and, when that has read the buffer, arrives at `dq_empty`. The compute warps own the proxy fence
between their stores and the bulk operation. One elected lane issues and awaits all bulk operations, because bulk groups
are counted per thread.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from undertow.kernels.sm100.instructions import bulk_reduce_add
from undertow.kernels.sm90.bind import arrive_of, sync_of
from undertow.kernels.sm90.context import ReduceContext


@cute.jit
def reduce(c: ReduceContext):
    """Process all query tiles in order, and leave when every sum has reached global memory.

    Warpgroup 0 is one tile late: what it stages in its first burst is no tile's.
    """
    head, tile = Int32(0), c.work.first_tile
    if c.work.trips > 0:
        if c.owner == 0:
            arrive_of(c.plan, "dq_empty", c.owner)
            sync_of(c.plan, "dq_full", c.owner)
        for _ in cutlass.range(c.work.trips, unroll=1):
            arrive_of(c.plan, "dq_empty", c.owner)
            sync_of(c.plan, "dq_full", c.owner)
            _add(c, head, tile)
            head, tile = c.work.after(head, tile)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _add(c: ReduceContext, head: Int32, tile: Int32):
    """Add the staged share to the accumulator, and wait until it has been read."""
    region = c.plan.smem_region("sdQ")
    share = region.rows * region.columns
    tiles = c.mdQ_accumulator[c.work.batch, c.work.query_head(head), Int64(c.work.workspace_tile + tile), None]
    with cute.arch.elect_one():
        bulk_reduce_add(tiles.iterator + c.owner * share, c.smem.pointer("sdQ", c.owner), region.stage_bytes)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


