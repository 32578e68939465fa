"""What each role may touch: its context holds nothing else. Static fields are Constexpr and cost no register."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from undertow.kernels.sm90.work import Items, LaunchScalars
from undertow.kernels.sm100.bind import Channels, SharedMemory
from undertow.kernels.sm100.context import TensorMaps
from undertow.kernels.sm100.work import Work


@dataclass(frozen=True)
class LoadContext:
    """Tensors in, shared memory out. mTerms: (batch, heads, tiles, 2048) of the 16-bit type. mLSE: as of the kernel."""

    plan: cutlass.Constexpr
    channels: Channels
    smem: SharedMemory
    items: Items
    maps: TensorMaps
    mTerms: cute.Tensor
    mLSE: Any


@dataclass(frozen=True)
class StoreMaps:
    """TMA stores of the rows of a warp, from swizzled rows to the (64, seqlen, heads, batch) view of a tensor."""

    dv: cute.CopyAtom
    dk: cute.CopyAtom


@dataclass(frozen=True)
class AllMaps:
    """What TMA knows of the tensors. stores: None where groups are split."""

    loads: TensorMaps
    stores: StoreMaps | None


@dataclass(frozen=True)
class EpilogueContext:
    """mdK, mdV: (batch, seqlen_k, kv_heads, 64); maps: the same, None where groups are split. owner, thread: as of the
    compute role.

    mPartial: (batch, kv_heads * parts, tiles, 16384) fp32, dV and dK of parts of groups, or None if they are whole.
    """

    plan: cutlass.Constexpr
    smem: SharedMemory
    owner: Int32
    thread: Int32
    mdK: cute.Tensor
    mdV: cute.Tensor
    softmax_scale: Float32
    maps: Any = None
    mPartial: Any = None


@dataclass(frozen=True)
class ComputeContext:
    """owner: the warpgroup, 0 or 1. thread: within it."""

    plan: cutlass.Constexpr
    channels: Channels
    smem: SharedMemory
    owner: Int32
    thread: Int32
    items: Items
    leaving: EpilogueContext
    scalars: LaunchScalars


@dataclass(frozen=True)
class Registers:
    """What a thread keeps from burst to burst. p, ds: operands of the dV and dK GEMMs; dv, dk: their sums."""

    p: cute.Tensor
    ds: cute.Tensor
    dv: cute.Tensor
    dk: cute.Tensor


@dataclass(frozen=True)
class Item:
    """A key/value tile that is worked on. start, last: its first and last trip.

    masked_end, masked_end_next: one past the last tile that takes the loop with masks, of its first and second query
    head. plain_first, plain_end: the tiles that need no mask.
    """

    work: Work
    start: Int32
    last: Int32
    number: Int32
    masked_end: Int32
    masked_end_next: Int32
    plain_first: Int32
    plain_end: Int32


@dataclass(frozen=True)
class ReduceContext:
    """mdQ_accumulator: (batch, heads, tiles, 8192) fp32. owner: whose share of dQ the warp adds.

    mTurns: (batch, heads, 2 tiles) i32, one counter per share, or None if the order of sums does not matter.
    """

    plan: cutlass.Constexpr
    smem: SharedMemory
    owner: Int32
    mdQ_accumulator: cute.Tensor
    mTurns: Any
    items: Items


@dataclass(frozen=True)
class ScheduleContext:
    """Numbers in, items out. mClaims: (1) i32, items claimed so far. mdK, mdV, mPartial: of the epilogue, for zeros."""

    plan: cutlass.Constexpr
    channels: Channels
    smem: SharedMemory
    scalars: LaunchScalars
    query_heads: Int32
    packings: Any
    mClaims: cute.Tensor
    mdK: cute.Tensor
    mdV: cute.Tensor
    mPartial: Any
