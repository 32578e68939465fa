"""Reports about compilers that dropped or added something: what the compiled kernel really does, step by step."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass.cute.runtime import make_fake_tensor

from undertow import emulator
from undertow.kernels.compile import CompiledKernel, compile_kernel

ROWS, COLUMNS, VECTOR = 2, 16, 8
UNWRITTEN, WRITTEN = -1.0, 3.0


def build():
    rows = make_fake_tensor(cutlass.Float32, (cute.sym_int32(), COLUMNS), stride=(COLUMNS, 1), assumed_align=16)
    return store, (rows, cutlass.Int32(1), cutlass.Int32(1))


@cute.jit
def store(mOut: cute.Tensor, columns: cutlass.Int32, ctas: cutlass.Int32):
    store_kernel(mOut, columns).launch(grid=(ctas, 1, 1), block=(32, 1, 1))


@cute.kernel
def store_kernel(mOut: cute.Tensor, columns: cutlass.Int32):
    """Thread t writes vector t of every row of this CTA, in a loop that strides by the grid, if all of it is wanted."""
    thread, cta, ctas = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
    shape = ((4, 1), VECTOR // 4)
    values = cute.make_rmem_tensor(shape, cutlass.Float32)
    values.fill(WRITTEN)
    wanted = cute.make_rmem_tensor((1, VECTOR // 4), cutlass.Boolean)
    for part in cutlass.range_constexpr(VECTOR // 4):
        wanted[0, part] = thread * VECTOR + 4 * part + 4 <= columns
    row = cta
    while row < mOut.shape[0]:
        start = mOut.iterator + row * COLUMNS + cutlass.min(thread * VECTOR, COLUMNS - VECTOR)
        target = cute.make_tensor(start.align(16), cute.make_layout(shape))
        cute.copy(atom, values, target, pred=wanted)
        row += ctas


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """An endless loop of the kernel is an endless loop of the emulator."""

    def late(*_: object) -> None:
        raise TimeoutError(f"the kernel has not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def kernel() -> CompiledKernel:
    return compile_kernel("predicated", (ROWS, COLUMNS, VECTOR), build)


@pytest.mark.parametrize("columns", [0, 4, 12, 16])
@pytest.mark.parametrize(("rows", "ctas"), [(2, 1), (2, 2), (5, 2), (1, 3)])
def test_a_predicated_store_in_a_grid_stride_loop(kernel, columns, rows, ctas):
    """NVIDIA/cutlass#3241: some releases of the compiler dropped the copy, or never left the loop."""
    out = np.full((rows, COLUMNS), UNWRITTEN, np.float32)
    launch = emulator.Launch(grid=(ctas,), block=(32,), params=[emulator.Tensor(out, dims=(rows,)), columns])
    with within(60):
        emulator.launch(kernel.ptx, launch)
    expected = np.where(np.arange(COLUMNS) < columns, WRITTEN, UNWRITTEN) * np.ones((rows, 1))
    assert np.array_equal(out, expected)


ENDLESS = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry loop()
{
    .reg .b32 %r<2>;
    mov.b32 %r1, 0;
$loop:
    add.s32 %r1, %r1, 1;
    bra $loop;
}
"""


def test_an_endless_loop_would_be_noticed():
    with pytest.raises((TimeoutError, emulator.Deadlock)), within(2):
        emulator.launch(ENDLESS, emulator.Launch(grid=(1,), block=(32,)))
