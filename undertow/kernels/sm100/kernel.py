"""The main kernel: one CTA per key/value tile and head of a batch, 16 warps in roles, a loop over query tiles.

This file maps tensors, sets the CTA up and sends each warp to its role; `plan.py` says what the roles do.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Int32
from cutlass.cute.nvgpu import cpasync

from undertow.kernels.sm100.arguments import (
    VECTOR_BYTES,
    counters_argument,
    dq_accumulator_argument,
    packing_argument,
    row_scalars_argument,
    rows_argument,
)
from undertow.kernels.sm100.bind import (
    SharedMemory,
    allocate_shared_memory,
    barrier,
    channels,
    initialise_barriers,
    is_role,
    rows_layout,
    set_registers,
)
from undertow.kernels.sm100.context import (
    ComputeContext,
    EpilogueContext,
    LoadContext,
    MmaContext,
    ReduceContext,
    TensorMaps,
)
from undertow.kernels.sm100.roles.compute import compute
from undertow.kernels.sm100.roles.epilogue import epilogue, write_zeros
from undertow.kernels.sm100.roles.load import load
from undertow.kernels.sm100.roles.mma import mma
from undertow.kernels.sm100.roles.reduce import reduce
from undertow.kernels.sm100.work import Packings, Scalars, any_scalars, cta_work, kv_tiles
from undertow.plan.grid import Grid
from undertow.plan.schema import WARP_THREADS, WARPGROUP_WARPS, Plan

TMEM_LANE = 1 << 16  # one lane in a TMEM address


@dataclass(frozen=True)
class Inputs:
    """mQ, mdO: (batch, seqlen_q, heads, 64). mK, mV: (batch, seqlen_k, kv_heads, 64); kv_heads divides heads."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mdO: cute.Tensor


@dataclass(frozen=True)
class Workspaces:
    """mLSE_log2, mD: (batch, heads, padded rows) fp32. mdQ_accumulator: (batch, heads, tiles, 8192) fp32.

    mTurns: (batch, heads, tiles) i32, in deterministic mode.
    """

    mLSE_log2: cute.Tensor
    mD: cute.Tensor
    mdQ_accumulator: cute.Tensor
    mTurns: Any = None


@dataclass(frozen=True)
class Outputs:
    """mdK, mdV: (batch, seqlen_k, kv_heads, 64)."""

    mdK: cute.Tensor
    mdV: cute.Tensor


def build(plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for `compile_kernel`."""
    set_name(plan)
    rows = [rows_argument(plan.dtype) for _ in range(6)]
    arguments = (
        Inputs(*rows[:4]),
        Workspaces(
            row_scalars_argument(padded=True),
            row_scalars_argument(padded=True),
            dq_accumulator_argument(),
            counters_argument() if plan.attention.deterministic else None,
        ),
        Outputs(*rows[4:]),
        any_scalars(),
        Packings(packing_argument(), packing_argument()) if plan.attention.packed else None,
    )
    return backward, (plan, *arguments)


def set_name(plan: Plan) -> None:
    """Name the entry of the kernel that is compiled next."""
    entry = f"undertow_backward_{plan.name}_{plan.attention.name}".replace("-", "_")
    backward_kernel.set_name_prefix(entry, remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def backward(
    plan: Constexpr,
    inputs: Inputs,
    work: Workspaces,
    outputs: Outputs,
    scalars: Scalars,
    packings: Packings | None,
):
    """Launch one CTA per key/value tile, key/value head and batch, on the default stream."""
    backward_on(plan, (inputs, work, outputs), scalars, packings, ())


def backward_on(plan: Plan, tensors: Any, scalars: Scalars, packings: Packings | None, stream: Any) -> None:
    """The same on a stream."""
    inputs, work, outputs = tensors
    maps = TensorMaps(
        tensor_map(plan, "sQ", inputs.mQ),
        tensor_map(plan, "sK", inputs.mK),
        tensor_map(plan, "sV", inputs.mV),
        tensor_map(plan, "sdO", inputs.mdO),
    )
    batch, seqlen_k, kv_heads, _ = inputs.mK.shape
    backward_kernel(plan, maps, work, outputs, scalars, packings).launch(
        grid=(Grid(kv_tiles(plan, seqlen_k, packings), kv_heads, batch).num_ctas, 1, 1),
        block=(plan.num_threads, 1, 1),
        smem=plan.smem_bytes,
        min_blocks_per_mp=1,
        stream=stream,
    )


def tensor_map(plan: Plan, region: str, tensor: cute.Tensor) -> cute.CopyAtom:
    """The TMA load of one tile of `region` from the (64, seqlen, heads, batch) view of a tensor."""
    view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [3, 1, 2, 0]))
    if plan.attention.packed:
        view = packed_view(tensor)
    smem = plan.smem_region(region)
    box = (smem.columns, smem.rows)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, rows_layout(plan, region), box).atom


def packed_view(tensor: cute.Tensor) -> cute.Tensor:
    """The rows of packed sequences as (64, total, total + 1, heads), for boxes that end where a sequence ends.

    Two dimensions step from row to row, and the view begins `total` rows before the tensor. Element (total - used + i,
    first + used) is then row first + i, and lies outside the first of them as soon as i reaches `used`: TMA fills in
    zeros there, whoever's rows follow. Nothing before the tensor is ever addressed, because the second coordinate
    makes up for the first; but no box may lie outside as a whole, which the tile loop's ranges see to.
    Measured on an H200 (driver 580.159, 7.7 GB before a tensor): right rows, zeros behind the end; a box wholly outside
    faulted. The same idea with 64-bit wrap-around is `ragged_tma` of Triton.
    """
    _, total, heads, columns = tensor.shape
    _, row, head, _ = tensor.stride
    start = (tensor.iterator - total * row).toint()
    pointer = cute.make_ptr(tensor.element_type, start, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
    return cute.make_tensor(pointer, cute.make_layout((columns, total, total + 1, heads), stride=(1, row, row, head)))


@cute.kernel
def backward_kernel(
    plan: Constexpr,
    maps: TensorMaps,
    buffers: Workspaces,
    outputs: Outputs,
    scalars: Scalars,
    packings: Packings | None,
):
    """Set up barriers and TMEM, run the roles, free TMEM."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = allocate_shared_memory(plan)
    tmem = set_up(smem, maps, warp)
    work = cta_work(plan, scalars, outputs.mdK, buffers.mD.shape[1], packings)

    row = warp % WARPGROUP_WARPS * WARP_THREADS + cute.arch.lane_idx()
    lanes = tmem + warp % WARPGROUP_WARPS * (WARP_THREADS * TMEM_LANE)
    if is_role(plan, "reduce", warp):
        set_registers(plan, "reduce")
        leads = warp == plan.role("reduce").warps.start
        into = (buffers.mdQ_accumulator, buffers.mTurns)
        reduce(ReduceContext(plan, channels(smem, "reduce"), smem, lanes, row, leads, *into, work))
        barrier(plan, "teardown")
    elif is_role(plan, "compute", warp):
        set_registers(plan, "compute")
        warpgroup = (warp - plan.role("compute").warps.start) // WARPGROUP_WARPS
        is_used = work.kv_tile * plan.tile_n + row < work.k.used
        pipelines = channels(smem, "compute")
        mdK, mdV = outputs.mdK, outputs.mdV
        leaving = EpilogueContext(plan, pipelines, lanes, warpgroup, row, work, mdK, mdV, scalars.softmax_scale)
        if work.trips > 0:
            compute(ComputeContext(plan, pipelines, smem, lanes, warpgroup, row, is_used, work, scalars))
            epilogue(leaving)
        else:
            write_zeros(leaving)
        barrier(plan, "teardown")
    else:  # one warpgroup, so one setmaxnreg for its three roles
        set_registers(plan, "mma")
        if is_role(plan, "mma", warp):
            mma(MmaContext(plan, channels(smem, "mma"), smem, tmem, work.trips))
            barrier(plan, "teardown")
            free_tmem(plan, tmem)
        elif is_role(plan, "load", warp):
            load(LoadContext(plan, channels(smem, "load"), smem, work, maps, buffers.mLSE_log2, buffers.mD))


@cute.jit
def set_up(smem: SharedMemory, maps: TensorMaps, warp: Int32) -> Int32:
    """Initialise the barriers, allocate TMEM, meet all warps; returns the TMEM address of the allocation."""
    if is_role(smem.plan, "load", warp):
        for tensor in (maps.q, maps.k, maps.v, maps.do):
            cpasync.prefetch_descriptor(tensor)
        initialise_barriers(smem)
        cute.arch.mbarrier_init_fence()
    elif is_role(smem.plan, "mma", warp):
        cute.arch.alloc_tmem(smem.plan.tmem_columns, smem.tmem_pointer())
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    return cute.make_tensor(smem.tmem_pointer(), cute.make_layout(1))[0]


def free_tmem(plan: Plan, tmem: Int32) -> None:
    """Hand the allocation back, by the warp that took it."""
    pointer = cute.make_ptr(Int32, tmem, cute.AddressSpace.tmem, assumed_align=16)
    cute.arch.dealloc_tmem(pointer, plan.tmem_columns)
