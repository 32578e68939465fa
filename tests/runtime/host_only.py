"""Pieces of the host code of the compiled calls, compiled for CPU tensors, so that they run anywhere."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from undertow.kernels.sm100 import entry


@cute.jit
def write_layout(tensor: cute.Tensor, packed: Constexpr, out: cute.Tensor):
    """The extents and strides that a kernel is given: four or three of each."""
    given = entry.batched(tensor, packed)
    for dim in cutlass.range_constexpr(len(given.shape)):
        out[dim] = Int64(given.shape[dim])
        out[len(given.shape) + dim] = Int64(given.stride[dim])


@cute.jit
def write_buffers(variant: Constexpr, workspace: cute.Tensor, extents: Any, out: cute.Tensor):
    """Of every buffer its offset in bytes, extents and strides, one behind the other."""
    at = 0
    buffers = entry.cut(variant.rows, workspace, tuple(Int32(extent) for extent in extents))
    for buffer in buffers:
        if cutlass.const_expr(buffer is not None):
            out[at] = Int64(buffer.iterator.toint()) - Int64(workspace.iterator.toint())
            for dim in cutlass.range_constexpr(len(buffer.shape)):
                out[at + 1 + dim] = Int64(buffer.shape[dim])
                out[at + 1 + len(buffer.shape) + dim] = Int64(buffer.stride[dim])
            at += 1 + 2 * len(buffer.shape)
