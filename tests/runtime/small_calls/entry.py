"""Calls that compile in a moment, and others that never do."""

from __future__ import annotations

import os
import time
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from tests.kernels.small_kernels import scale_kernel


@cute.jit
def scaled(mX: cute.Tensor, mY: cute.Tensor, factor: cutlass.Float32, stream: Any):
    scale_kernel(mX, mY, factor).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


def build(variant: Any) -> tuple[Any, tuple[Any, ...]]:
    from tests.kernels.small_kernels import build_scale

    if variant.name == "hanging":
        time.sleep(600)
    if variant.name == "crashing":
        os._exit(139)
    if variant.name == "refused":
        raise RuntimeError("no such kernel")
    _, arguments = build_scale()
    return scaled, (*arguments, make_fake_stream(use_tvm_ffi_env_stream=True))
