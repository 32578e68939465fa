"""The reduce warps: add each tile's dQ to the fp32 accumulator in global memory, one warp per compute warpgroup.

A compute warpgroup stages its share, 64 query rows, in a buffer of its own, and arrives at `dq_full`; the warp starts
one bulk reduce-add and, when that has read the buffer, arrives at `dq_empty`. The compute warps own the proxy fence
between their stores and the bulk operation. One elected lane issues and awaits all bulk operations, because bulk groups
are counted per thread. In deterministic mode it also waits for the CTA's turn at the share, and passes it on, as on
SM100.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from undertow.kernels.events import span
from undertow.kernels.sm90.bind import arrive_of, sync_of
from undertow.kernels.sm90.context import ReduceContext
from undertow.kernels.sm90.plan import WARPGROUPS
from undertow.kernels.sm100.instructions import bulk_reduce_add


@cute.jit
def reduce(c: ReduceContext):
    """Process all query tiles in order, and leave when every sum has reached global memory.

    Warpgroup 0 is one tile late: what it stages in its first burst is no tile's.
    """
    head, tile = Int32(0), c.work.first_tile
    if c.work.trips > 0:
        arrive_of(c.plan, "dq_empty", c.owner)
        if c.owner == 0:
            sync_of(c.plan, "dq_full", c.owner)
            arrive_of(c.plan, "dq_empty", c.owner)
        for trip in cutlass.range(c.work.trips, unroll=1):
            if cutlass.const_expr(c.plan.attention.deterministic):
                _take_turn(c, head, tile)  # while the share is being computed
            sync_of(c.plan, "dq_full", c.owner)
            _add(c, head, tile)
            if trip + 1 < c.work.trips:
                arrive_of(c.plan, "dq_empty", c.owner)
            if cutlass.const_expr(c.plan.attention.deterministic):
                _pass_turn(c, head, tile)
            head, tile = c.work.after(head, tile)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _add(c: ReduceContext, head: Int32, tile: Int32):
    """Add the staged share to the accumulator, and wait until it has been read."""
    region = c.plan.smem_region("sdQ")
    share = region.rows * region.columns
    sums = c.mdQ_accumulator[c.work.batch, c.work.query_head(head), Int64(c.work.workspace_tile + tile), None]
    with span(c.plan, "add"), cute.arch.elect_one():
        bulk_reduce_add(sums.iterator + c.owner * share, c.smem.pointer("sdQ", c.owner), region.stage_bytes)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _take_turn(c: ReduceContext, head: Int32, tile: Int32):
    """Wait until as many CTAs as come before this one have added to the share."""
    with cute.arch.elect_one():
        rank = c.work.tiling.rank(c.work.kv_tile, tile, c.plan.attention.descending)
        turn = _turn(c, head, tile)
        passed = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
        while passed != rank:
            passed = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
        cute.arch.fence_proxy("async.global")  # what comes is an operation of the async proxy


@cute.jit
def _pass_turn(c: ReduceContext, head: Int32, tile: Int32):
    """Add one to the turns, once the sums have reached global memory: that they have been read is not enough."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        cute.arch.red(_turn(c, head, tile), Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


def _turn(c: ReduceContext, head: Int32, tile: Int32) -> cute.Pointer:
    """Where the turns of a share are counted."""
    turns = c.mTurns[c.work.batch, c.work.query_head(head), None]
    return turns.iterator + (c.work.workspace_tile + tile) * WARPGROUPS + c.owner
