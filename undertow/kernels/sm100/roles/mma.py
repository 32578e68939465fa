"""The MMA warp: issues the five GEMMs of every tile in the plan's order.

Its program of waits, issues and commits is derived from the plan (`plan.schedule.mma_program`) and interpreted while
the kernel is traced, so this file serves every schedule. One elected thread runs all of it: the tensor pipe takes
instructions and commits from a single thread. It never touches data, so it owns no fence.
"""

from __future__ import annotations

from collections.abc import Iterable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from undertow.kernels.events import span
from undertow.kernels.sm100.context import MmaContext
from undertow.kernels.sm100.descriptors import (
    GRANULE_BYTES,
    K_STEP,
    instruction_descriptor,
    k_step_bytes,
    operand_descriptor,
)
from undertow.kernels.sm100.instructions import mma as issue_mma
from undertow.kernels.sm100.instructions import opaque
from undertow.plan.schedule import mma_program
from undertow.plan.schema import MmaOp
from undertow.plan.steps import Issue, Signal, Step, Wait


@cute.jit
def mma(c: MmaContext):
    """Run the prologue, a trip of the loop for every tile but the last, and the tail; nothing if there is no tile."""
    program = mma_program(c.plan)
    if c.trips > 0:
        with cute.arch.elect_one():
            _run(c, program.prologue, -1)
            for trip in cutlass.range(c.trips - 1, unroll=1):
                _run(c, program.body, trip)
            _run(c, program.tail, c.trips - 1)
    cute.arch.sync_warp()


def _run(c: MmaContext, steps: Iterable[Step], trip: int | Int32) -> None:
    for step in steps:
        if isinstance(step, Wait):
            c.channels[step.pipeline].wait(step.side, trip + step.tile)
        elif isinstance(step, Signal):
            channel = c.channels[step.pipeline]
            channel.commit(step.side, 0 if channel.pipeline.once else trip + step.tile)
        elif isinstance(step, Issue):
            with span(c.plan, step.mma):
                _issue(c, c.plan.mma(step.mma), trip + step.tile)


def _issue(c: MmaContext, op: MmaOp, tile: int | Int32) -> None:
    """One GEMM of a tile: d (+)= a b, in instructions of k = 16.

    A sum over tiles starts from zero with the first instruction of tile 0, a sum of one tile with that of every tile.
    """
    d = c.tmem + c.plan.tmem_region(op.d).column
    instruction = instruction_descriptor(c.plan, op)
    for step in range(op.k // K_STEP):
        continues = not op.into_zero and tile > 0
        issue_mma(
            d, _operand(c, op, op.a, tile, step), _operand(c, op, op.b, tile, step), instruction, step > 0 or continues
        )


def _operand(c: MmaContext, op: MmaOp, region: str, tile: int | Int32, step: int) -> Int32 | Int64:
    """The TMEM address or SMEM descriptor of an operand from k = 16 * step on."""
    if region in (tmem.name for tmem in c.plan.tmem):
        packed = c.plan.tmem_region(region)
        return c.tmem + (packed.column + step * K_STEP * packed.dtype.bytes // 4)
    stages = c.plan.smem_region(region).stages
    slot = tile & (stages - 1) if stages > 1 else 0
    high, low = divmod(operand_descriptor(c.plan, op, region), 1 << 32)
    # Descriptors that do not change from trip to trip would be kept in two registers each, 60 of this warp's 88.
    address = opaque(c.smem.address(region, slot)) >> 4
    return Int64(high << 32) | Int64(Uint32(address + (low + step * k_step_bytes(op, region) // GRANULE_BYTES)))
