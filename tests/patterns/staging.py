"""Shared memory as a staging area: bulk stores from it, zero fills of it, element-wise asynchronous copies into it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tests.patterns.device import DATA, WARP, argument, bulk_store, elements, set_entry, shared, warp_number
from tests.patterns.pattern import Case, Pattern, Twin, case, numbers, unwritten

ROUNDS = 4
CHUNK = 128  # floats, one per thread
STAGES = 2
VECTOR = 4  # floats of one element-wise copy
COPIED = 2 * WARP * VECTOR  # floats that two warps copy at once
SMEM = 4096


@cute.kernel
def staged_store_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """All threads fill one staging buffer, every writer fences, one lane starts the bulk store and awaits its reads."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    stage = elements(DATA, CHUNK)
    for k in cutlass.range(rounds, unroll=1):
        if const_expr(failure != "no-wait-before-reuse"):
            _await_reads(warp)
        cute.arch.sync_threads()
        if const_expr(failure == "hole"):
            if warp != 3:
                stage[thread] = 2.0 * mX[k * CHUNK + thread]
        else:
            stage[thread] = 2.0 * mX[k * CHUNK + thread]
        if const_expr(failure == "fence-by-one-warp"):
            if warp == 0:
                cute.arch.fence_view_async_shared()
        elif const_expr(failure != "no-proxy-fence"):
            cute.arch.fence_view_async_shared()
        if const_expr(failure != "no-barrier-before-store"):
            cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                bulk_store(mY.iterator + k * CHUNK, DATA, CHUNK)
    if const_expr(failure != "no-final-wait"):
        _await_reads(warp)


@cute.jit
def _await_reads(warp: Int32):
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def staged_store(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    staged_store_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(CHUNK, 1, 1), smem=SMEM)


def build_staged_store(failure: str | None):
    set_entry(staged_store_kernel, "staged_store")
    return staged_store, (failure, argument(ROUNDS * CHUNK), argument(ROUNDS * CHUNK), Int32(1))


def staged_store_case() -> Case:
    x, y = numbers(ROUNDS, CHUNK), unwritten(ROUNDS, CHUNK)
    return case((1, CHUNK, SMEM), (x, y, ROUNDS), (y, 2 * x))


@cute.kernel
def zero_fill_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    """One thread clears a histogram with st.bulk; then every thread adds its value to the bin of its warp."""
    thread = cute.arch.thread_idx()[0]
    bins = elements(DATA, CHUNK)
    if thread == 0:
        address, size = shared(DATA).toint(), cutlass.Int64(4 * CHUNK)
        cute.arch.inline_ptx("st.bulk.weak.shared::cta [{$r0}], {$r1}, 0;", read_only_args=[address, size])
    if const_expr(failure != "no-barrier-after-fill"):
        cute.arch.sync_threads()
    cute.arch.red(shared(DATA + thread // WARP * 4), mX[thread], op="add", dtype=Float32, sem="relaxed", scope="cta")
    if const_expr(failure != "no-barrier-after-sum"):
        cute.arch.sync_threads()
    mY[thread] = bins[CHUNK - 1 - thread]


@cute.jit
def zero_fill(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor):
    zero_fill_kernel(failure, mX, mY).launch(grid=(1, 1, 1), block=(CHUNK, 1, 1), smem=SMEM)


def build_zero_fill(failure: str | None):
    set_entry(zero_fill_kernel, "zero_fill")
    return zero_fill, (failure, argument(CHUNK), argument(CHUNK))


def zero_fill_case() -> Case:
    x, y = numbers(CHUNK), unwritten(CHUNK)
    bins = 0 * x
    bins[: CHUNK // WARP] = x.reshape(-1, WARP).sum(1)
    return case((1, CHUNK, SMEM), (x, y), (y, bins[::-1]))


@cute.kernel
def copy_groups_kernel(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    """The pipeline of before there were mbarriers: each thread prefetches one vector, awaits its group, meets all."""
    thread = cute.arch.thread_idx()[0]
    _prefetch(mX, 0, thread)
    for k in cutlass.range(rounds, unroll=1):
        if k + 1 < rounds:
            _prefetch(mX, k + 1, thread)
        else:
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(2 if const_expr(failure == "wait-one-group-less") else 1)
        if const_expr(failure != "no-barrier-after-wait"):
            cute.arch.sync_threads()
        x = elements(DATA + k % STAGES * 4 * COPIED, COPIED)
        for i in cutlass.range_constexpr(0, COPIED, 2 * WARP):
            mY[k * COPIED + i + thread] = x[COPIED - 1 - i - thread]
        if const_expr(failure != "no-barrier-before-reuse"):
            cute.arch.sync_threads()


@cute.jit
def _prefetch(mX: cute.Tensor, k, thread: Int32):
    layout = cute.make_layout(VECTOR)
    source = cute.make_tensor(mX.iterator + cute.assume(k * COPIED + VECTOR * thread, divby=VECTOR), layout)
    offset = cute.assume(4 * (k % STAGES * COPIED + VECTOR * thread), divby=4 * VECTOR)
    target = cute.make_tensor(shared(DATA + offset), layout)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32 * VECTOR)
    cute.copy(atom, source, target)
    cute.arch.cp_async_commit_group()


@cute.jit
def copy_groups(failure: Constexpr, mX: cute.Tensor, mY: cute.Tensor, rounds: Int32):
    copy_groups_kernel(failure, mX, mY, rounds).launch(grid=(1, 1, 1), block=(2 * WARP, 1, 1), smem=SMEM)


def build_copy_groups(failure: str | None):
    set_entry(copy_groups_kernel, "copy_groups")
    return copy_groups, (failure, argument(ROUNDS * COPIED), argument(ROUNDS * COPIED), Int32(1))


def copy_groups_case() -> Case:
    x, y = numbers(ROUNDS, COPIED), unwritten(ROUNDS, COPIED)
    return case((1, 2 * WARP, SMEM), (x, y, ROUNDS), (y, x[:, ::-1]))


WAIT_READ = "cp.async.bulk.wait_group.read"
PATTERNS = (
    Pattern("staged-store", build_staged_store, staged_store_case, (
        Twin("no-proxy-fence", ("missing-proxy-fence",), removed=("fence.proxy.async",), visible=False),
        Twin("fence-by-one-warp", ("missing-proxy-fence",), visible=False),
        Twin("no-wait-before-reuse", ("race",), removed=(WAIT_READ,)),
        Twin("no-barrier-before-store", ("race",), removed=("bar.sync",),
             also=("uninitialised-read", "missing-proxy-fence")),
        Twin("hole", ("uninitialised-read",)),
        Twin("no-final-wait", ("global-order",), removed=(WAIT_READ,), visible=False),
    )),
    Pattern("zero-fill", build_zero_fill, zero_fill_case, (
        Twin("no-barrier-after-fill", ("race",), removed=("bar.sync",), also=("uninitialised-read",)),
        Twin("no-barrier-after-sum", ("race",), removed=("bar.sync",)),
    )),
    Pattern("copy-groups", build_copy_groups, copy_groups_case, (
        Twin("wait-one-group-less", ("race",)),
        Twin("no-barrier-after-wait", ("race",), removed=("bar.sync",)),
        Twin("no-barrier-before-reuse", ("race",), removed=("bar.sync",)),
    )),
)  # fmt: skip
