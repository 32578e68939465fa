"""Host side of the SM90 backward pass as data: compile the three kernels, describe their launches on given tensors.

As `sm100.launch`, whose descriptions of single tensors these are; the GPU is handed `entry.py` instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from undertow.kernels.compile import CompiledKernel, compile_kernel
from undertow.kernels.sm90 import call
from undertow.kernels.sm90.plan import ROW_TERMS, TILE_M, WARPGROUPS
from undertow.kernels.sm100.launch import (
    DEFAULT,
    LOG2_E,
    Settings,
    _accumulator,
    _packing,
    _query_grid,
    _rows,
    _scalars,
    _tensor_map,
    _vector,
)
from undertow.kernels.sm100.launch import postprocess_launch as postprocess_of
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS
from undertow.kernels.sm100.tensors import BackwardTensors, kv_tiles, query_tiles
from undertow.plan.description import Launch, Tensor
from undertow.plan.grid import Grid
from undertow.plan.labels import PlanLabels

TARGET = "sm_90a"


@dataclass(frozen=True)
class CompiledBackward:
    """The three kernels of one variant, in launch order."""

    variant: call.Variant
    preprocess: CompiledKernel
    main: CompiledKernel
    postprocess: CompiledKernel


@dataclass(frozen=True)
class Workspaces:
    """Buffers between the kernels, in whole tiles of query rows; preprocess fills every element of them."""

    terms: torch.Tensor  # (batch, heads, tiles, 2048) of the 16-bit type
    dq_accumulator: torch.Tensor  # (batch, heads, tiles, 8192) fp32
    turns: torch.Tensor | None  # (batch, heads, 2 tiles) int32, in deterministic mode
    dsink_parts: torch.Tensor | None  # (batch, heads, 8 tiles) fp32, with a sink


def compile_for(tensors: BackwardTensors, settings: Settings = DEFAULT) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels for what a call asks.

    Raises: LaunchInputError for what there are no kernels for; CompileError.
    """
    variant = call.variant_of("split", tensors, settings)

    def build_preprocess() -> Any:
        from undertow.kernels.sm90 import preprocess

        return preprocess.build(variant.dtype, variant.rows)

    def build_main() -> Any:
        from undertow.kernels.sm90 import kernel

        return kernel.build(variant.plan)

    def build_postprocess() -> Any:
        from undertow.kernels.sm90 import postprocess

        return postprocess.build(variant.dtype, variant.rows)

    return CompiledBackward(
        variant,
        compile_kernel("preprocess-sm90", (variant.dtype, variant.rows), build_preprocess, TARGET),
        compile_kernel("backward-sm90", variant.plan, build_main, TARGET),
        compile_kernel("postprocess-sm90", (variant.dtype, variant.rows), build_postprocess, TARGET),
    )


def allocate_workspaces(variant: call.Variant, tensors: BackwardTensors) -> Workspaces:
    """Allocate the buffers for a backward pass, on the device of q."""
    batch, _, heads, _ = tensors.batched.q.shape
    tiles = query_tiles(tensors)

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return tensors.q.new_empty((batch, heads, *shape), dtype=dtype)

    return Workspaces(
        buffer(tiles, TILE_M * ROW_TERMS, dtype=tensors.q.dtype),
        buffer(tiles, DQ_ACCUMULATOR_TILE),
        buffer(tiles * WARPGROUPS, dtype=torch.int32) if variant.rows.deterministic else None,
        buffer(tiles * (ROW_KERNEL_THREADS // 32)) if variant.rows.sink else None,
    )


def launches(
    compiled: CompiledBackward, tensors: BackwardTensors, settings: Settings = DEFAULT
) -> list[tuple[CompiledKernel, Launch]]:
    """Describe the launches that turn `tensors` into dq, dk, dv and dsink, in order.

    Raises: LaunchInputError before anything is launched, when a kernel could not take a tensor or a number as it is.
    """
    variant = compiled.variant
    call.check_call(variant, tensors)
    numbers = call.numbers_of(variant, tensors, settings, 0)
    work = allocate_workspaces(variant, tensors)
    return [
        (compiled.preprocess, preprocess_launch(compiled.preprocess, tensors, work, settings.scale)),
        (compiled.main, main_launch(compiled, tensors, work, numbers)),
        # of the buffers it looks at the accumulator and the parts of dsink, which both kernels have
        (compiled.postprocess, postprocess_of(compiled.postprocess, tensors, work, settings.scale)),  # type: ignore[arg-type]
    ]


def preprocess_launch(kernel: CompiledKernel, tensors: BackwardTensors, work: Workspaces, scale: float) -> Launch:
    """Describe the launch that fills `work` from out, dout and lse."""
    given = tensors.batched
    inputs: list[Any] = [_rows(given.out, "out"), _rows(given.dout, "dout"), _scalars(given.lse, "lse")]
    outputs: list[Any] = [_terms(work.terms), _accumulator(work.dq_accumulator)]
    if given.dlse is not None:
        inputs.append(_scalars(given.dlse, "dlse"))
    if given.sink is not None:
        inputs.append(_vector(given.sink, "sink"))
    if work.turns is not None:
        outputs.append(_scalars(work.turns, "turns"))
    if work.dsink_parts is not None:
        outputs.append(_scalars(work.dsink_parts, "dsink parts"))
    return Launch(
        kernel=kernel.entry,
        grid=_query_grid(work),  # type: ignore[arg-type]  # it looks at the accumulator alone
        block=(ROW_KERNEL_THREADS, 1, 1),
        params=(*inputs, *outputs, *_packing(given, "q"), -1 / (scale * LOG2_E)),
    )


def main_launch(compiled: CompiledBackward, tensors: BackwardTensors, work: Workspaces, numbers: tuple) -> Launch:
    """Describe the launch that writes dk and dv and adds up the dQ accumulator."""
    plan, given = compiled.variant.plan, tensors.batched
    batch, _, kv_heads, _ = given.k.shape
    loads = {"sQ": "q", "sK": "k", "sV": "v", "sdO": "dout"}
    return Launch(
        kernel=compiled.main.entry,
        grid=(Grid(kv_tiles(tensors), kv_heads, batch).num_ctas, 1, 1),
        block=(plan.num_threads, 1, 1),
        dynamic_smem=plan.smem_bytes,
        labels=PlanLabels(plan),
        params=(
            *(_tensor_map(plan, region, given, name) for region, name in loads.items()),
            _terms(work.terms),
            _accumulator(work.dq_accumulator),
            *([] if work.turns is None else [_scalars(work.turns, "turns")]),
            _rows(given.dk, "dk"),
            _rows(given.dv, "dv"),
            *numbers,
            *_packing(given, "q"),
            *_packing(given, "k"),
        ),
    )


def _terms(tensor: torch.Tensor) -> Tensor:
    batch, heads, tiles, _ = tensor.shape
    return Tensor(tensor, dims=(batch, heads, tiles), strides=tuple(tensor.stride())[:-2], name="row terms")
