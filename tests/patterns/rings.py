"""Copies into shared memory that complete on mbarriers: two-stage rings, one barrier for two copies, reloads."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from tests.patterns.device import (
    DATA,
    WARP,
    Box,
    argument,
    arrive,
    bulk_load,
    elements,
    expect,
    initialise,
    named_barrier,
    set_entry,
    wait,
    warp_number,
)
from tests.patterns.pattern import RUNS_AHEAD, Case, Pattern, Twin, case, numbers, unwritten
from undertow.emulator import TensorMap

STAGES = 2
ROUNDS = 5
TILE = Box(64, 8)
CHUNK = 128  # floats of one bulk copy
SMEM = 8192
TRY_WAIT = "mbarrier.try_wait.parity"


@cute.kernel
def tensor_ring_kernel(failure: Constexpr, tiles: cute.CopyAtom, mY: cute.Tensor, rounds: Int32):
    """Warp 0 loads tiles of 8 rows by TMA into two stages; each of 64 threads sums a column of every tile."""
    warp = warp_number()
    if warp == 0:
        initialise([1] * STAGES + [2] * STAGES)
    cute.arch.sync_threads()
    if warp == 0:
        for k in cutlass.range(rounds, unroll=1):
            stage, parity = k % STAGES, k // STAGES & 1
            if const_expr(failure != "no-empty-wait"):
                wait(STAGES + stage, parity if const_expr(failure == "consumer-parity") else parity ^ 1)
            with cute.arch.elect_one():
                expect(stage, TILE.size)
            TILE.load(tiles, (0, k * TILE.rows), DATA + stage * TILE.size, stage)
    else:
        column = cute.arch.thread_idx()[0] - WARP
        for k in cutlass.range(rounds, unroll=1):
            stage, parity = k % STAGES, k // STAGES & 1
            if const_expr(failure != "no-full-wait"):
                wait(stage, parity)
            if const_expr(failure == "early-release"):
                cute.arch.sync_warp()
                arrive(STAGES + stage)
            x = elements(DATA + stage * TILE.size, TILE.columns * TILE.rows)
            total = Float32(0.0)
            for row in cutlass.range_constexpr(TILE.rows):
                total += x[row * TILE.columns + column]
            mY[k * TILE.columns + column] = total
            if const_expr(failure != "early-release"):
                cute.arch.sync_warp()
                arrive(STAGES + stage)


@cute.jit
def tensor_ring(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    tensor_ring_kernel(failure, TILE.tensor_map(mX), mY, rounds).launch(
        grid=(1, 1, 1), block=(3 * WARP, 1, 1), smem=SMEM
    )


def build_tensor_ring(failure: str | None):
    set_entry(tensor_ring_kernel, "tensor_ring")
    arguments = argument(ROUNDS * TILE.rows, TILE.columns), argument(ROUNDS * TILE.columns)
    return tensor_ring, (failure, *arguments, Int32(1))


def tensor_ring_case() -> Case:
    x, y = numbers(ROUNDS * TILE.rows, TILE.columns), unwritten(ROUNDS, TILE.columns)
    tiles = TensorMap(x, "f32", (TILE.columns, len(x)), (4 * TILE.columns,), (TILE.columns, TILE.rows))
    return case((1, 3 * WARP, SMEM), (tiles, y, ROUNDS), (y, x.reshape(ROUNDS, TILE.rows, TILE.columns).sum(1)))


@cute.kernel
def bulk_ring_kernel(failure: Constexpr, unrolled: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """One lane of warp 0 copies chunks by raw bulk copies into two stages, warp 1 sums them lane by lane."""
    warp = warp_number()
    if warp == 0:
        initialise([1] * (2 * STAGES), fenced=failure != "init-not-fenced")
    if const_expr(failure != "no-init-barrier"):
        cute.arch.sync_threads()
    if warp == 0:
        if const_expr(unrolled):
            for k in cutlass.range_constexpr(ROUNDS):
                _fill_chunk(failure, mX, k)
        else:
            for k in cutlass.range(rounds, unroll=1):
                _fill_chunk(failure, mX, k)
    else:
        total = Float32(0.0)
        if const_expr(unrolled):
            for k in cutlass.range_constexpr(ROUNDS):
                total += _chunk_sum(failure, k)
        else:
            for k in cutlass.range(rounds, unroll=1):
                total += _chunk_sum(failure, k)
        mY[cute.arch.lane_idx()] = total


@cute.jit
def _fill_chunk(failure: Constexpr, mX: cute.Tensor, k):
    stage, parity = k % STAGES, k // STAGES & 1
    if const_expr(failure != "no-empty-wait"):
        wait(STAGES + stage, parity ^ 1)
    with cute.arch.elect_one():
        expect(stage, 4 * CHUNK)
        bulk_load(DATA + stage * 4 * CHUNK, mX.iterator + k * CHUNK, CHUNK, stage)


@cute.jit
def _chunk_sum(failure: Constexpr, k):
    stage, parity = k % STAGES, k // STAGES & 1
    wait(stage, parity)
    x, lane = elements(DATA + stage * 4 * CHUNK, CHUNK), cute.arch.lane_idx()
    total = x[lane] + x[lane + 32] + x[lane + 64] + x[lane + 96]
    if const_expr(failure != "no-warp-sync"):
        cute.arch.sync_warp()
    arrive(STAGES + stage)
    return total


@cute.jit
def bulk_ring(failure: Constexpr, unrolled: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    bulk_ring_kernel(failure, unrolled, mX, mY, rounds).launch(grid=(1, 1, 1), block=(2 * WARP, 1, 1), smem=SMEM)


def build_bulk_ring(failure: str | None, unrolled: bool = False):
    set_entry(bulk_ring_kernel, "bulk_ring")
    return bulk_ring, (failure, unrolled, argument(ROUNDS * CHUNK), argument(WARP), Int32(1))


def build_unrolled_bulk_ring(failure: str | None):
    return build_bulk_ring(failure, unrolled=True)


def bulk_ring_case() -> Case:
    x, y = numbers(ROUNDS, CHUNK), unwritten(WARP)
    return case((1, 2 * WARP, SMEM), (x, y, ROUNDS), (y, x.reshape(-1, WARP).sum(0)))


@cute.kernel
def two_copies_kernel(failure: Constexpr, mA: cute.Tensor, mB: cute.Tensor, mY: cute.Tensor):
    """Two copies complete one mbarrier, whose single arrival expects the bytes of both; y = a + b."""
    warp = warp_number()
    if warp == 0:
        initialise([1])
    cute.arch.sync_threads()
    if warp == 0:
        with cute.arch.elect_one():
            if const_expr(failure == "two-arrivals"):
                expect(0, 4 * CHUNK)
                expect(0, 4 * CHUNK)
            elif const_expr(failure == "sum-too-large"):
                expect(0, 8 * CHUNK + 16)
            elif const_expr(failure == "sum-too-small"):
                expect(0, 4 * CHUNK)
            else:
                expect(0, 8 * CHUNK)
            bulk_load(DATA, mA.iterator, CHUNK, 0)
            bulk_load(DATA + 4 * CHUNK, mB.iterator, CHUNK, 0)
    else:
        thread = cute.arch.thread_idx()[0] - WARP
        wait(0, 0)
        mY[thread] = elements(DATA, CHUNK)[thread] + elements(DATA + 4 * CHUNK, CHUNK)[thread]


@cute.jit
def two_copies(failure: Constexpr, mA: cute.Tensor, mB: cute.Tensor, mY: cute.Tensor):
    two_copies_kernel(failure, mA, mB, mY).launch(grid=(1, 1, 1), block=(WARP + CHUNK, 1, 1), smem=SMEM)


def build_two_copies(failure: str | None):
    set_entry(two_copies_kernel, "two_copies")
    return two_copies, (failure, argument(CHUNK), argument(CHUNK), argument(CHUNK))


def two_copies_case() -> Case:
    a, b, y = numbers(CHUNK), numbers(3, CHUNK)[2], unwritten(CHUNK)
    return case((1, WARP + CHUNK, SMEM), (a, b, y), (y, a + b))


@cute.kernel
def reload_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """Threads change a chunk where it lies, exchange it, and hand the buffer back to the copy engine."""
    warp = warp_number()
    if warp == 0:
        initialise([1, CHUNK // WARP])
    cute.arch.sync_threads()
    if warp == 0:
        for k in cutlass.range(rounds, unroll=1):
            if const_expr(failure != "no-empty-wait"):
                wait(1, (k & 1) ^ 1)
            with cute.arch.elect_one():
                expect(0, 4 * CHUNK)
                bulk_load(DATA, mX.iterator + k * CHUNK, CHUNK, 0)
    else:
        thread = cute.arch.thread_idx()[0] - WARP
        x = elements(DATA, CHUNK)
        for k in cutlass.range(rounds, unroll=1):
            wait(0, k & 1)
            x[thread] = 2.0 * x[thread]
            if const_expr(failure != "no-exchange-barrier"):
                named_barrier(1, CHUNK)
            mY[k * CHUNK + thread] = x[CHUNK - 1 - thread]
            if const_expr(failure != "no-proxy-fence"):
                cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            arrive(1)


@cute.jit
def reload(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    reload_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(WARP + CHUNK, 1, 1), smem=SMEM)


def build_reload(failure: str | None):
    set_entry(reload_kernel, "reload")
    return reload, (failure, argument(ROUNDS * CHUNK), argument(ROUNDS * CHUNK), Int32(1))


def reload_case() -> Case:
    x, y = numbers(ROUNDS, CHUNK), unwritten(ROUNDS, CHUNK)
    return case((1, WARP + CHUNK, SMEM), (x, y, ROUNDS), (y, 2 * x[:, ::-1]))


PATTERNS = (
    Pattern("tensor-ring", build_tensor_ring, tensor_ring_case, (
        Twin("no-empty-wait", ("race",), removed=(TRY_WAIT,), also=RUNS_AHEAD),
        Twin("no-full-wait", ("race",), removed=(TRY_WAIT,), also=("uninitialised-read", *RUNS_AHEAD)),
        Twin("early-release", ("race",), moved=("bar.warp.sync", "mbarrier.arrive.shared")),
        Twin("consumer-parity", ("deadlock",)),
    )),
    Pattern("bulk-ring", build_bulk_ring, bulk_ring_case, (
        Twin("no-empty-wait", ("race",), removed=(TRY_WAIT,), also=RUNS_AHEAD),
        Twin("no-warp-sync", ("warp-sync",), removed=("bar.warp.sync",), visible=False),
        Twin("init-not-fenced", ("missing-proxy-fence",), removed=("fence.mbarrier_init",), visible=False),
        Twin("no-init-barrier", ("race",), removed=("bar.sync",)),
    )),
    Pattern("bulk-ring-unrolled", build_unrolled_bulk_ring, bulk_ring_case, (
        Twin("no-empty-wait", ("race",), removed=(TRY_WAIT,) * ROUNDS, also=RUNS_AHEAD),
    )),
    Pattern("two-copies", build_two_copies, two_copies_case, (
        Twin("sum-too-large", ("mbarrier-bytes",), also=("deadlock",)),
        Twin("sum-too-small", ("mbarrier-bytes", "race"), also=("uninitialised-read",)),
        Twin("two-arrivals", ("mbarrier-over-arrival",), added=("mbarrier.arrive.expect_tx",)),
    )),
    Pattern("reload", build_reload, reload_case, (
        Twin("no-empty-wait", ("race",), removed=(TRY_WAIT,), also=RUNS_AHEAD),
        Twin("no-exchange-barrier", ("race",), removed=("bar.sync",)),
        Twin("no-proxy-fence", ("missing-proxy-fence",), removed=("fence.proxy.async",), visible=False),
    )),
)  # fmt: skip
