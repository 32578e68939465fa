"""What kernels are handed, in the words of a launch description: rows, scalars of rows, tensor maps, packings.

Strides of extents of 1 are replaced everywhere: they move nothing, but some must be aligned.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from undertow.kernels.sm100.tensors import BackwardTensors
from undertow.plan.description import Tensor, TensorMap
from undertow.plan.schema import DType, Plan


def query_grid(accumulator: torch.Tensor) -> tuple[int, int, int]:
    """One CTA per tile of the (batch, heads, tiles, 8192) accumulator."""
    batch, heads, tiles, _ = accumulator.shape
    return (tiles * heads * batch, 1, 1)


def rows(tensor: torch.Tensor, name: str) -> Tensor:
    """Rows of 64 contiguous elements: (batch, seqlen, heads, 64)."""
    batch, seqlen, heads, _ = tensor.shape
    return Tensor(tensor, dims=(batch, seqlen, heads), strides=legal_strides(tensor)[:-1], name=name)


def tensor_map(plan: Plan, region: str, given: BackwardTensors, name: str) -> TensorMap:
    """Describe the TMA load of one stage of `region`: whole rows, swizzled; rows past the end are zeros.

    Of packed sequences as `kernel.packed_view` says. A tensor without rows is never loaded; k stands in for it.
    """
    smem = plan.smem_region(region)
    tensor = getattr(given, name) if getattr(given, name).numel() else given.k
    whole = rows_map(tensor, smem.dtype, smem.rows, name)
    if given.sequences is None:
        return whole
    (columns, seqlen, heads, _), (of_row, of_head, _) = whole.dims, whole.strides
    dims, strides = (columns, seqlen, seqlen + 1, heads), (of_row, of_row, of_head)
    return replace(whole, dims=dims, strides=strides, offset_bytes=-seqlen * of_row)


def rows_map(tensor: torch.Tensor, dtype: DType, count: int, name: str) -> TensorMap:
    """Describe TMA copies of `count` rows of a head, swizzled, of the (64, seqlen, heads, batch) view of a tensor."""
    batch, seqlen, heads, columns = tensor.shape
    of_batch, of_row, of_head = (stride * dtype.bytes for stride in legal_strides(tensor)[:-1])
    return TensorMap(
        tensor,
        dtype=dtype.label,
        dims=(columns, seqlen, heads, batch),
        strides=(of_row, of_head, of_batch),
        box=(columns, count, 1, 1),
        swizzle=columns * dtype.bytes,
        name=name,
    )


def scalars(tensor: torch.Tensor, name: str) -> Tensor:
    """Numbers of rows, contiguous in their last dimension: (batch, heads, rows)."""
    return Tensor(tensor, dims=tuple(tensor.shape), strides=legal_strides(tensor)[:-1], name=name)


def vector(tensor: torch.Tensor, name: str) -> Tensor:
    """A contiguous vector of any length."""
    return Tensor(tensor, dims=tuple(tensor.shape), name=name)


def packing(given: BackwardTensors, side: str) -> list[Tensor]:
    """The offsets and lengths of one side of packed sequences; no lengths are a vector of length 0."""
    if given.sequences is None:
        return []
    offsets, used = (getattr(given.sequences, f"{kind}_{side}") for kind in ("cu_seqlens", "seqused"))
    used = offsets[:0] if used is None else used
    return [vector(offsets, f"cu_seqlens_{side}"), vector(used, f"seqused_{side}")]


def tiles(tensor: torch.Tensor, name: str) -> Tensor:
    """Contiguous tiles of a fixed number of elements: (batch, heads, tiles, elements)."""
    batch, heads, count, _ = tensor.shape
    return Tensor(tensor, dims=(batch, heads, count), strides=legal_strides(tensor)[:-2], name=name)


def legal_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in elements, with those of extents of 1 replaced: they move nothing, but must be aligned."""
    strides = list(tensor.stride())
    for dim in reversed(range(tensor.ndim)):
        if tensor.shape[dim] == 1:
            strides[dim] = 1 if dim == tensor.ndim - 1 else strides[dim + 1] * tensor.shape[dim + 1]
    return tuple(strides)
