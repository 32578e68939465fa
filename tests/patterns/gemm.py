"""Warp-specialised kernels: a persistent GEMM with an accumulator in two halves, and O = P V with P from registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from tests.patterns.device import (
    ACCUMULATOR,
    COLUMNS,
    DATA,
    INSTRUCTION,
    K_STEPS,
    ROWS,
    WARP,
    allocate_tmem,
    allocated_tmem,
    argument,
    arrive,
    commit,
    expect,
    free_tmem,
    initialise,
    mbarrier,
    operand,
    own_lanes,
    set_entry,
    store_row,
    wait,
    warp_number,
)
from tests.patterns.pattern import RUNS_AHEAD, Case, Pattern, Twin, case, numbers, unwritten
from tests.patterns.tensor_cores import tensor_map
from undertow.kernels.sm100.instructions import mma, packed, tmem_load, tmem_store
from undertow.plan.schema import DType

TILES = 5  # of 128 rows
K_BLOCKS = 3  # of 64
STAGES = 2
LANES = 4 * WARP
STAGE = ROWS.size + COLUMNS.size  # bytes
LOAD, MMA = 4, 5  # warps; 0-3 are the epilogue's
TRY_WAIT = "mbarrier.try_wait.parity"
FULL, EMPTY, DONE, DRAINED = 0, STAGES, 2 * STAGES, 3 * STAGES  # first mbarriers


@cute.kernel
def gemm_kernel(failure: Constexpr, rows: cute.CopyAtom, columns: cute.CopyAtom, mD: cute.Tensor, tiles: Int32):
    """One warp loads, one multiplies into two accumulators by turns, four drain them."""
    warp = warp_number()
    if warp == 0:
        initialise([1] * (3 * STAGES) + [4] * STAGES)
        allocate_tmem(STAGES * ACCUMULATOR)
    cute.arch.sync_threads()
    tmem = allocated_tmem()
    if warp == LOAD:
        _load(rows, columns, tiles)
    elif warp == MMA:
        _multiply(failure, tmem, tiles)
    else:
        _drain(failure, own_lanes(tmem, warp), mD, tiles)
    cute.arch.sync_threads()
    if warp == 0:
        free_tmem(tmem, STAGES * ACCUMULATOR)


@cute.jit
def _load(rows: cute.CopyAtom, columns: cute.CopyAtom, tiles: Int32):
    for i in cutlass.range(tiles * K_BLOCKS, unroll=1):
        stage = i % STAGES
        wait(EMPTY + stage, (i // STAGES & 1) ^ 1)
        with cute.arch.elect_one():
            expect(FULL + stage, STAGE)
        k = i % K_BLOCKS * ROWS.columns
        ROWS.load(rows, (k, i // K_BLOCKS * ROWS.rows), DATA + stage * STAGE, FULL + stage)
        COLUMNS.load(columns, (k, 0), DATA + stage * STAGE + ROWS.size, FULL + stage)


@cute.jit
def _multiply(failure: Constexpr, tmem: Int32, tiles: Int32):
    for tile in cutlass.range(tiles, unroll=1):
        half = tile % STAGES
        if const_expr(failure != "no-wait-for-drained"):
            wait(DRAINED + half, (tile // STAGES & 1) ^ 1)
        for block in cutlass.range(K_BLOCKS, unroll=1):
            i = tile * K_BLOCKS + block
            stage = i % STAGES
            wait(FULL + stage, i // STAGES & 1)
            with cute.arch.elect_one():
                a = DATA + stage * STAGE
                for step in cutlass.range_constexpr(K_STEPS):
                    keep = block > 0 if const_expr(step == 0) else True
                    b = operand(a + ROWS.size, step)
                    mma(tmem + half * ACCUMULATOR, operand(a, step), b, INSTRUCTION, keep)
                if const_expr(failure == "arrive-instead-of-commit"):
                    cute.arch.mbarrier_arrive(mbarrier(EMPTY + stage))
                else:
                    commit(EMPTY + stage)
        with cute.arch.elect_one():
            commit(DONE + half)


@cute.jit
def _drain(failure: Constexpr, lanes: Int32, mD: cute.Tensor, tiles: Int32):
    thread = cute.arch.thread_idx()[0]
    for tile in cutlass.range(tiles, unroll=1):
        half = tile % STAGES
        wait(DONE + half, tile & 1 if const_expr(failure == "parity-of-the-tile") else tile // STAGES & 1)
        words = tmem_load(lanes + half * ACCUMULATOR, ACCUMULATOR)
        if const_expr(failure != "release-before-wait-ld"):
            cute.arch.fence_view_async_tmem_load()
        cute.arch.sync_warp()
        arrive(DRAINED + half)
        if const_expr(failure == "release-before-wait-ld"):
            cute.arch.fence_view_async_tmem_load()
        row = (tile * LANES + thread) * ACCUMULATOR
        store_row(mD.iterator + cute.assume(row, divby=ACCUMULATOR), words)


@cute.jit
def gemm(failure: Constexpr, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, tiles: Int32):
    gemm_kernel(failure, ROWS.tensor_map(mA), COLUMNS.tensor_map(mB), mD, tiles).launch(
        grid=(1, 1, 1), block=(LANES + 2 * WARP, 1, 1), smem=DATA + STAGES * STAGE
    )


def build_gemm(failure: str | None):
    set_entry(gemm_kernel, "gemm")
    k = K_BLOCKS * ROWS.columns
    a, b = (argument(rows, k, dtype=cutlass.BFloat16) for rows in (TILES * ROWS.rows, COLUMNS.rows))
    return gemm, (failure, a, b, argument(TILES * LANES * ACCUMULATOR, dtype=Int32), Int32(1))


def gemm_case() -> Case:
    k = K_BLOCKS * ROWS.columns
    a, b, d = numbers(TILES * ROWS.rows, k), numbers(COLUMNS.rows, k), unwritten(TILES * LANES, ACCUMULATOR)
    maps = tensor_map(a, ROWS.rows), tensor_map(b, COLUMNS.rows)
    return case((1, LANES + 2 * WARP, DATA + STAGES * STAGE), (*maps, d, TILES), (d, a @ b.T))


@cute.kernel
def p_from_registers_kernel(failure: Constexpr, columns: cute.CopyAtom, mP: cute.Tensor, mO: cute.Tensor):
    """Warps 0-3 round P to bf16 pairs in TMEM, warp 4 multiplies it with V from shared memory, warps 0-3 read O."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    v_full, p_full, done = 0, 1, 2
    if warp == LOAD:
        initialise([1, 4, 1])
        allocate_tmem(2 * ACCUMULATOR)
    cute.arch.sync_threads()
    tmem = allocated_tmem()
    p = tmem + ACCUMULATOR  # behind O
    if warp == LOAD:
        with cute.arch.elect_one():
            expect(v_full, COLUMNS.size)
        COLUMNS.load(columns, (0, 0), DATA, v_full)
        wait(v_full, 0)
        if const_expr(failure != "no-wait-for-p"):
            wait(p_full, 0)
        with cute.arch.elect_one():
            for step in cutlass.range_constexpr(K_STEPS):
                mma(tmem, p + 8 * step, operand(DATA, step), INSTRUCTION, step > 0)
            commit(done)
    else:
        row = mP.iterator + thread * ROWS.columns
        values = cute.make_tensor(row, cute.make_layout(ROWS.columns)).load()
        words = [packed(values[i], values[i + 1], DType.BF16) for i in range(0, ROWS.columns, 2)]
        tmem_store(own_lanes(p, warp), words)
        if const_expr(failure not in ("no-wait-st", "wait-st-after-signal")):
            cute.arch.fence_view_async_tmem_store()
        cute.arch.sync_warp()
        arrive(p_full)
        if const_expr(failure == "wait-st-after-signal"):
            cute.arch.fence_view_async_tmem_store()
        wait(done, 0)
        words = tmem_load(own_lanes(tmem, warp), ACCUMULATOR)
        cute.arch.fence_view_async_tmem_load()
        store_row(mO.iterator + cute.assume(thread * ACCUMULATOR, divby=ACCUMULATOR), words)
    cute.arch.sync_threads()
    if warp == LOAD:
        free_tmem(tmem, 2 * ACCUMULATOR)


@cute.jit
def p_from_registers(failure: Constexpr, mV: cute.Tensor, mP: cute.Tensor, mO: cute.Tensor):
    p_from_registers_kernel(failure, COLUMNS.tensor_map(mV), mP, mO).launch(
        grid=(1, 1, 1), block=(LANES + WARP, 1, 1), smem=DATA + COLUMNS.size
    )


def build_p_from_registers(failure: str | None):
    set_entry(p_from_registers_kernel, "p_from_registers")
    v = argument(COLUMNS.rows, COLUMNS.columns, dtype=cutlass.BFloat16)
    p, o = argument(LANES * ROWS.columns, dtype=Float32), argument(LANES * ACCUMULATOR, dtype=Int32)
    return p_from_registers, (failure, v, p, o)


def p_from_registers_case() -> Case:
    p, v, o = numbers(LANES, ROWS.columns), numbers(COLUMNS.rows, COLUMNS.columns), unwritten(LANES, ACCUMULATOR)
    return case((1, LANES + WARP, DATA + COLUMNS.size), (tensor_map(v, COLUMNS.rows), p, o), (o, p @ v.T))


PATTERNS = (
    Pattern("gemm", build_gemm, gemm_case, (
        Twin("no-wait-for-drained", ("race",), removed=(TRY_WAIT,), also=RUNS_AHEAD),
        Twin("arrive-instead-of-commit", ("race",), removed=("tcgen05.commit",), added=("mbarrier.arrive",)),
        Twin("parity-of-the-tile", ("race",), also=("mbarrier-missed-phase", "uninitialised-read", *RUNS_AHEAD)),
        Twin("release-before-wait-ld", ("tmem-load-not-waited",), moved=("tcgen05.wait::ld",), visible=False),
    )),
    Pattern("p-from-registers", build_p_from_registers, p_from_registers_case, (
        Twin("no-wait-st", ("tmem-store-not-waited",), removed=("tcgen05.wait::st",), visible=False),
        Twin("wait-st-after-signal", ("tmem-store-not-waited",), moved=("tcgen05.wait::st",), visible=False),
        Twin("no-wait-for-p", ("race",), removed=(TRY_WAIT,), also=("uninitialised-read", "mbarrier-unobserved-phase")),
    )),
)  # fmt: skip
