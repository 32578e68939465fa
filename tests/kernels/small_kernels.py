"""Kernels small enough to know what the compiler must say about them."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

SPILL_VALUES = 96  # live across a loop in a CTA of 1024 threads, which leaves 64 registers to each


def build_scale() -> tuple[Any, tuple[Any, ...]]:
    """y = factor * x, one element per thread: no reason to spill."""
    return scale, (_vector(), _vector(), cutlass.Float32(1.0))


def build_spilling() -> tuple[Any, tuple[Any, ...]]:
    """More live values than there can be registers."""
    return spilling, (_vector(), _vector())


def build_two_kernels() -> tuple[Any, tuple[Any, ...]]:
    return two_kernels, (_vector(), _vector())


def build_refused() -> tuple[Any, tuple[Any, ...]]:
    return refused, (_vector(),)


def _vector() -> Any:
    return make_fake_tensor(cutlass.Float32, (cute.sym_int32(),), stride=(1,), assumed_align=16)


@cute.jit
def scale(mX: cute.Tensor, mY: cute.Tensor, factor: cutlass.Float32):
    scale_kernel(mX, mY, factor).launch(grid=(cute.ceil_div(mX.shape[0], 128), 1, 1), block=(128, 1, 1))


@cute.kernel
def scale_kernel(mX: cute.Tensor, mY: cute.Tensor, factor: cutlass.Float32):
    index = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
    if index < mX.shape[0]:
        mY[index] = mX[index] * factor


@cute.jit
def spilling(mX: cute.Tensor, mY: cute.Tensor):
    spilling_kernel(mX, mY).launch(grid=(1, 1, 1), block=(1024, 1, 1))


@cute.kernel
def spilling_kernel(mX: cute.Tensor, mY: cute.Tensor):
    thread = cute.arch.thread_idx()[0]
    sums = cute.make_rmem_tensor((SPILL_VALUES,), cutlass.Float32)
    sums.fill(0.0)
    for step in cutlass.range(mX.shape[0] // 1024, unroll=1):
        x = mX[thread + 1024 * step]
        for i in cutlass.range(SPILL_VALUES, unroll_full=True):
            sums[i] = sums[i] * x + mX[i]
    for i in cutlass.range(SPILL_VALUES, unroll_full=True):
        mY[thread + 1024 * i] = sums[i] + sums[SPILL_VALUES - 1 - i]


@cute.jit
def two_kernels(mX: cute.Tensor, mY: cute.Tensor):
    scale_kernel(mX, mY, cutlass.Float32(2.0)).launch(grid=(1, 1, 1), block=(128, 1, 1))
    spilling_kernel(mX, mY).launch(grid=(1, 1, 1), block=(1024, 1, 1))


@cute.jit
def refused(mX: cute.Tensor):
    """Asks for a tensor element by a string, which no kernel can do."""
    mX["first"] = cutlass.Float32(0.0)
