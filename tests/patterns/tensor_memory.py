"""Tensor memory between warps: columns that change hands round after round, and an allocation given back."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from tests.patterns.device import (
    WARP,
    allocate_tmem,
    allocated_tmem,
    argument,
    arrive,
    free_tmem,
    initialise,
    named_barrier,
    own_lanes,
    set_entry,
    store_row,
    wait,
    warp_number,
)
from tests.patterns.pattern import RUNS_AHEAD, Case, Pattern, Twin, case, numbers, unwritten
from undertow.kernels.sm100.instructions import tmem_load, tmem_store

ROUNDS = 4
QUARTERS = 4  # warps that cover the 128 lanes of TMEM
LANES = QUARTERS * WARP
WIDTH = 8  # columns handed over at once
SMEM = 8192
TRY_WAIT = "mbarrier.try_wait.parity"
FULL, EMPTY = 0, 1
TEARDOWN = 1  # named barrier


def load_row(source: cute.Tensor, row: Int32, width: int) -> list[Int32]:
    """The words of one row of a (rows, width) tensor of 32-bit words."""
    return [source[row * width + column] for column in range(width)]


@cute.kernel
def tmem_ring_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """Warps 0-3 store rows to TMEM, warps 4-7 load them; the columns change hands by two mbarriers."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    if warp == 0:
        initialise([QUARTERS, QUARTERS])
        allocate_tmem(32)
    cute.arch.sync_threads()
    tmem = own_lanes(allocated_tmem(), warp)
    if warp < QUARTERS:
        for k in cutlass.range(rounds, unroll=1):
            if const_expr(failure != "no-empty-wait"):
                wait(EMPTY, (k & 1) ^ 1)
            tmem_store(tmem, load_row(mX, k * LANES + thread, WIDTH))
            if const_expr(failure != "no-wait-st"):
                cute.arch.fence_view_async_tmem_store()
            cute.arch.sync_warp()
            arrive(FULL)
    else:
        for k in cutlass.range(rounds, unroll=1):
            wait(FULL, k & 1)
            words = tmem_load(tmem, WIDTH)
            if const_expr(failure not in ("no-wait-ld", "wait-ld-after-release")):
                cute.arch.fence_view_async_tmem_load()
            cute.arch.sync_warp()
            arrive(EMPTY)
            if const_expr(failure == "wait-ld-after-release"):
                cute.arch.fence_view_async_tmem_load()
            store_row(mY.iterator + cute.assume((k * LANES + thread - LANES) * WIDTH, divby=WIDTH), words)
    cute.arch.sync_threads()
    if warp == 0:
        free_tmem(tmem, 32)


@cute.jit
def tmem_ring(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    tmem_ring_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(2 * LANES, 1, 1), smem=SMEM)


def build_tmem_ring(failure: str | None):
    set_entry(tmem_ring_kernel, "tmem_ring")
    words = ROUNDS * LANES * WIDTH
    return tmem_ring, (failure, argument(words, dtype=Int32), argument(words, dtype=Int32), Int32(1))


def tmem_ring_case() -> Case:
    x, y = numbers(ROUNDS, LANES, WIDTH), unwritten(ROUNDS, LANES, WIDTH)
    return case((1, 2 * LANES, SMEM), (x, y, ROUNDS), (y, x))


@cute.kernel
def teardown_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    """Warp 4 owns the allocation, warps 0-3 use it for a round trip; it is freed when all five have met."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    if warp == QUARTERS:
        allocate_tmem(32)
    if const_expr(failure != "no-barrier-after-alloc"):
        cute.arch.sync_threads()
    tmem = allocated_tmem()
    if warp == QUARTERS:
        if const_expr(failure != "no-teardown-barrier"):
            named_barrier(TEARDOWN, LANES + WARP)
        if const_expr(failure != "never-freed"):
            free_tmem(tmem, 32)
    else:
        lanes = own_lanes(tmem, warp + 1 if const_expr(failure == "wrong-quarter") else warp)
        lanes += 32 - WIDTH // 2 if const_expr(failure == "past-the-end") else 32 - WIDTH
        tmem_store(lanes, load_row(mX, thread, WIDTH))
        cute.arch.fence_view_async_tmem_store()
        words = tmem_load(lanes, WIDTH)
        cute.arch.fence_view_async_tmem_load()
        store_row(mY.iterator + cute.assume(thread * WIDTH, divby=WIDTH), words)
        if const_expr(failure != "no-teardown-barrier"):
            named_barrier(TEARDOWN, LANES + WARP)


@cute.jit
def teardown(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    teardown_kernel(failure, mX, mY).launch(grid=(1, 1, 1), block=(LANES + WARP, 1, 1), smem=SMEM)


def build_teardown(failure: str | None):
    set_entry(teardown_kernel, "teardown")
    return teardown, (failure, argument(LANES * WIDTH, dtype=Int32), argument(LANES * WIDTH, dtype=Int32))


def teardown_case() -> Case:
    x, y = numbers(LANES, WIDTH), unwritten(LANES, WIDTH)
    return case((1, LANES + WARP, SMEM), (x, y), (y, x))


PATTERNS = (
    Pattern("tmem-ring", build_tmem_ring, tmem_ring_case, (
        Twin("no-wait-ld", ("tmem-load-not-waited",), removed=("tcgen05.wait::ld",), visible=False),
        Twin("wait-ld-after-release", ("tmem-load-not-waited",), moved=("tcgen05.wait::ld",), visible=False),
        Twin("no-wait-st", ("tmem-store-not-waited",), removed=("tcgen05.wait::st",), visible=False),
        Twin("no-empty-wait", ("race",), removed=(TRY_WAIT,), also=RUNS_AHEAD),
    )),
    Pattern("teardown", build_teardown, teardown_case, (
        Twin("no-teardown-barrier", ("tmem-lifetime",), removed=("bar.sync", "bar.sync")),
        Twin("never-freed", ("tmem-lifetime",), removed=("tcgen05.dealloc",), visible=False),
        Twin("past-the-end", ("tmem-lifetime",)),
        Twin("wrong-quarter", ("tmem-lane",)),
        Twin("no-barrier-after-alloc", ("race",), removed=("bar.sync",),
             also=("uninitialised-read", "tmem-lifetime", "tmem-lane")),
    )),
)  # fmt: skip
