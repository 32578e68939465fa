"""The main kernel: one CTA for each multiprocessor, 12 warps in roles, a loop over query tiles of key/value tiles.

This file maps tensors, sets the CTA up and sends each warp to its role; `plan.py` says what the roles do.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Int32
from cutlass.cute.nvgpu import cpasync

from undertow.kernels.sm90.arguments import claims_argument, lse_argument, partial_argument, row_terms_argument
from undertow.kernels.sm90.context import (
    AllMaps,
    ComputeContext,
    EpilogueContext,
    LoadContext,
    ReduceContext,
    ScheduleContext,
    StoreMaps,
)
from undertow.kernels.sm90.plan import HEAD_DIM, WARP_ROWS
from undertow.kernels.sm90.roles.compute import compute
from undertow.kernels.sm90.roles.epilogue import staged_layout
from undertow.kernels.sm90.roles.load import load
from undertow.kernels.sm90.roles.reduce import reduce
from undertow.kernels.sm90.roles.schedule import schedule
from undertow.kernels.sm90.work import LaunchScalars, any_scalars, items_of
from undertow.kernels.sm100.arguments import (
    counters_argument,
    dq_accumulator_argument,
    packing_argument,
    rows_argument,
)
from undertow.kernels.sm100.bind import (
    SharedMemory,
    allocate_shared_memory,
    channels,
    initialise_barriers,
    is_role,
    set_registers,
)
from undertow.kernels.sm100.context import TensorMaps
from undertow.kernels.sm100.kernel import Inputs, Outputs, tensor_map
from undertow.kernels.sm100.work import Packings
from undertow.plan.schema import Plan


@dataclass(frozen=True)
class Workspaces:
    """mTerms: (batch, heads, tiles, 2048) of the 16-bit type. mdQ_accumulator: (batch, heads, tiles, 8192) fp32.

    mClaims: (1) i32, key/value tiles claimed so far. mLSE: (batch, heads, tiles, 128) fp32, -LSE * log2(e), under a
    softcap. mTurns: (batch, heads, 2 tiles) i32, in deterministic mode.
    mPartial: (batch, kv_heads * parts, tiles of keys, 16384) fp32, dV and dK of parts of groups, where they are split.
    """

    mTerms: cute.Tensor
    mdQ_accumulator: cute.Tensor
    mClaims: cute.Tensor
    mLSE: Any = None
    mTurns: Any = None
    mPartial: Any = None


def build(plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and its arguments, for `compile_kernel`."""
    set_name(plan)
    rows = [rows_argument(plan.dtype) for _ in range(6)]
    arguments = (
        Inputs(*rows[:4]),
        Workspaces(
            row_terms_argument(plan.dtype),
            dq_accumulator_argument(),
            claims_argument(),
            lse_argument() if plan.attention.softcap else None,
            counters_argument() if plan.attention.deterministic else None,
            partial_argument() if plan.attention.split else None,
        ),
        Outputs(*rows[4:]),
        any_scalars(plan.attention.split),
        Packings(packing_argument(), packing_argument()) if plan.attention.packed else None,
    )
    return backward, (plan, *arguments)


def set_name(plan: Plan) -> None:
    """Name the entry of the kernel that is compiled next."""
    entry = f"undertow_backward_sm90_{plan.attention.name}".replace("-", "_")
    backward_kernel.set_name_prefix(entry, remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def backward(
    plan: Constexpr,
    inputs: Inputs,
    work: Workspaces,
    outputs: Outputs,
    scalars: LaunchScalars,
    packings: Packings | None,
):
    """Launch as many CTAs as the numbers say, on the default stream."""
    backward_on(plan, (inputs, work, outputs), scalars, packings, ())


def backward_on(plan: Plan, tensors: Any, scalars: LaunchScalars, packings: Packings | None, stream: Any) -> None:
    """The same on a stream."""
    inputs, work, outputs = tensors
    maps = TensorMaps(
        tensor_map(plan, "sQ", inputs.mQ),
        tensor_map(plan, "sK", inputs.mK),
        tensor_map(plan, "sV", inputs.mV),
        tensor_map(plan, "sdO", inputs.mdO),
    )
    stores = None if plan.attention.split else StoreMaps(store_map(plan, outputs.mdV), store_map(plan, outputs.mdK))
    backward_kernel(plan, AllMaps(maps, stores), work, outputs, scalars, packings).launch(
        grid=(scalars.ctas, 1, 1),
        block=(plan.num_threads, 1, 1),
        smem=plan.smem_bytes,
        min_blocks_per_mp=1,
        stream=stream,
    )


def store_map(plan: Plan, tensor: cute.Tensor) -> cute.CopyAtom:
    """The TMA store of a warp's rows of dV or dK to the (64, seqlen, heads, batch) view of a tensor."""
    view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [3, 1, 2, 0]))
    layout, box = staged_layout(plan), (HEAD_DIM, WARP_ROWS)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, layout, box).atom


@cute.kernel
def backward_kernel(
    plan: Constexpr,
    maps: AllMaps,
    buffers: Workspaces,
    outputs: Outputs,
    scalars: LaunchScalars,
    packings: Packings | None,
):
    """Set up barriers, run the roles."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = allocate_shared_memory(plan)
    set_up(smem, maps.loads, warp)
    numbers = (scalars, (scalars.seqlen_q, outputs.mdK.shape[1]))
    if is_role(plan, "compute", warp):
        set_registers(plan, "compute")
        owner, thread = warp // 4, warp % 4 * 32 + cute.arch.lane_idx()
        targets = (outputs.mdK, outputs.mdV, scalars.softmax_scale, maps.stores, buffers.mPartial)
        leaving = EpilogueContext(plan, smem, owner, thread, *targets)
        pipelines, items = channels(smem, "compute"), items_of(smem, "compute", *numbers)
        compute(ComputeContext(plan, pipelines, smem, owner, thread, items, leaving, scalars))
    else:  # one warpgroup, so one setmaxnreg for its roles
        set_registers(plan, "load")
        if is_role(plan, "load", warp):
            pipelines, items = channels(smem, "load"), items_of(smem, "load", *numbers)
            load(LoadContext(plan, pipelines, smem, items, maps.loads, buffers.mTerms, buffers.mLSE))
        elif is_role(plan, "reduce", warp):
            owner = warp - plan.role("reduce").warps.start
            reduce(
                ReduceContext(
                    plan, smem, owner, buffers.mdQ_accumulator, buffers.mTurns, items_of(smem, "reduce", *numbers)
                )
            )
        elif is_role(plan, "schedule", warp):
            heads, pipelines = buffers.mTerms.shape[1], channels(smem, "schedule")
            of = (scalars, heads, packings, buffers.mClaims, outputs.mdK, outputs.mdV, buffers.mPartial)
            schedule(ScheduleContext(plan, pipelines, smem, *of))


@cute.jit
def set_up(smem: SharedMemory, maps: TensorMaps, warp: Int32):
    """Initialise the barriers and meet all warps."""
    if is_role(smem.plan, "load", warp):
        for tensor in (maps.q, maps.k, maps.v, maps.do):
            cpasync.prefetch_descriptor(tensor)
        initialise_barriers(smem)
        cute.arch.mbarrier_init_fence()
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
