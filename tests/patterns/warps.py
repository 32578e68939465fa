"""Warps and groups of warps among themselves: named barriers, warp syncs, registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from tests.patterns.device import DATA, WARP, argument, elements, named_arrive, named_barrier, set_entry, warp_number
from tests.patterns.pattern import Case, Pattern, Twin, case, numbers, unwritten

ROUNDS = 5
GROUP = 2 * WARP  # threads of a group
BOTH = 2 * GROUP
STAGES = 2
SMEM = 4096


@cute.kernel
def named_pair_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """Group 0 writes and arrives, group 1 waits and reads, through two buffers with two barriers each."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0] % GROUP
    full, empty = 1, 1 + STAGES
    if warp < 2:
        for k in cutlass.range(rounds, unroll=1):
            stage = k % STAGES
            if k >= STAGES:
                named_barrier(empty + stage, BOTH)
            elements(DATA + stage * 4 * GROUP, GROUP)[thread] = mX[k * GROUP + thread]
            named_arrive(full + stage, BOTH - WARP if const_expr(failure == "count-too-small") else BOTH)
    else:
        for k in cutlass.range(rounds, unroll=1):
            stage = k % STAGES
            named_barrier(full + stage, BOTH)
            if const_expr(failure == "release-before-read"):
                _release(empty + stage, k, rounds)
            mY[k * GROUP + thread] = elements(DATA + stage * 4 * GROUP, GROUP)[GROUP - 1 - thread]
            if const_expr(failure != "release-before-read"):
                _release(empty + stage, k, rounds)


@cute.jit
def _release(barrier: Int32, k: Int32, rounds: Int32):
    if k + STAGES < rounds:
        named_arrive(barrier, BOTH)


@cute.jit
def named_pair(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    named_pair_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(BOTH, 1, 1), smem=SMEM)


def build_named_pair(failure: str | None):
    set_entry(named_pair_kernel, "named_pair")
    return named_pair, (failure, argument(ROUNDS * GROUP), argument(ROUNDS * GROUP), Int32(1))


def named_pair_case() -> Case:
    x, y = numbers(ROUNDS, GROUP), unwritten(ROUNDS, GROUP)
    return case((1, BOTH, SMEM), (x, y, ROUNDS), (y, x[:, ::-1]))


@cute.kernel
def turns_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """Two groups work on one buffer by turns, ping-pong: each waits for its barrier and arrives at the other's."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0] % GROUP
    group = warp // 2
    value = elements(DATA, GROUP)
    if group == 1:
        value[thread] = Float32(1.0)
        named_arrive(1, BOTH)
    for k in cutlass.range(rounds, unroll=1):
        named_barrier(1 + group, BOTH)
        if const_expr(failure == "hand-over-before-work"):
            _hand_over(group, k, rounds)
        value[thread] = value[thread] * 2.0 + mX[(2 * k + group) * GROUP + thread]
        if const_expr(failure != "hand-over-before-work"):
            _hand_over(group, k, rounds)
    if group == 1:
        mY[thread] = value[thread]


@cute.jit
def _hand_over(group: Int32, k: Int32, rounds: Int32):
    if group == 0 or k + 1 < rounds:
        named_arrive(2 - group, BOTH)


@cute.jit
def turns(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    turns_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(BOTH, 1, 1), smem=SMEM)


def build_turns(failure: str | None):
    set_entry(turns_kernel, "turns")
    return turns, (failure, argument(2 * ROUNDS * GROUP), argument(GROUP), Int32(1))


def turns_case() -> Case:
    x, y = numbers(2 * ROUNDS, GROUP), unwritten(GROUP)
    expected = x[0] * 0 + 1
    for row in x:
        expected = expected * 2 + row
    return case((1, BOTH, SMEM), (x, y, ROUNDS), (y, expected))


@cute.kernel
def two_groups_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """Two groups turn rows of their own around, each with a named barrier of its own."""
    group, thread = warp_number() // 2, cute.arch.thread_idx()[0] % GROUP
    barrier = 3 if const_expr(failure == "shared-id") else 3 + group
    row = elements(DATA + group * 4 * GROUP, GROUP)
    for k in cutlass.range(rounds + group, unroll=1):
        row[thread] = mX[(k * 2 + group) * GROUP + thread]
        named_barrier(barrier, GROUP)
        mY[(k * 2 + group) * GROUP + thread] = row[GROUP - 1 - thread]
        if const_expr(failure != "no-barrier-before-reuse"):
            named_barrier(barrier, GROUP)


@cute.jit
def two_groups(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    two_groups_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(BOTH, 1, 1), smem=SMEM)


def build_two_groups(failure: str | None):
    set_entry(two_groups_kernel, "two_groups")
    size = (ROUNDS + 1) * BOTH
    return two_groups, (failure, argument(size), argument(size), Int32(1))


def two_groups_case() -> Case:
    x, y = numbers(2 * (ROUNDS + 1), GROUP), unwritten(2 * (ROUNDS + 1), GROUP)
    expected = x[:, ::-1].copy()
    y[-2] = expected[-2]  # group 0 makes one round less
    return case((1, BOTH, SMEM), (x, y, ROUNDS), (y, expected))


@cute.kernel
def warp_exchange_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """The lanes of one warp turn rows around through shared memory; nothing but a warp sync orders lanes."""
    lane, row = cute.arch.lane_idx(), elements(DATA, WARP)
    for k in cutlass.range(rounds, unroll=1):
        row[lane] = mX[k * WARP + lane]
        if const_expr(failure != "no-sync-before-read"):
            cute.arch.sync_warp()
        mY[k * WARP + lane] = row[WARP - 1 - lane]
        if const_expr(failure != "no-sync-before-reuse"):
            cute.arch.sync_warp()


@cute.jit
def warp_exchange(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    warp_exchange_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(WARP, 1, 1), smem=SMEM)


def build_warp_exchange(failure: str | None):
    set_entry(warp_exchange_kernel, "warp_exchange")
    return warp_exchange, (failure, argument(ROUNDS * WARP), argument(ROUNDS * WARP), Int32(1))


def warp_exchange_case() -> Case:
    x, y = numbers(ROUNDS, WARP), unwritten(ROUNDS, WARP)
    return case((1, WARP, SMEM), (x, y, ROUNDS), (y, x[:, ::-1]))


WARPGROUP = 4 * WARP


@cute.kernel
def register_pool_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    """Three warpgroups start with 168 registers a thread; one gives up 128, so that the others can take 64 each."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    if warp < 4:
        if const_expr(failure == "gives-too-few"):
            cute.arch.setmaxregister_decrease(120)
        elif const_expr(failure == "by-one-warp"):
            if warp == 0:
                cute.arch.setmaxregister_decrease(40)
        else:
            cute.arch.setmaxregister_decrease(40)
        mY[thread] = mX[thread]
    else:
        cute.arch.setmaxregister_increase(232)
        mY[thread] = 2.0 * mX[thread]


@cute.jit
def register_pool(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    register_pool_kernel(failure, mX, mY).launch(
        grid=(1, 1, 1), block=(3 * WARPGROUP, 1, 1), smem=SMEM, min_blocks_per_mp=1
    )


def build_register_pool(failure: str | None):
    set_entry(register_pool_kernel, "register_pool")
    return register_pool, (failure, argument(3 * WARPGROUP), argument(3 * WARPGROUP))


def register_pool_case() -> Case:
    x, y = numbers(3, WARPGROUP), unwritten(3, WARPGROUP)
    return case((1, 3 * WARPGROUP, SMEM), (x, y), (y, x * [[1], [2], [2]]))


PATTERNS = (
    Pattern("named-pair", build_named_pair, named_pair_case, (
        Twin("release-before-read", ("race",), moved=("bar.arrive",)),
        Twin("count-too-small", ("named-barrier-count",), also=("race", "uninitialised-read", "deadlock")),
    )),
    Pattern("turns", build_turns, turns_case, (
        Twin("hand-over-before-work", ("race",), moved=("bar.arrive",)),
    )),
    Pattern("two-groups", build_two_groups, two_groups_case, (
        Twin("shared-id", ("named-barrier-shared",), also=("race", "deadlock")),
        Twin("no-barrier-before-reuse", ("race",), removed=("bar.sync",)),
    )),
    Pattern("warp-exchange", build_warp_exchange, warp_exchange_case, (
        Twin("no-sync-before-read", ("warp-sync",), removed=("bar.warp.sync",), visible=False),
        Twin("no-sync-before-reuse", ("warp-sync",), removed=("bar.warp.sync",), visible=False),
    )),
    Pattern("register-pool", build_register_pool, register_pool_case, (
        Twin("gives-too-few", ("register-pool",), also=("deadlock",), visible=False),
        Twin("by-one-warp", ("register-pool",), also=("deadlock",), visible=False),
    )),
)  # fmt: skip
