"""What each role may touch: its context holds nothing else. Static fields are Constexpr and cost no register."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from undertow.kernels.sm100.bind import Channels, SharedMemory
from undertow.kernels.sm100.work import Scalars, Work


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
    scalars: Scalars


@dataclass(frozen=True)
class EpilogueContext:
    """mdK, mdV: (batch, seqlen_k, kv_heads, 64). row: key row in the tile. tmem: at the warp's lanes."""

    plan: cutlass.Constexpr
    channels: Channels
    tmem: Int32
    warpgroup: Int32
    row: Int32
    work: Work
    mdK: cute.Tensor
    mdV: cute.Tensor
    softmax_scale: Float32

    @property
    def key(self) -> Int32:
        """The thread's key within the sequence."""
        return self.work.kv_tile * self.plan.tile_n + self.row


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
    mTurns: Any  # (batch, heads, tiles) i32, or None if the order of sums does not matter
    work: Work
