"""Host code of the compiled calls, compiled for CPU tensors and without its launches, so that it runs anywhere."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from undertow.kernels.sm100 import entry
from undertow.kernels.sm100.call import Variant
from undertow.kernels.sm100.work import Scalars


def on_cpu(argument: Any) -> Any:
    """The same arguments as tensors in CPU memory."""
    if isinstance(argument, cute.Tensor):
        generic = cutlass.AddressSpace.generic
        return make_fake_tensor(
            argument.element_type,
            argument.shape,
            stride=argument.stride,
            memspace=generic,
            assumed_align=argument._assumed_align,
        )
    if is_dataclass(argument):
        return type(argument)(*(on_cpu(getattr(argument, field.name)) for field in fields(argument)))
    return argument


@cute.jit
def without_launches(workspace: cute.Tensor, reads: entry.Reads, writes: entry.Writes, scalars: Scalars):
    """Takes what the compiled call takes, checks it likewise, does nothing."""


def stub(variant: Variant) -> Any:
    """A function with the signature of the compiled call of `variant`, for CPU tensors, which launches nothing."""
    _, (_, *arguments, _) = entry.build(variant)
    compiled = cute.compile(without_launches, *map(on_cpu, arguments), options="--enable-tvm-ffi")
    return compiled


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
