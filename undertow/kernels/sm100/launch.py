"""Host side of the backward pass: compile the three kernels, describe their launches on given tensors.

The description is data (`undertow.plan.description`), so what is proved on an emulator is what a GPU is later handed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from undertow.kernels.compile import CompiledKernel, compile_kernel
from undertow.kernels.sm100.layouts import ROW_KERNEL_THREADS, num_tiles
from undertow.kernels.sm100.plan import HEAD_DIM
from undertow.kernels.sm100.tensors import (
    BackwardTensors,
    LaunchInputError,
    Workspaces,
    allocate_workspaces,
    check_tensors,
)
from undertow.plan.attention import Attention
from undertow.plan.description import Launch, Tensor, TensorMap
from undertow.plan.grid import Grid, heads_per_bundle
from undertow.plan.labels import PlanLabels
from undertow.plan.schema import DType, Plan, SmemRegion
from undertow.plan.tiles import Band, band

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Settings:
    """The numbers of one call.

    softmax_scale: factor on the scores, any finite number; None is 1/sqrt(64).
    causal, window: which keys a row sees, as `plan.tiles.band` says; None is no bound.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)

    @property
    def scale(self) -> float:
        if self.softmax_scale is None:
            return HEAD_DIM**-0.5
        if not math.isfinite(self.softmax_scale):
            raise LaunchInputError(f"softmax_scale={self.softmax_scale}: must be finite")
        return float(self.softmax_scale)

    @property
    def band(self) -> Band:
        """The bounds that hold, within 32 bits."""
        for side, bound in zip(("left", "right"), self.window):
            if bound is not None and not isinstance(bound, int):
                raise LaunchInputError(f"window: {side}={bound!r}: must be an integer or None")
        return band(self.causal, self.window)

    @property
    def attention(self) -> Attention:
        """The variant that these numbers ask for."""
        left, right = self.band
        return Attention(left=left is not None, right=right is not None)


DEFAULT = Settings()


@dataclass(frozen=True)
class CompiledBackward:
    """The three kernels of one plan, in launch order."""

    plan: Plan
    preprocess: CompiledKernel
    main: CompiledKernel
    postprocess: CompiledKernel


def compile_backward(plan: Plan) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels of `plan`.

    Raises: CompileError from `compile_kernel`.
    """

    def build() -> Any:
        from undertow.kernels.sm100 import kernel

        return kernel.build(plan)

    main = compile_kernel(f"backward-{plan.name}", plan, build)
    return CompiledBackward(plan, compile_preprocess(plan.dtype), main, compile_postprocess(plan.dtype))


def compile_preprocess(dtype: DType) -> CompiledKernel:
    """Compile the preprocess kernel for O and dO of `dtype`."""

    def build() -> Any:
        from undertow.kernels.sm100 import preprocess

        return preprocess.build(dtype)

    return compile_kernel("preprocess", dtype, build)


def compile_postprocess(dtype: DType) -> CompiledKernel:
    """Compile the postprocess kernel for dQ of `dtype`."""

    def build() -> Any:
        from undertow.kernels.sm100 import postprocess

        return postprocess.build(dtype)

    return compile_kernel("postprocess", dtype, build)


def launches(
    compiled: CompiledBackward,
    tensors: BackwardTensors,
    settings: Settings = DEFAULT,
    workspaces: Workspaces | None = None,
) -> list[tuple[CompiledKernel, Launch]]:
    """Describe the launches that turn `tensors` into dq, dk and dv, in order.

    Args:
        settings: scale and mask; the plan that was compiled must be for their variant (`Settings.attention`).
        workspaces: buffers to use (`allocate_workspaces`); made here if None. The descriptions keep them alive.
    Raises:
        LaunchInputError: before anything is launched, when a kernel could not take a tensor or a number as it is.
    """
    if compiled.plan.attention != settings.attention:
        raise LaunchInputError(
            f"settings ask for {settings.attention}: the kernels are compiled for {compiled.plan.attention}"
        )
    check_tensors(compiled.plan, tensors)
    work = allocate_workspaces(tensors.q) if workspaces is None else workspaces
    return [
        (compiled.preprocess, preprocess_launch(compiled.preprocess, tensors, work)),
        (compiled.main, main_launch(compiled, tensors, work, settings)),
        (compiled.postprocess, postprocess_launch(compiled.postprocess, tensors, work, settings.scale)),
    ]


def preprocess_launch(kernel: CompiledKernel, tensors: BackwardTensors, work: Workspaces) -> Launch:
    """Describe the launch that fills `work` from out, dout and lse."""
    return Launch(
        kernel=kernel.entry,
        grid=_query_grid(work),
        block=(ROW_KERNEL_THREADS, 1, 1),
        params=(
            _rows(tensors.out, "out"),
            _rows(tensors.dout, "dout"),
            _row_scalars(tensors.lse, "lse"),
            _row_scalars(work.lse_log2, "LSE_log2"),
            _row_scalars(work.d, "D"),
            _accumulator(work.dq_accumulator),
        ),
    )


def main_launch(compiled: CompiledBackward, tensors: BackwardTensors, work: Workspaces, settings: Settings) -> Launch:
    """Describe the launch that writes dk and dv and adds up the dQ accumulator."""
    plan = compiled.plan
    (_, seqlen_q, heads, _), (batch, seqlen_k, kv_heads, _) = tensors.q.shape, tensors.k.shape
    loads = {"sQ": "q", "sK": "k", "sV": "v", "sdO": "dout"}
    return Launch(
        kernel=compiled.main.entry,
        grid=(Grid(num_tiles(seqlen_k, plan.tile_n), kv_heads, batch).num_ctas,),
        block=(plan.num_threads, 1, 1),
        dynamic_smem=plan.smem_bytes,
        labels=PlanLabels(plan),
        params=(
            *(_tensor_map(plan.smem_region(region), getattr(tensors, name), name) for region, name in loads.items()),
            _row_scalars(work.lse_log2, "LSE_log2"),
            _row_scalars(work.d, "D"),
            _accumulator(work.dq_accumulator),
            _rows(tensors.dk, "dk"),
            _rows(tensors.dv, "dv"),
            seqlen_q,
            *(0 if bound is None else bound for bound in settings.band),
            heads_per_bundle(seqlen_q, heads // kv_heads, kv_heads) if plan.attention.masked else 1,
            settings.scale * LOG2_E,
            settings.scale,
        ),
    )


def postprocess_launch(kernel: CompiledKernel, tensors: BackwardTensors, work: Workspaces, scale: float) -> Launch:
    """Describe the launch that writes dq from the accumulator."""
    return Launch(
        kernel=kernel.entry,
        grid=_query_grid(work),
        block=(ROW_KERNEL_THREADS, 1, 1),
        params=(_accumulator(work.dq_accumulator), _rows(tensors.dq, "dq"), scale),
    )


def _query_grid(work: Workspaces) -> tuple[int, int, int]:
    batch, heads, tiles, _ = work.dq_accumulator.shape
    return (tiles, heads, batch)


def _rows(tensor: torch.Tensor, name: str) -> Tensor:
    batch, seqlen, heads, _ = tensor.shape
    return Tensor(tensor, dims=(batch, seqlen, heads), strides=legal_strides(tensor)[:-1], name=name)


def _tensor_map(region: SmemRegion, tensor: torch.Tensor, name: str) -> TensorMap:
    """Describe the TMA load of one stage of `region`: whole rows, swizzled; rows past the end are zeros."""
    batch, seqlen, heads, columns = tensor.shape
    strides = legal_strides(tensor)
    return TensorMap(
        tensor,
        dtype=region.dtype.label,
        dims=(columns, seqlen, heads, batch),
        strides=tuple(strides[dim] * region.dtype.bytes for dim in (1, 2, 0)),
        box=(region.columns, region.rows, 1, 1),
        swizzle=region.columns * region.dtype.bytes,
        name=name,
    )


def _row_scalars(tensor: torch.Tensor, name: str) -> Tensor:
    return Tensor(tensor, dims=tuple(tensor.shape), strides=legal_strides(tensor)[:-1], name=name)


def _accumulator(tensor: torch.Tensor) -> Tensor:
    batch, heads, tiles, _ = tensor.shape
    return Tensor(tensor, dims=(batch, heads, tiles), strides=legal_strides(tensor)[:-2], name="dQ accumulator")


def legal_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in elements, with those of extents of 1 replaced: they move nothing, but must be aligned."""
    strides = list(tensor.stride())
    for dim in reversed(range(tensor.ndim)):
        if tensor.shape[dim] == 1:
            strides[dim] = 1 if dim == tensor.ndim - 1 else strides[dim + 1] * tensor.shape[dim + 1]
    return tuple(strides)
