"""Between the CTAs of a cluster: shared memory of the other one, and mbarriers there."""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from tests.patterns.device import DATA, argument, elements, initialise, mbarrier, set_entry, shared, wait, warp_number
from tests.patterns.pattern import RUNS_AHEAD, Case, Pattern, Twin, case, numbers, unwritten

CHUNK = 128  # floats, one per thread
ROUNDS = 3
SMEM = 2048
PAIR = (2, 1, 1)
TRY_WAIT = "mbarrier.try_wait.parity"


def meet(relaxed: bool = False) -> None:
    """Meet the threads of the whole cluster."""
    cute.arch.cluster_arrive_relaxed() if relaxed else cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def put(rank: Int32, thread: Int32, value: Float32) -> None:
    """Store a number into this thread's place of another CTA's buffer."""
    cute.arch.inline_ptx(
        "{{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; st.shared::cluster.f32 [there], {$r2}; }}",
        read_only_args=[(shared(DATA) + thread).toint(), rank, value],
    )


@cute.kernel
def exchange_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    """Every thread puts a number into the other CTA's memory, and reads what was put into its own."""
    rank, thread = cute.arch.block_idx_in_cluster(), cute.arch.thread_idx()[0]
    x = mX[rank * CHUNK + thread]
    elements(DATA, CHUNK)[thread] = x
    if const_expr(failure != "no-first-meeting"):
        meet()
    put(rank ^ 1, thread, x * 2.0)
    if const_expr(failure == "barrier-of-one-cta"):
        cute.arch.sync_threads()
    else:
        meet(failure == "relaxed-arrival")
    mY[rank * CHUNK + thread] = elements(DATA, CHUNK)[(thread + 1) % CHUNK]
    meet()


@cute.jit
def exchange(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    exchange_kernel(failure, mX, mY).launch(grid=PAIR, block=(CHUNK, 1, 1), cluster=PAIR, smem=SMEM)


def build_exchange(failure: str | None):
    set_entry(exchange_kernel, "exchange")
    return exchange, (failure, argument(2 * CHUNK), argument(2 * CHUNK))


def exchange_case() -> Case:
    x, y = numbers(2, CHUNK), unwritten(2, CHUNK)
    expected = 2 * x[::-1][:, [*range(1, CHUNK), 0]]
    return pair_case((x.reshape(-1), y.reshape(-1)), (y, expected))


def pair_case(params: tuple, *results: tuple) -> Case:
    """A launch of two CTAs that are one cluster."""
    made = case((2, CHUNK, SMEM), params, *results)
    return replace(made, launch=replace(made.launch, cluster=PAIR))


@cute.kernel
def hand_over_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    """CTA 0 fills a buffer of CTA 1 round after round; each tells the other by an mbarrier of the other's."""
    rank, warp, thread = cute.arch.block_idx_in_cluster(), warp_number(), cute.arch.thread_idx()[0]
    full, empty = 0, 1
    if warp == 0:
        initialise([CHUNK, CHUNK])
    if const_expr(failure != "no-meeting-after-init"):
        meet()
    for turn in range(ROUNDS):
        if rank == 0:
            if const_expr(failure != "no-wait-for-empty"):
                wait(empty, (turn & 1) ^ 1)
            put(Int32(1), thread, mX[turn * CHUNK + thread])
            cute.arch.mbarrier_arrive(mbarrier(full), Int32(1), relaxed=failure == "relaxed-arrival")
        else:
            if const_expr(failure != "no-wait-for-full"):
                wait(full, turn & 1)
            mY[turn * CHUNK + thread] = elements(DATA, CHUNK)[(thread + 1) % CHUNK]
            cute.arch.mbarrier_arrive(mbarrier(empty), Int32(0))
    meet()


@cute.jit
def hand_over(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    hand_over_kernel(failure, mX, mY).launch(grid=PAIR, block=(CHUNK, 1, 1), cluster=PAIR, smem=SMEM)


def build_hand_over(failure: str | None):
    set_entry(hand_over_kernel, "hand_over")
    return hand_over, (failure, argument(ROUNDS * CHUNK), argument(ROUNDS * CHUNK))


def hand_over_case() -> Case:
    x, y = numbers(ROUNDS, CHUNK), unwritten(ROUNDS, CHUNK)
    return pair_case((x.reshape(-1), y.reshape(-1)), (y, x[:, [*range(1, CHUNK), 0]]))


MEETING = ("barrier.cluster.arrive", "barrier.cluster.wait")
PATTERNS = (
    Pattern("cluster-exchange", build_exchange, exchange_case, (
        Twin("no-first-meeting", ("race",), removed=MEETING),
        Twin("barrier-of-one-cta", ("race",), removed=MEETING, added=("bar.sync",)),
        Twin("relaxed-arrival", ("race",), removed=MEETING[:1], added=(MEETING[0] + ".relaxed",), visible=False),
    )),
    Pattern("cluster-hand-over", build_hand_over, hand_over_case, (
        Twin("no-meeting-after-init", ("race",), removed=MEETING),
        Twin("no-wait-for-empty", ("race",), removed=(TRY_WAIT,) * ROUNDS, also=RUNS_AHEAD),
        Twin("no-wait-for-full", ("race",), removed=(TRY_WAIT,) * ROUNDS, also=(*RUNS_AHEAD, "uninitialised-read")),
        Twin(
            "relaxed-arrival", ("race",), removed=("mbarrier.arrive.shared::cluster",) * ROUNDS,
            added=("mbarrier.arrive.relaxed",) * ROUNDS, visible=False,
        ),
    )),
)  # fmt: skip
