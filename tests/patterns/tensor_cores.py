"""One CTA, one GEMM of 128 x 32 x 64: loads, MMAs, commit, epilogue, and what may go wrong between them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Constexpr, Int32, const_expr

from tests.patterns.device import (
    ACCUMULATOR,
    COLUMNS,
    DATA,
    K_STEPS,
    ROWS,
    WARP,
    allocate_tmem,
    allocated_tmem,
    argument,
    bulk_store,
    commit,
    expect,
    free_tmem,
    initialise,
    mbarrier,
    multiply,
    own_lanes,
    set_entry,
    shared,
    store_row,
    wait,
    warp_number,
)
from tests.patterns.pattern import Case, Pattern, Twin, bfloat16, case, numbers, unwritten
from undertow.emulator import TensorMap
from undertow.kernels.sm100.instructions import store_vector, tmem_load

THREADS = 4 * WARP
A, B, B2 = DATA, DATA + ROWS.size, DATA + ROWS.size + COLUMNS.size  # operands in shared memory, by byte offset
SMEM = B2 + COLUMNS.size
TRY_WAIT = "mbarrier.try_wait.parity"


def operand_arguments() -> tuple[cute.Tensor, cute.Tensor]:
    """A (128 x 64) and two B (32 x 64), of which some patterns use one."""
    shapes = (ROWS.rows, ROWS.columns), (2 * COLUMNS.rows, COLUMNS.columns)
    return tuple(argument(*shape, dtype=cutlass.BFloat16) for shape in shapes)


def operands() -> tuple[tuple[TensorMap, TensorMap], np.ndarray, np.ndarray]:
    """Tensor maps of A and of both B, and their values as float32."""
    a, b = numbers(ROWS.rows, ROWS.columns), numbers(2 * COLUMNS.rows, COLUMNS.columns)
    return (tensor_map(a, ROWS.rows), tensor_map(b, COLUMNS.rows)), a, b


def tensor_map(values: np.ndarray, rows: int) -> TensorMap:
    """Boxes of `rows` whole rows of 64 bf16 values, swizzled."""
    columns = values.shape[1]
    return TensorMap(bfloat16(values), "bf16", (columns, len(values)), (2 * columns,), (64, rows), 128)


@cute.jit
def load_operands(rows: cute.CopyAtom, columns: cute.CopyAtom, number: Constexpr):
    """Bring A and the first B, on one mbarrier."""
    with cute.arch.elect_one():
        expect(number, ROWS.size + COLUMNS.size)
    ROWS.load(rows, (0, 0), A, number)
    COLUMNS.load(columns, (0, 0), B, number)


def wait_relaxed(number: int, parity: int) -> None:
    """Wait without acquiring: what was released on the barrier is not yet ordered before what follows."""
    cute.arch.inline_ptx(
        "{{ .reg .pred done; again: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 done, [{$r0}], {$r1};"
        " @!done bra again; }}",
        read_only_args=[mbarrier(number).toint(), Int32(parity)],
    )


def fence_after_wait() -> None:
    """Order the tcgen05 instructions that follow after those before the barrier."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


@cute.kernel
def mma_epilogue_kernel(
    failure: Constexpr, relaxed: Constexpr, rows: cute.CopyAtom, columns: cute.CopyAtom, mD: cute.Tensor
):
    """Warp 0 loads, multiplies and commits; all four warps wait for the commit, load D and write it."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    loaded, done = 0, 1
    if warp == 0:
        initialise([1, 1])
        allocate_tmem(ACCUMULATOR)
    cute.arch.sync_threads()
    tmem = allocated_tmem()
    if warp == 0:
        load_operands(rows, columns, loaded)
        if const_expr(failure != "no-wait-for-loads"):
            wait(loaded, 0)
        with cute.arch.elect_one():
            multiply(tmem, A, B, range(K_STEPS - 1))
            if const_expr(failure == "commit-before-last-mma"):
                commit(done)
            multiply(tmem, A, B, range(K_STEPS - 1, K_STEPS))
            if const_expr(failure != "commit-before-last-mma"):
                commit(done)
    if const_expr(relaxed):
        wait_relaxed(done, 0)
        if const_expr(failure != "no-fence-after-wait"):
            fence_after_wait()
    elif const_expr(failure != "no-wait-for-commit"):
        wait(done, 0)
    words = tmem_load(own_lanes(tmem, warp), ACCUMULATOR)
    if const_expr(failure != "use-before-wait-ld"):
        cute.arch.fence_view_async_tmem_load()
    store_row(mD.iterator + cute.assume(thread * ACCUMULATOR, divby=ACCUMULATOR), words)
    cute.arch.sync_threads()
    if warp == 0:
        free_tmem(tmem, ACCUMULATOR)


@cute.jit
def mma_epilogue(failure: Constexpr, relaxed: Constexpr, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor):
    mma_epilogue_kernel(failure, relaxed, ROWS.tensor_map(mA), COLUMNS.tensor_map(mB), mD).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), smem=SMEM
    )


def build_mma_epilogue(failure: str | None, relaxed: bool = False):
    set_entry(mma_epilogue_kernel, "mma_epilogue")
    return mma_epilogue, (failure, relaxed, *operand_arguments(), argument(THREADS * ACCUMULATOR, dtype=Int32))


def build_relaxed_wait(failure: str | None):
    return build_mma_epilogue(failure, relaxed=True)


def gemm_case() -> Case:
    maps, a, b = operands()
    d = unwritten(THREADS, ACCUMULATOR)
    return case((1, THREADS, SMEM), (*maps, d), (d, a @ b[: COLUMNS.rows].T))


@cute.kernel
def two_issuers_kernel(failure: Constexpr, rows: cute.CopyAtom, columns: cute.CopyAtom, mD: cute.Tensor):
    """Warps 0 and 1 each issue half of the sum; the tensor pipe orders only what one thread issues."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    loaded, half, done = 0, 1, 2
    if warp == 0:
        initialise([1, 1, 1])
        allocate_tmem(ACCUMULATOR)
    cute.arch.sync_threads()
    tmem = allocated_tmem()
    if warp == 0:
        load_operands(rows, columns, loaded)
        wait(loaded, 0)
        with cute.arch.elect_one():
            multiply(tmem, A, B, range(K_STEPS // 2))
            commit(half)
    elif warp == 1:
        wait(loaded, 0)
        if const_expr(failure != "no-wait-for-first-half"):
            wait(half, 0)
        with cute.arch.elect_one():
            multiply(tmem, A, B, range(K_STEPS // 2, K_STEPS))
            commit(done)
    wait(done, 0)
    words = tmem_load(own_lanes(tmem, warp), ACCUMULATOR)
    cute.arch.fence_view_async_tmem_load()
    store_row(mD.iterator + cute.assume(thread * ACCUMULATOR, divby=ACCUMULATOR), words)
    cute.arch.sync_threads()
    if warp == 0:
        free_tmem(tmem, ACCUMULATOR)


@cute.jit
def two_issuers(failure: Constexpr, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor):
    two_issuers_kernel(failure, ROWS.tensor_map(mA), COLUMNS.tensor_map(mB), mD).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), smem=SMEM
    )


def build_two_issuers(failure: str | None):
    set_entry(two_issuers_kernel, "two_issuers")
    return two_issuers, (failure, *operand_arguments(), argument(THREADS * ACCUMULATOR, dtype=Int32))


@cute.kernel
def aliased_staging_kernel(failure: Constexpr, rows: cute.CopyAtom, columns: cute.CopyAtom, mD: cute.Tensor):
    """D1 = A B1 and D2 = A B2; D1 is staged for a bulk store over A, which the second GEMM reads too."""
    warp, thread = warp_number(), cute.arch.thread_idx()[0]
    loaded, first, second = 0, 1, 2
    if warp == 0:
        initialise([1, 1, 1])
        allocate_tmem(2 * ACCUMULATOR)
    cute.arch.sync_threads()
    tmem = allocated_tmem()
    if warp == 0:
        with cute.arch.elect_one():
            expect(loaded, ROWS.size + 2 * COLUMNS.size)
        ROWS.load(rows, (0, 0), A, loaded)
        COLUMNS.load(columns, (0, 0), B, loaded)
        COLUMNS.load(columns, (0, COLUMNS.rows), B2, loaded)
        wait(loaded, 0)
        with cute.arch.elect_one():
            multiply(tmem, A, B, range(K_STEPS))
            commit(first)
            multiply(tmem + ACCUMULATOR, A, B2, range(K_STEPS))
            commit(second)
    lanes = own_lanes(tmem, warp)
    wait(first, 0)
    words = tmem_load(lanes, ACCUMULATOR)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(failure != "staged-over-live-operand"):
        wait(second, 0)
    for vector in cutlass.range_constexpr(0, ACCUMULATOR, 4):
        address = shared(A).toint() + (thread * ACCUMULATOR + vector) * 4
        store_vector("shared", address, words[vector : vector + 4])
    if const_expr(failure != "no-proxy-fence"):
        cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    if warp == 0:
        with cute.arch.elect_one():
            bulk_store(mD.iterator, A, THREADS * ACCUMULATOR)
    if const_expr(failure == "staged-over-live-operand"):
        wait(second, 0)
    words = tmem_load(lanes + ACCUMULATOR, ACCUMULATOR)
    cute.arch.fence_view_async_tmem_load()
    store_row(mD.iterator + cute.assume((THREADS + thread) * ACCUMULATOR, divby=ACCUMULATOR), words)
    cute.arch.sync_threads()
    if warp == 0:
        free_tmem(tmem, 2 * ACCUMULATOR)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def aliased_staging(failure: Constexpr, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor):
    aliased_staging_kernel(failure, ROWS.tensor_map(mA), COLUMNS.tensor_map(mB), mD).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), smem=SMEM
    )


def build_aliased_staging(failure: str | None):
    set_entry(aliased_staging_kernel, "aliased_staging")
    return aliased_staging, (failure, *operand_arguments(), argument(2 * THREADS * ACCUMULATOR))


def aliased_staging_case() -> Case:
    maps, a, b = operands()
    d = unwritten(2, THREADS, ACCUMULATOR)
    return case((1, THREADS, SMEM), (*maps, d), (d, a @ b.reshape(2, -1, COLUMNS.columns).swapaxes(1, 2)))


PATTERNS = (
    Pattern("mma-epilogue", build_mma_epilogue, gemm_case, (
        Twin("no-wait-for-loads", ("race",), removed=(TRY_WAIT,),
             also=("uninitialised-read", "mbarrier-unobserved-phase")),
        Twin("no-wait-for-commit", ("race",), removed=(TRY_WAIT,), also=("uninitialised-read", "tmem-lifetime")),
        Twin("commit-before-last-mma", ("race",), moved=("tcgen05.commit",), also=("tmem-lifetime",)),
        Twin("use-before-wait-ld", ("tmem-load-not-waited",), removed=("tcgen05.wait::ld",),
             visible=False),
    )),
    Pattern("relaxed-wait", build_relaxed_wait, gemm_case, (
        Twin("no-fence-after-wait", ("race",), removed=("tcgen05.fence::after",),
             also=("tmem-lifetime",), visible=False),
    )),
    Pattern("two-issuers", build_two_issuers, gemm_case, (
        Twin("no-wait-for-first-half", ("race",), removed=(TRY_WAIT,), also=("tmem-lifetime", "uninitialised-read")),
    )),
    Pattern("aliased-staging", build_aliased_staging, aliased_staging_case, (
        Twin("staged-over-live-operand", ("race",), moved=(TRY_WAIT,)),
        Twin("no-proxy-fence", ("missing-proxy-fence",), removed=("fence.proxy.async",), visible=False),
    )),
)  # fmt: skip
