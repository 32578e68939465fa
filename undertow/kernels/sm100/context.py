"""What each role may touch: its context holds nothing else. Static fields are Constexpr and cost no register."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from undertow.kernels.sm100.bind import Channels, SharedMemory
from undertow.kernels.sm100.work import Work


@dataclass(frozen=True)
class TensorMaps:
    """TMA loads of one tile, from the (64, seqlen, heads, batch) view of a tensor into swizzled rows."""

    q: cute.CopyAtom
    k: cute.CopyAtom
    v: cute.CopyAtom
    do: cute.CopyAtom


@dataclass(frozen=True)
class LoadContext:
    """Tensors in, shared memory out. mLSE_log2, mD: (batch, heads, padded seqlen_q) fp32."""

    plan: cutlass.Constexpr
    channels: Channels
    smem: SharedMemory
    work: Work
    maps: TensorMaps
    mLSE_log2: cute.Tensor
    mD: cute.Tensor


@dataclass(frozen=True)
class MmaContext:
    """Operands in shared and tensor memory, accumulators in tensor memory. tmem: address of the allocation."""

    plan: cutlass.Constexpr
    channels: Channels
    smem: SharedMemory
    tmem: Int32
    trips: Int32


@dataclass(frozen=True)
class ComputeContext:
    """tmem: the allocation at the warp's lanes. warpgroup: 0 or 1. row: key row in the tile. has_row: it exists."""

    plan: cutlass.Constexpr
    channels: Channels
    smem: SharedMemory
    tmem: Int32
    warpgroup: Int32
    row: Int32
    has_row: Boolean
    work: Work
    softmax_scale_log2: Float32


@dataclass(frozen=True)
class EpilogueContext:
    """gdK, gdV: the 64 elements of the thread's key row. tmem: at the warp's lanes.

    has_row: the tensors have the row. is_used: it holds data; if not, zeros are written.
    """

    plan: cutlass.Constexpr
    channels: Channels
    tmem: Int32
    warpgroup: Int32
    has_row: Boolean
    is_used: Boolean
    gdK: cute.Tensor
    gdV: cute.Tensor
    softmax_scale: Float32


@dataclass(frozen=True)
class ReduceContext:
    """mdQ_accumulator: (batch, heads, tiles, 8192) fp32. row: query row in the tile. tmem: at the warp's lanes.

    is_leader: the warp issues the bulk operations.
    """

    plan: cutlass.Constexpr
    channels: Channels
    smem: SharedMemory
    tmem: Int32
    row: Int32
    is_leader: Boolean
    mdQ_accumulator: cute.Tensor
    work: Work
