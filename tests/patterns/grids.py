"""Between CTAs: data in global memory behind a flag, and sums in a fixed order behind a semaphore."""

from __future__ import annotations

import cutlass.cute as cute
import numpy as np
from cutlass import Constexpr, Int32, const_expr

from tests.patterns.device import DATA, argument, elements, set_entry, shared, warp_number
from tests.patterns.pattern import Case, Pattern, Twin, case, numbers, unwritten
from undertow.kernels.sm100.instructions import bulk_reduce_add

CHUNK = 128  # floats, one per thread
CTAS = 4
SMEM = 2048
WAIT = "cp.async.bulk.wait_group"


@cute.jit
def spin_until(flag: cute.Pointer, target: Int32, ordered: Constexpr):
    """Read a flag until it has reached `target`, acquiring what was released with it."""
    order = "acquire" if const_expr(ordered) else "relaxed"
    seen = cute.arch.load(flag, Int32, sem=order, scope="gpu")
    while seen < target:
        seen = cute.arch.load(flag, Int32, sem=order, scope="gpu")


def raise_flag(flag: cute.Pointer, ordered: bool) -> None:
    """Add one to a flag and release what this thread has seen and done."""
    cute.arch.red(flag, Int32(1), op="add", dtype=Int32, sem="release" if ordered else "relaxed", scope="gpu")


@cute.kernel
def reduce_then_release_kernel(failure: Constexpr, mX: cute.Tensor, mSum: cute.Tensor, mFlag: cute.Tensor, mY):
    """CTA 0 adds its chunk to a sum by a bulk reduction and raises a flag; CTA 1 waits for it and reads the sum."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    if cute.arch.block_idx()[0] == 0:
        elements(DATA, CHUNK)[thread] = mX[thread]
        if const_expr(failure != "no-proxy-fence"):
            cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                bulk_reduce_add(mSum.iterator, shared(DATA), 4 * CHUNK)
                cute.arch.cp_async_bulk_commit_group()
                if const_expr(failure == "await-reads-only"):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                elif const_expr(failure != "no-wait"):
                    cute.arch.cp_async_bulk_wait_group(0)
                raise_flag(mFlag.iterator, failure != "relaxed-flag")
    else:
        if thread == 0:
            spin_until(mFlag.iterator, Int32(1), failure != "relaxed-spin")
        if const_expr(failure != "no-barrier-after-spin"):
            cute.arch.sync_threads()
        mY[thread] = mSum[thread]


@cute.jit
def reduce_then_release(failure: Constexpr, mX: cute.Tensor, mSum: cute.Tensor, mFlag: cute.Tensor, mY: cute.Tensor):
    reduce_then_release_kernel(failure, mX, mSum, mFlag, mY).launch(grid=(2, 1, 1), block=(CHUNK, 1, 1), smem=SMEM)


def build_reduce_then_release(failure: str | None):
    set_entry(reduce_then_release_kernel, "reduce_then_release")
    flag = argument(1, dtype=Int32)
    return reduce_then_release, (failure, argument(CHUNK), argument(CHUNK), flag, argument(CHUNK))


def reduce_then_release_case() -> Case:
    x, start, y = numbers(CHUNK), numbers(3, CHUNK)[2], unwritten(CHUNK)
    total = x + start
    return case((2, CHUNK, SMEM), (x, start, np.zeros(1, np.int32), y), (y, total), (start, total))


@cute.kernel
def ordered_sum_kernel(failure: Constexpr, mX: cute.Tensor, mSum: cute.Tensor, mTurn: cute.Tensor):
    """Each CTA waits for its turn, adds with ordinary loads and stores, and passes the turn on."""
    cta, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    x = mX[cta * CHUNK + thread]
    if const_expr(failure != "no-turn"):
        if thread == 0:
            spin_until(mTurn.iterator, cta, failure != "relaxed-spin")
        if const_expr(failure != "no-barrier-after-spin"):
            cute.arch.sync_threads()
    mSum[thread] = mSum[thread] * 2.0 + x
    if const_expr(failure != "no-barrier-before-release"):
        cute.arch.sync_threads()
    if thread == 0:
        raise_flag(mTurn.iterator, failure != "relaxed-release")


@cute.jit
def ordered_sum(failure: Constexpr, mX: cute.Tensor, mSum: cute.Tensor, mTurn: cute.Tensor):
    ordered_sum_kernel(failure, mX, mSum, mTurn).launch(grid=(CTAS, 1, 1), block=(CHUNK, 1, 1), smem=SMEM)


def build_ordered_sum(failure: str | None):
    set_entry(ordered_sum_kernel, "ordered_sum")
    return ordered_sum, (failure, argument(CTAS * CHUNK), argument(CHUNK), argument(1, dtype=Int32))


def ordered_sum_case() -> Case:
    x, total = numbers(CTAS, CHUNK), numbers(3, CHUNK)[2]
    expected = total
    for row in x:
        expected = 2 * expected + row
    return case((CTAS, CHUNK, SMEM), (x, total, np.zeros(1, np.int32)), (total, expected))


PATTERNS = (
    Pattern("reduce-then-release", build_reduce_then_release, reduce_then_release_case, (
        Twin("await-reads-only", ("global-order",), removed=(WAIT,), added=(WAIT + ".read",), visible=False),
        Twin("no-wait", ("global-order",), removed=(WAIT,), visible=False),
        Twin("relaxed-flag", ("global-order",), removed=("red.release",), added=("red.relaxed",), visible=False),
        Twin("relaxed-spin", ("global-order",), removed=("ld.acquire",) * 2, added=("ld.relaxed",) * 2, visible=False),
        Twin("no-proxy-fence", ("missing-proxy-fence",), removed=("fence.proxy.async",), visible=False),
    )),
    Pattern("ordered-sum", build_ordered_sum, ordered_sum_case, (
        Twin("relaxed-spin", ("global-order",), removed=("ld.acquire",) * 2, added=("ld.relaxed",) * 2, visible=False),
        Twin("relaxed-release", ("global-order",), removed=("red.release",), added=("red.relaxed",), visible=False),
        Twin("no-barrier-before-release", ("global-order",), removed=("bar.sync",), visible=False),
        Twin("no-barrier-after-spin", ("global-order",), removed=("bar.sync",)),
        Twin("no-turn", ("global-order",), removed=("ld.acquire",) * 2 + ("bar.sync",)),
    )),
)  # fmt: skip
