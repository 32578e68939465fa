"""The reduce warps: add each tile's dQ to the fp32 accumulator in global memory, one warp per compute warpgroup.

A compute warpgroup stages its share, 64 query rows, in a buffer of its own, and arrives at `dq_full`; the warp starts
one bulk reduce-add and, when that has read the buffer, arrives at `dq_empty`. The compute warps own the proxy fence
between their stores and the bulk operation. One elected lane issues and awaits all bulk operations, because bulk groups
are counted per thread.

In deterministic mode the warp also waits for the CTA's turn at the share, and passes it on, as on SM100. A turn is
taken, used and passed within one tile, or the warp falls behind the tensor cores: reading the buffer takes 1100 cycles
of some 3100 and the release that passes the turn 1100 more, so the 900 of asking for the next turn have to lie beside
the reading.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from undertow.kernels.sm90.bind import arrive_of, sync_of
from undertow.kernels.sm90.context import ReduceContext
from undertow.kernels.sm90.plan import WARPGROUPS
from undertow.kernels.sm100.instructions import bulk_reduce_add


@cute.jit
def reduce(c: ReduceContext):
    """Process all query tiles in order, and leave when every sum has reached global memory.

    Warpgroup 0 is one tile late: what it stages in its first burst is no tile's.
    """
    if c.work.trips > 0:
        arrive_of(c.plan, "dq_empty", c.owner)
        if c.owner == 0:
            sync_of(c.plan, "dq_full", c.owner)
            arrive_of(c.plan, "dq_empty", c.owner)
        if cutlass.const_expr(c.plan.attention.deterministic):
            _add_in_turn(c)
        else:
            _add_at_once(c)


@cute.jit
def _add_at_once(c: ReduceContext):
    """Add every share as soon as it is staged."""
    head, tile = Int32(0), c.work.first_tile
    for trip in cutlass.range(c.work.trips, unroll=1):
        sync_of(c.plan, "dq_full", c.owner)
        _add(c, head, tile)
        _have_been_read(c, trip)
        head, tile = c.work.after(head, tile)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _add_in_turn(c: ReduceContext):
    """Add every share when as many CTAs as come before this one have added theirs.

    All lanes ask, because what they learn outlives the branch of an elected one.
    """
    head, tile = Int32(0), c.work.first_tile
    turn, rank = _turn(c, head, tile), _rank(c, tile)
    passed = _passed(turn)
    for trip in cutlass.range(c.work.trips, unroll=1):
        while passed != rank:
            passed = _passed(turn)
        with cute.arch.elect_one():
            cute.arch.fence_proxy("async.global")  # between the turn and an operation of the async proxy
        own, own_head, own_tile = turn, head, tile
        if trip + 1 < c.work.trips:
            head, tile = c.work.after(head, tile)
            turn, rank = _turn(c, head, tile), _rank(c, tile)
        sync_of(c.plan, "dq_full", c.owner)
        _add(c, own_head, own_tile)
        passed = _passed(turn)  # while the share is being read
        _have_been_read(c, trip)
        _pass_turn(own)


@cute.jit
def _add(c: ReduceContext, head: Int32, tile: Int32):
    """Start to add the staged share to the accumulator."""
    region = c.plan.smem_region("sdQ")
    share = region.rows * region.columns
    sums = c.mdQ_accumulator[c.work.batch, c.work.query_head(head), Int64(c.work.workspace_tile + tile), None]
    with cute.arch.elect_one():
        bulk_reduce_add(sums.iterator + c.owner * share, c.smem.pointer("sdQ", c.owner), region.stage_bytes)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _have_been_read(c: ReduceContext, trip: Int32):
    """Hand the buffer back, if there is a next share, once all that was staged has been read."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    if trip + 1 < c.work.trips:
        arrive_of(c.plan, "dq_empty", c.owner)


def _passed(turn: cute.Pointer) -> Int32:
    """How many CTAs have added to a share."""
    return cute.arch.load(turn, Int32, sem="acquire", scope="gpu")


def _rank(c: ReduceContext, tile: Int32) -> Int32:
    """How many CTAs add to a query tile before this one."""
    return c.work.tiling.rank(c.work.kv_tile, tile, c.plan.attention.descending)


@cute.jit
def _pass_turn(turn: cute.Pointer):
    """Add one to the turns, once the sums have reached global memory: that they have been read is not enough."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        cute.arch.red(turn, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


def _turn(c: ReduceContext, head: Int32, tile: Int32) -> cute.Pointer:
    """Where the turns of a share are counted."""
    turns = c.mTurns[c.work.batch, c.work.query_head(head), None]
    return turns.iterator + (c.work.workspace_tile + tile) * WARPGROUPS + c.owner
