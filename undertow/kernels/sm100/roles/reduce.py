"""The reduce warps: add each tile's dQ to the fp32 accumulator in global memory.

A thread has one query row. TMEM is handed back as soon as the row is in registers; staging and the bulk reduce-add go
on from shared memory. One thread issues and awaits all bulk operations, because bulk groups are counted per thread: the
elected lane of the leader warp, which is the same lane every time (PTX ISA, elect.sync). This role owns the proxy fence
between the staging stores and the bulk operation that reads them.

In deterministic mode that thread also waits for the CTA's turn at a query tile and passes it on. CTAs that come before
have smaller numbers; the mode relies on the hardware to start CTAs in the order of their numbers, as other
implementations do, because a CTA that has not started could never pass its turn.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from undertow.kernels.events import span
from undertow.kernels.sm100.bind import barrier
from undertow.kernels.sm100.context import ReduceContext
from undertow.kernels.sm100.instructions import bulk_reduce_add, store_vector, tmem_load
from undertow.kernels.sm100.plan import dq_accumulator_index
from undertow.plan.schedule import synchronised_program
from undertow.plan.steps import Join, Load, PassTurn, Signal, Store, SynchronisedStep, TakeTurn, Wait

VECTOR = 4  # fp32 columns of one 16-byte store
LOAD_COLUMNS = 32  # of one tcgen05.ld


@cute.jit
def reduce(c: ReduceContext):
    """Process all query tiles in order, and leave when every sum has reached global memory."""
    program = synchronised_program(c.plan, "reduce")
    head, tile = Int32(0), c.work.first_tile
    for trip in cutlass.range(c.work.trips, unroll=1):
        dq = []
        for step in program:
            _run(c, step, trip, (head, tile), dq)
        head, tile = c.work.after(head, tile)
    if c.is_leader:
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)


def _run(c: ReduceContext, step: SynchronisedStep, trip: Int32, query: tuple[Int32, Int32], dq: list[Int32]) -> None:
    """Execute one step. query: head and tile. `dq` holds the thread's row once it is loaded."""
    if isinstance(step, Wait):
        c.channels[step.pipeline].wait(step.side, trip + step.tile)
    elif isinstance(step, Load):
        with span(c.plan, "tmem"):
            dq += _load(c, step.region)
    elif isinstance(step, Join):
        cute.arch.sync_warp()
    elif isinstance(step, Signal):
        c.channels[step.pipeline].arrive(step.side, trip + step.tile)
    elif isinstance(step, Store):
        for stage in step.stages:
            _take_stage(c)
            _fill_stage(c, step.region, stage, dq)
            _add_stage(c, step.region, stage, query)
    elif isinstance(step, TakeTurn):
        _take_turn(c, query[0], query[1])
    elif isinstance(step, PassTurn):
        _pass_turn(c, query[0], query[1])


def _load(c: ReduceContext, region: str) -> list[Int32]:
    tmem = c.plan.tmem_region(region)
    row: list[Int32] = []
    for column in range(tmem.column, tmem.end, LOAD_COLUMNS):
        row += tmem_load(c.tmem + column, LOAD_COLUMNS)
    cute.arch.fence_view_async_tmem_load()
    return row


@cute.jit
def _take_stage(c: ReduceContext):
    """Wait until the oldest stage has been read by its bulk operation, so that all warps may write it."""
    if c.is_leader:
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(c.plan.smem_region("sdQ").stages - 1, read=True)
    barrier(c.plan, "reduce")


def _fill_stage(c: ReduceContext, region: str, stage: int, dq: list[Int32]) -> None:
    """Store the thread's columns of `stage` in the accumulator's order, visible to the async proxy."""
    columns = c.plan.smem_region(region).columns
    row = c.smem.address(region, stage) + c.row * (4 * dq_accumulator_index(1, 0))
    first = dq_accumulator_index(0, stage * columns)
    for column in range(stage * columns, (stage + 1) * columns, VECTOR):
        store_vector("shared", row + 4 * (dq_accumulator_index(0, column) - first), dq[column : column + VECTOR])
    cute.arch.fence_view_async_shared()


@cute.jit
def _add_stage(c: ReduceContext, region: Constexpr, stage: Constexpr, query: tuple[Int32, Int32]):
    """Add the stage to the accumulator, once all warps have written it."""
    barrier(c.plan, "reduce")
    if c.is_leader:
        smem = c.plan.smem_region(region)
        first = dq_accumulator_index(0, stage * smem.columns)
        head, tile = c.work.query_head(query[0]), c.work.workspace_tile + query[1]
        target = c.mdQ_accumulator[c.work.batch, head, Int64(tile), None].iterator + first
        with cute.arch.elect_one():
            bulk_reduce_add(target, c.smem.pointer(region, stage), smem.stage_bytes)
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _take_turn(c: ReduceContext, head: Int32, tile: Int32):
    """Wait until as many CTAs as come before this one have added to the dQ of a query tile."""
    if c.is_leader:
        with cute.arch.elect_one():
            rank = c.work.tiling.rank(c.work.kv_tile, tile, c.plan.attention.descending)
            turn = _turn(c, head, tile)
            passed = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
            while passed != rank:
                passed = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
            cute.arch.fence_proxy("async.global")  # what comes is an operation of the async proxy


@cute.jit
def _pass_turn(c: ReduceContext, head: Int32, tile: Int32):
    """Add one to the turns, once all sums have reached global memory: that they have been read is not enough."""
    if c.is_leader:
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.fence_proxy("async.global")
            cute.arch.red(_turn(c, head, tile), Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


def _turn(c: ReduceContext, head: Int32, tile: Int32) -> cute.Pointer:
    """Where the turns of a query tile are counted."""
    row = c.mTurns[c.work.batch, c.work.query_head(head), None]
    return row.iterator + (c.work.workspace_tile + tile)
