"""Hand-overs by mbarriers alone: one barrier round after round, one producer for two groups, a second life."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from tests.patterns.device import (
    DATA,
    WARP,
    argument,
    arrive,
    bulk_load,
    elements,
    expect,
    initialise,
    mbarrier,
    set_entry,
    wait,
    warp_number,
)
from tests.patterns.pattern import RUNS_AHEAD, Case, Pattern, Twin, case, numbers, unwritten

ROUNDS = 5
CHUNK = 128  # floats
SMEM = 4096
TRY_WAIT = "mbarrier.try_wait.parity"
FULL, EMPTY = 0, 1


@cute.kernel
def single_barrier_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """Warp 0 hands a row to warp 1 every round; the one full barrier flips every round, so the parity is that of k."""
    warp, lane = warp_number(), cute.arch.lane_idx()
    if warp == 0:
        initialise([1, 1])
    cute.arch.sync_threads()
    row = elements(DATA, WARP)
    if warp == 0:
        for k in cutlass.range(rounds, unroll=1):
            wait(EMPTY, (k & 1) ^ 1)
            row[lane] = mX[k * WARP + lane]
            cute.arch.sync_warp()
            arrive(FULL)
            if const_expr(failure == "signal-twice"):
                arrive(FULL)
    else:
        for k in cutlass.range(rounds, unroll=1):
            if const_expr(failure == "ring-parity"):
                wait(FULL, k // 3 & 1)
            elif const_expr(failure != "no-full-wait"):
                wait(FULL, k & 1)
            mY[k * WARP + lane] = row[WARP - 1 - lane]
            cute.arch.sync_warp()
            arrive(EMPTY)


@cute.jit
def single_barrier(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    single_barrier_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(2 * WARP, 1, 1), smem=SMEM)


def build_single_barrier(failure: str | None):
    set_entry(single_barrier_kernel, "single_barrier")
    return single_barrier, (failure, argument(ROUNDS * WARP), argument(ROUNDS * WARP), Int32(1))


def single_barrier_case() -> Case:
    x, y = numbers(ROUNDS, WARP), unwritten(ROUNDS, WARP)
    return case((1, 2 * WARP, SMEM), (x, y, ROUNDS), (y, x[:, ::-1]))


@cute.kernel
def broadcast_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """Warp 0 brings chunks that two groups of two warps read; the buffer is free when all four warps have arrived."""
    warp = warp_number()
    if warp == 0:
        initialise([1, 2 if const_expr(failure == "count-of-one-group") else 4])
    cute.arch.sync_threads()
    if warp == 0:
        for k in cutlass.range(rounds, unroll=1):
            wait(EMPTY, (k & 1) ^ 1)
            with cute.arch.elect_one():
                expect(FULL, 4 * CHUNK)
                bulk_load(DATA, mX.iterator + k * CHUNK, CHUNK, FULL)
    else:
        group, thread = (warp - 1) // 2, (cute.arch.thread_idx()[0] - WARP) % (2 * WARP)
        x, total = elements(DATA, CHUNK), Float32(0.0)
        for k in cutlass.range(rounds, unroll=1):
            wait(FULL, k & 1)
            total += x[thread] * x[thread + 2 * WARP] if group == 0 else x[thread] + x[thread + 2 * WARP]
            cute.arch.sync_warp()
            if const_expr(failure == "one-group-keeps-it"):
                if group == 0:
                    arrive(EMPTY)
            else:
                arrive(EMPTY)
        mY[group * (2 * WARP) + thread] = total


@cute.jit
def broadcast(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    broadcast_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(5 * WARP, 1, 1), smem=SMEM)


def build_broadcast(failure: str | None):
    set_entry(broadcast_kernel, "broadcast")
    return broadcast, (failure, argument(ROUNDS * CHUNK), argument(CHUNK), Int32(1))


def broadcast_case() -> Case:
    x, y = numbers(ROUNDS, 2, CHUNK // 2), unwritten(2, CHUNK // 2)
    expected = [x.prod(1).sum(0), x.sum(1).sum(0)]
    return case((1, 5 * WARP, SMEM), (x, y, ROUNDS), *zip(y, expected, strict=True))


@cute.kernel
def second_life_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    """A barrier for one copy is ended and begun anew with another count, for a hand-over from two warps to one."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    x, sums = elements(DATA, CHUNK), elements(DATA + 4 * CHUNK, 2 * WARP)
    if warp == 0:
        initialise([1])
        with cute.arch.elect_one():
            expect(0, 4 * CHUNK)
            bulk_load(DATA, mX.iterator, CHUNK, 0)
    cute.arch.sync_threads()
    wait(0, 0)
    if const_expr(failure != "no-barrier-before"):
        cute.arch.sync_threads()
    if warp == 0:
        if const_expr(failure != "no-inval"):
            with cute.arch.elect_one():
                cute.arch.inline_ptx("mbarrier.inval.shared::cta.b64 [{$r0}];", read_only_args=[mbarrier(0).toint()])
        initialise([2])
    cute.arch.sync_threads()
    if warp < 2:
        sums[thread] = x[thread] + x[thread + 2 * WARP]
        cute.arch.sync_warp()
        arrive(0)
    else:
        wait(0, 0)
        mY[thread - 2 * WARP] = sums[thread - 2 * WARP] + sums[thread - WARP]


@cute.jit
def second_life(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    second_life_kernel(failure, mX, mY).launch(grid=(1, 1, 1), block=(3 * WARP, 1, 1), smem=SMEM)


def build_second_life(failure: str | None):
    set_entry(second_life_kernel, "second_life")
    return second_life, (failure, argument(CHUNK), argument(WARP))


def second_life_case() -> Case:
    x, y = numbers(4, WARP), unwritten(WARP)
    return case((1, 3 * WARP, SMEM), (x, y), (y, x.sum(0)))


PATTERNS = (
    Pattern("single-barrier", build_single_barrier, single_barrier_case, (
        Twin("ring-parity", ("race", "mbarrier-missed-phase"), also=RUNS_AHEAD),
        Twin("signal-twice", ("mbarrier-doubled-phase",), added=("mbarrier.arrive",), also=("race", *RUNS_AHEAD)),
        Twin("no-full-wait", ("race",), removed=(TRY_WAIT,), also=("uninitialised-read", *RUNS_AHEAD)),
    )),
    Pattern("broadcast", build_broadcast, broadcast_case, (
        Twin("count-of-one-group", ("race",), also=RUNS_AHEAD),
        Twin("one-group-keeps-it", ("deadlock",)),
    )),
    Pattern("second-life", build_second_life, second_life_case, (
        Twin("no-inval", ("mbarrier-reinitialised",), removed=("mbarrier.inval",)),
        Twin("no-barrier-before", ("mbarrier-reinitialised",), removed=("bar.sync",), also=("race", "deadlock")),
    )),
)  # fmt: skip
