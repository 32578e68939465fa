"""What the compute warps do once, after their last tile: dV and dK leave tensor memory.

A thread has one key row and 32 of its 64 columns, which are 64 contiguous bytes in global memory. The dV part needs
only the PdO GEMMs, so it runs beside the last dK and dQ.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from undertow.kernels.sm100.context import EpilogueContext
from undertow.kernels.sm100.instructions import floats, store_vector, tmem_load
from undertow.kernels.sm100.softmax import packed_pairs
from undertow.plan.steps import Load, Step, Wait

VECTOR_BYTES = 16


@cute.jit
def epilogue(c: EpilogueContext):
    """Write dV, then dK times softmax_scale."""
    for step in c.plan.program("epilogue"):
        _run(c, step)


@cute.jit
def write_zeros(c: EpilogueContext):
    """Write the dK and dV of a tile that no query row sees."""
    zeros = [Int32(0)] * 4
    for region in ("dV", "dK"):
        columns = len(c.plan.columns_of(region, 0, 0))
        _store(c, region, zeros * (columns * c.plan.dtype.bytes // VECTOR_BYTES))


def _run(c: EpilogueContext, step: Step) -> None:
    if isinstance(step, Wait):
        c.channels[step.pipeline].wait(step.side, step.tile)
    elif isinstance(step, Load):
        _write(c, step.region)


def _write(c: EpilogueContext, region: str) -> None:
    """Round the thread's half row to the output's type and store it.

    Error: one rounding to 16 bits; for dK one more of the product with softmax_scale in fp32.
    """
    columns = [c.plan.columns_of(region, 0, warpgroup) for warpgroup in range(2)]
    step = columns[1].start - columns[0].start
    values = floats(tmem_load(c.tmem + columns[0].start + c.warpgroup * step, step))
    cute.arch.fence_view_async_tmem_load()
    if region == "dK":
        values = [value * c.softmax_scale for value in values]
    words: list[Int32] = packed_pairs(values, c.plan.dtype)
    if c.plan.attention.packed:
        words = [Int32(cutlass.select_(c.is_used, word, Int32(0))) for word in words]
    _store(c, region, words)


def _store(c: EpilogueContext, region: str, words: list[Int32]) -> None:
    """Store the thread's half row of dK or dV, if the row exists."""
    step = len(c.plan.columns_of(region, 0, 0))
    target = {"dV": c.gdV, "dK": c.gdK}[region].iterator + c.warpgroup * step
    for index in range(0, len(words), 4):
        address = target.toint() + index // 4 * VECTOR_BYTES
        store_vector("global", address, words[index : index + 4], predicate=c.has_row)
