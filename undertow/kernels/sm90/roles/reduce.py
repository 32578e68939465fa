"""The reduce warps: add each tile's dQ to the fp32 accumulator in global memory, one warp per compute warpgroup.

A compute warpgroup stages its share, 64 query rows, in a buffer of its own, and arrives at `dq_full`; the warp starts
one bulk reduce-add and, when that has read the buffer, arrives at `dq_empty`. The compute warps own the proxy fence
between their stores and the bulk operation. One elected lane issues and awaits all bulk operations, because bulk groups
are counted per thread. All lanes might close and await groups, those of the others being empty: kernels that add in
any order then took 3 to 4% longer on an H200.

In deterministic mode the warp also waits for the CTA's turn at the share, and passes it on, as on SM100. A turn is
taken, used and passed within one tile, or the warp falls behind the tensor cores: reading the buffer takes 1100 cycles
of some 3100 and the release that passes the turn 1100 more, so the 900 of asking for the next turn have to lie beside
the reading. The CTA that comes first knows it, and stores its share: nothing needs to be cleared before.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64

from undertow.kernels.events import span
from undertow.kernels.sm90.bind import arrive_of, sync_of
from undertow.kernels.sm90.context import ReduceContext
from undertow.kernels.sm90.plan import WARPGROUPS
from undertow.kernels.sm100.instructions import bulk_reduce_add, bulk_store
from undertow.kernels.sm100.work import Work


@cute.jit
def reduce(c: ReduceContext):
    """Process all query tiles of all items in order, and leave when every sum has reached global memory.

    Warpgroup 0 is one tile late: what it stages in its first burst is no tile's.
    """
    item = Int32(0)
    exists = c.items.wait(item)
    while exists > 0:
        work = c.items.work(item)
        c.items.release(item)
        if item == 0:
            _drop_first(c)
        if cutlass.const_expr(c.plan.attention.deterministic):
            _add_in_turn(c, work)
        else:
            _add_at_once(c, work)
        item += 1
        exists = c.items.wait(item)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _drop_first(c: ReduceContext):
    """Hand over the empty buffer; what warpgroup 0 stages first is no tile's."""
    arrive_of(c.plan, "dq_empty", c.owner)
    if c.owner == 0:
        sync_of(c.plan, "dq_full", c.owner)
        arrive_of(c.plan, "dq_empty", c.owner)


@cute.jit
def _add_at_once(c: ReduceContext, work: Work):
    """Add every share of an item as soon as it is staged."""
    head, tile = Int32(0), work.first_tile
    for _ in cutlass.range(work.trips, unroll=1):
        sync_of(c.plan, "dq_full", c.owner)
        _add(c, work, (head, tile), False)
        _have_been_read(c)
        head, tile = work.after(head, tile)


@cute.jit
def _add_in_turn(c: ReduceContext, work: Work):
    """Add every share when as many CTAs as come before this one have added theirs.

    All lanes ask, because what they learn outlives the branch of an elected one.
    """
    head, tile = Int32(0), work.first_tile
    turn, rank = _turn(c, work, head, tile), _rank(c, work, tile)
    passed = _passed(turn)
    for trip in cutlass.range(work.trips, unroll=1):
        while passed != rank:
            passed = _passed(turn)
        sync_of(c.plan, "dq_full", c.owner)
        with cute.arch.elect_one():
            cute.arch.fence_proxy("async.global")  # between the turn and an operation of the async proxy
        _add(c, work, (head, tile), rank == 0)
        own = turn
        head, tile = work.after(head, tile)
        if trip + 1 < work.trips:
            turn, rank = _turn(c, work, head, tile), _rank(c, work, tile)
            passed = _passed(turn)  # while the share is being read
        _have_been_read(c)
        _pass_turn(own)


@cute.jit
def _add(c: ReduceContext, work: Work, query: tuple[Int32, Int32], is_first: Boolean | Constexpr):
    """Start to add the staged share to the accumulator, or to store it there."""
    head, tile = query
    region = c.plan.smem_region("sdQ")
    share = region.rows * region.columns
    sums = c.mdQ_accumulator[work.batch, work.query_head(head), Int64(work.workspace_tile + tile), None]
    with span(c.plan, "add"), cute.arch.elect_one():
        whole = (sums.iterator + c.owner * share, c.smem.pointer("sdQ", c.owner), region.stage_bytes)
        if is_first:
            bulk_store(*whole)
        else:
            bulk_reduce_add(*whole)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _have_been_read(c: ReduceContext):
    """Hand the buffer back once all that was staged has been read."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    arrive_of(c.plan, "dq_empty", c.owner)


def _passed(turn: cute.Pointer) -> Int32:
    """How many CTAs have added to a share."""
    return cute.arch.load(turn, Int32, sem="acquire", scope="gpu")


def _rank(c: ReduceContext, work: Work, tile: Int32) -> Int32:
    """How many CTAs add to a query tile before this one."""
    return work.tiling.rank(work.kv_tile, tile, c.plan.attention.descending)


@cute.jit
def _pass_turn(turn: cute.Pointer):
    """Add one to the turns, once the sums have reached global memory: that they have been read is not enough."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        cute.arch.red(turn, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


def _turn(c: ReduceContext, work: Work, head: Int32, tile: Int32) -> cute.Pointer:
    """Where the turns of a share are counted."""
    turns = c.mTurns[work.batch, work.query_head(head), None]
    return turns.iterator + (work.workspace_tile + tile) * WARPGROUPS + c.owner
