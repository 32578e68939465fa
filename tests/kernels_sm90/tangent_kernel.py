"""A kernel that applies the tangents of a softcap to numbers, 16 a thread as the softmax does."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor

from undertow.kernels.sm90.softmax import hyperbolic_tangents

CHUNK, THREADS = 16, 128


def build() -> tuple[Any, tuple[Any, ...]]:
    vectors = [make_fake_tensor(cutlass.Float32, (cute.sym_int32(),), stride=(1,), assumed_align=16) for _ in range(2)]
    return tangents, (*vectors, Float32(1.0), Float32(1.0))


@cute.jit
def tangents(mX: cute.Tensor, mY: cute.Tensor, scale: Float32, softcap_log2: Float32):
    blocks = mX.shape[0] // (CHUNK * THREADS)
    tangents_kernel(mX, mY, scale, softcap_log2).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def tangents_kernel(mX: cute.Tensor, mY: cute.Tensor, scale: Float32, softcap_log2: Float32):
    first = (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]) * CHUNK
    found = hyperbolic_tangents([mX[first + index] for index in range(CHUNK)], scale, softcap_log2)
    for index, value in enumerate(found):
        mY[first + index] = value
