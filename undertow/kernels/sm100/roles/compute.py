"""The compute warps: S to P, dP to dS, tile by tile.

Each thread has one key row, that is one TMEM lane, and 2 x 32 query columns; warps w and w + 4 share lanes. The steps,
alias guards and joins come from the plan and are interpreted while the kernel is traced. This role owns the proxy fence
between its stores to sdS and the dQ GEMM that reads them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from undertow.kernels.events import span
from undertow.kernels.sm100.bind import barrier, multiple
from undertow.kernels.sm100.context import ComputeContext
from undertow.kernels.sm100.descriptors import PANEL_BYTES, SWIZZLE_ROWS, panel_bytes
from undertow.kernels.sm100.instructions import (
    floats,
    shared_load,
    shifted_left,
    store_vector,
    tmem_load,
    tmem_store,
)
from undertow.kernels.sm100.softmax import (
    UNSEEN_EXPONENT,
    UNSEEN_TANH,
    exponents,
    hyperbolic_tangents,
    masked,
    packed_pairs,
    probabilities,
    score_gradients,
    times_slopes,
)
from undertow.plan.schedule import synchronised_program
from undertow.plan.steps import Guard, Join, Load, Signal, Store, SynchronisedStep, Wait

VECTOR_BYTES = 16


@cute.jit
def compute(c: ComputeContext):
    """Process all query tiles in order."""
    _clear_absent_row(c)
    program = synchronised_program(c.plan, "compute")
    head, tile = Int32(0), c.work.first_tile
    for trip in cutlass.range(c.work.trips, unroll=1):
        registers = {}
        for step in program:
            _run(c, step, (trip, tile), registers)
        head, tile = c.work.after(head, tile)


def _run(c: ComputeContext, step: SynchronisedStep, at: tuple[Int32, Int32], registers: dict) -> None:
    """Execute one step. at: trip and query tile. `registers` holds what the thread has of (region, stage)."""
    trip, _ = at
    if isinstance(step, Wait):
        c.channels[step.pipeline].wait(step.side, trip + step.tile)
    elif isinstance(step, Guard):
        barrier(c.plan, "compute")
    elif isinstance(step, Join):
        _join(c, step)
    elif isinstance(step, Signal):
        c.channels[step.pipeline].arrive(step.side, trip + step.tile)
    elif isinstance(step, Load):
        with span(c.plan, _SPANS[step.region]):
            _LOADS[step.region](c, step, at, registers)
    elif isinstance(step, Store):
        for stage in step.stages:
            _STORES[step.region](c, stage, registers[step.region, stage])


def _load_tmem(c: ComputeContext, step: Load, at: tuple[Int32, Int32], registers: dict) -> None:
    for stage in step.stages:
        columns = len(c.plan.columns_of(step.region, stage, 0))
        registers[step.region, stage] = floats(tmem_load(_tmem(c, step.region, stage), columns))
    cute.arch.fence_view_async_tmem_load()


def _load_lse(c: ComputeContext, step: Load, at: tuple[Int32, Int32], registers: dict) -> None:
    """Read LSE and turn the scores into probabilities: packed for the PdO GEMM, and fp32 weights of dS.

    The weight is P, times the slope of the scores where a softcap bends them.
    """
    trip, tile = at
    for stage in step.stages:
        scores = registers.pop(("S", stage))
        lse_log2 = _statistics(c, "load_compute_lse", step.region, stage, trip)
        if c.plan.attention.softcap:
            tanh = _mask(c, hyperbolic_tangents(scores, c.scalars.tanh_scale), (stage, tile, UNSEEN_TANH))
            p = probabilities(exponents(tanh, lse_log2, c.scalars.softcap_log2))
            weight = times_slopes(p, tanh)
        else:
            logarithms = exponents(scores, lse_log2, c.scalars.softmax_scale_log2)
            weight = p = probabilities(_mask(c, logarithms, (stage, tile, UNSEEN_EXPONENT)))
        registers["P", stage], registers["weight", stage] = packed_pairs(p, c.plan.dtype), weight


def _mask(c: ComputeContext, values: list[Float32], of: tuple[int, Int32, float]) -> list[Float32]:
    """Values of a stage and a query tile with a given one where the thread's key is not seen."""
    return _mask_if_needed(c, values, of) if c.plan.attention.masked else values


@cute.jit
def _mask_if_needed(c: ComputeContext, values: list, of: Constexpr) -> list:
    """Mask in a branch, which tiles without a pair to mask do not enter."""
    stage, tile, unseen = of
    if c.work.needs_mask(tile):
        values = masked(values, _kept(c, stage, tile), unseen)
    return values


def _kept(c: ComputeContext, stage: int, tile: Int32) -> Int32:
    """One bit per query column of `stage`, set if the thread's key is seen from it."""
    first, step, count = _queries(c, stage)
    seeing = c.work.tiling.rows_that_see(c.work.kv_tile * c.plan.tile_n + c.row)
    origin = tile * c.plan.tile_m + (first + c.warpgroup * step)
    kept = Int32(-1)
    if seeing.first is not None:
        kept = shifted_left(kept, cutlass.max(seeing.first - origin, 0))
    if seeing.end is not None:
        kept = kept & ~shifted_left(Int32(-1), cutlass.max(seeing.end - origin, 0))
    assert count == Int32.width
    return kept


def _load_d(c: ComputeContext, step: Load, at: tuple[Int32, Int32], registers: dict) -> None:
    """Read D and form dS, once for the dK GEMM in TMEM and once for the dQ GEMM in SMEM."""
    trip, _ = at
    for stage in step.stages:
        d = _statistics(c, "load_compute_d", step.region, stage, trip)
        ds = score_gradients(registers.pop(("weight", stage)), registers.pop(("dP", stage)), d)
        registers["dS", stage] = registers["sdS", stage] = packed_pairs(ds, c.plan.dtype)


def _store_tmem(region: str):
    def store(c: ComputeContext, stage: int, words: list[Int32]) -> None:
        tmem_store(_tmem(c, region, stage), words)

    return store


def _store_sds(c: ComputeContext, stage: int, words: list[Int32]) -> None:
    """Four swizzled 16-byte stores of the thread's part of its key row, if the row exists."""
    for index, address in enumerate(_sds_addresses(c, stage)):
        store_vector("shared", address, words[4 * index : 4 * index + 4], predicate=c.has_row)


_LOADS = {"S": _load_tmem, "dP": _load_tmem, "sLSE": _load_lse, "sD": _load_d}
_SPANS = {"S": "tmem", "dP": "tmem", "sLSE": "softmax", "sD": "dS"}  # what the work is called in a trace
_STORES = {"P": _store_tmem("P"), "dS": _store_tmem("dS"), "sdS": _store_sds}


def _join(c: ComputeContext, join: Join) -> None:
    """Complete the stores since the last join, then bring the lanes, or all compute warps, together."""
    if join.tmem:
        cute.arch.fence_view_async_tmem_store()
    if join.smem:
        cute.arch.fence_view_async_shared()
    if join.barrier:
        barrier(c.plan, join.barrier)
    else:
        cute.arch.sync_warp()


def _clear_absent_row(c: ComputeContext) -> None:
    """Give a key row beyond the sequence's end a dS of zero in sdS, where no tile stores to it.

    K and V are zero in such a row, so S and dP are too; but P = 2^-LSE_log2 may overflow, and the dQ GEMM would then
    multiply infinity by K = 0. Its dK and dV rows are never written, so TMEM needs no such care.
    """
    zero = Int32(0)
    stages = {stage for step in c.plan.program("compute") if isinstance(step, Store) for stage in step.stages}
    for stage in sorted(stages):
        for address in _sds_addresses(c, stage):
            store_vector("shared", address, [zero] * 4, predicate=~c.has_row)


def _sds_addresses(c: ComputeContext, stage: int) -> list[Int32]:
    """Where the thread's query columns of `stage` lie in sdS: vectors of 16 bytes, under the 128-byte swizzle.

    Every panel holds 64 query columns of all key rows; the swizzle XORs a vector's place in its row with the row.
    """
    first, step, count = _queries(c, stage)
    per_vector = VECTOR_BYTES // c.plan.smem_region("sdS").dtype.bytes
    panel, vector = divmod(first // per_vector, PANEL_BYTES // VECTOR_BYTES)
    row = c.smem.address("sdS") + (panel * panel_bytes(c.plan, "sdS") + c.row * PANEL_BYTES)
    own = vector + c.warpgroup * (step // per_vector)
    return [row + ((own + i) ^ (c.row % SWIZZLE_ROWS)) * VECTOR_BYTES for i in range(count // per_vector)]


def _statistics(c: ComputeContext, pipeline: str, region: str, stage: int, trip: Int32) -> list[Float32]:
    """LSE or D of the thread's query columns of `stage`."""
    first, step, count = _queries(c, stage)
    pointer = c.smem.pointer(region, c.channels[pipeline].slot(trip)) + first
    return shared_load(pointer + multiple(c.warpgroup, step), count)


def _queries(c: ComputeContext, stage: int) -> tuple[int, int, int]:
    """First query column of warpgroup 0 in `stage`, the step to warpgroup 1, and how many a thread has."""
    zero, one = (c.plan.queries_of(stage, warpgroup) for warpgroup in range(2))
    return zero.start, one.start - zero.start, len(zero)


def _tmem(c: ComputeContext, region: str, stage: int) -> Int32:
    """Address of the thread's columns of a region's stage."""
    zero, one = (c.plan.columns_of(region, stage, warpgroup) for warpgroup in range(2))
    return c.tmem + c.warpgroup * (one.start - zero.start) + zero.start
