"""Host side of the backward pass: compile the three kernels, refuse tensors they cannot take, describe the launches.

The description is data (`undertow.plan.description`), so what is proved on an emulator is what a GPU is later handed.
Layouts: rows are (batch, seqlen, heads, 64) with any strides, LSE is (batch, heads, seqlen_q) fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from undertow.kernels.compile import CompiledKernel, compile_kernel
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS, num_tiles, padded_rows
from undertow.kernels.sm100.plan import HEAD_DIM
from undertow.plan.description import Launch, Tensor, TensorMap
from undertow.plan.labels import PlanLabels
from undertow.plan.schema import DType, Plan, SmemRegion

LOG2_E = math.log2(math.e)
ALIGNMENT = 16  # bytes; of every base address and stride, for 16-byte accesses and for TMA
MAX_GRID_YZ = 65535  # CUDA programming guide: blocks in the y and z dimension of a grid
MAX_SEQLEN = 2**31 - 256  # row indices are i32, and tiles round the last one up
TORCH_TYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}


class LaunchInputError(ValueError):
    """A tensor or scalar that the kernels cannot take; the message names it, its value and what is allowed."""


@dataclass(frozen=True)
class CompiledBackward:
    """The three kernels of one plan, in launch order."""

    plan: Plan
    preprocess: CompiledKernel
    main: CompiledKernel
    postprocess: CompiledKernel


@dataclass(frozen=True)
class BackwardTensors:
    """What a backward pass reads and, in dq, dk, dv, writes. Nothing is copied.

    q, out, dout, dq: (batch, seqlen_q, heads, 64); k, v, dk, dv: (batch, seqlen_k, heads, 64), all of the plan's type;
    lse: (batch, heads, seqlen_q) fp32, natural logarithm, -inf where a row attended nothing.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@dataclass(frozen=True)
class Workspaces:
    """fp32 buffers between the kernels, in whole tiles of query rows; preprocess fills every element of them."""

    lse_log2: torch.Tensor  # (batch, heads, padded seqlen_q)
    d: torch.Tensor  # (batch, heads, padded seqlen_q)
    dq_accumulator: torch.Tensor  # (batch, heads, tiles, 8192)


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


def allocate_workspaces(q: torch.Tensor) -> Workspaces:
    """Allocate the buffers for query rows shaped like `q`, on its device."""
    batch, seqlen, heads, _ = q.shape
    rows = (batch, heads, padded_rows(seqlen))
    tiles = (batch, heads, padded_rows(seqlen) * HEAD_DIM // DQ_ACCUMULATOR_TILE, DQ_ACCUMULATOR_TILE)
    return Workspaces(*(q.new_empty(shape, dtype=torch.float32) for shape in (rows, rows, tiles)))


def launches(
    compiled: CompiledBackward,
    tensors: BackwardTensors,
    softmax_scale: float | None = None,
    workspaces: Workspaces | None = None,
) -> list[tuple[CompiledKernel, Launch]]:
    """Describe the launches that turn `tensors` into dq, dk and dv, in order.

    Args:
        softmax_scale: factor on the scores, 1/sqrt(64) if None.
        workspaces: buffers to use (`allocate_workspaces`); made here if None. The descriptions keep them alive.
    Raises:
        LaunchInputError: before anything is launched, when a kernel could not take a tensor as it is.
    """
    check_tensors(compiled.plan, tensors)
    scale = HEAD_DIM**-0.5 if softmax_scale is None else float(softmax_scale)
    if not math.isfinite(scale):
        raise LaunchInputError(f"softmax_scale={scale}: must be finite")
    work = allocate_workspaces(tensors.q) if workspaces is None else workspaces
    return [
        (compiled.preprocess, preprocess_launch(compiled.preprocess, tensors, work)),
        (compiled.main, main_launch(compiled, tensors, work, scale)),
        (compiled.postprocess, postprocess_launch(compiled.postprocess, tensors, work, scale)),
    ]


def check_tensors(plan: Plan, tensors: BackwardTensors) -> None:
    """Refuse what the kernels cannot take.

    Raises: LaunchInputError for a wrong rank, shape, type, device, stride or alignment, naming the tensor.
    """
    if tensors.q.ndim != 4 or tensors.k.ndim != 4:
        raise LaunchInputError(
            f"q has shape {tuple(tensors.q.shape)}, k has shape {tuple(tensors.k.shape)}: "
            f"must be (batch, seqlen, heads, {HEAD_DIM})"
        )
    batch, seqlen_q, heads, _ = tensors.q.shape
    query, key = (batch, seqlen_q, heads, HEAD_DIM), (batch, tensors.k.shape[1], heads, HEAD_DIM)
    for extent, name, highest in (
        (batch, "batch", MAX_GRID_YZ),
        (heads, "heads", MAX_GRID_YZ),
        (seqlen_q, "seqlen_q", MAX_SEQLEN),
        (key[1], "seqlen_k", MAX_SEQLEN),
    ):
        if not 1 <= extent <= highest:
            raise LaunchInputError(f"{name}={extent}: must be in [1, {highest}]")
    for field in fields(tensors):
        tensor = getattr(tensors, field.name)
        if field.name == "lse":
            _check_one("lse", tensor, (batch, heads, seqlen_q), torch.float32, tensors.q.device)
        else:
            shape = key if field.name in ("k", "v", "dk", "dv") else query
            _check_one(field.name, tensor, shape, TORCH_TYPES[plan.dtype], tensors.q.device)
            _check_vectors(field.name, tensor, written=field.name in ("dq", "dk", "dv"))


def _check_one(name: str, tensor: torch.Tensor, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    if tuple(tensor.shape) != shape:
        raise LaunchInputError(f"{name} has shape {tuple(tensor.shape)}: must be {shape}")
    if tensor.dtype != dtype:
        raise LaunchInputError(f"{name} has dtype {tensor.dtype}: must be {dtype}")
    if tensor.device != device:
        raise LaunchInputError(f"{name} is on {tensor.device}: must be on {device}, where q is")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise LaunchInputError(f"{name} has stride {tensor.stride(-1)} in its last dimension: must be contiguous there")


def _check_vectors(name: str, tensor: torch.Tensor, written: bool) -> None:
    """Rows are accessed in 16-byte vectors and by TMA."""
    if tensor.data_ptr() % ALIGNMENT:
        raise LaunchInputError(
            f"{name} begins at an address that is {tensor.data_ptr() % ALIGNMENT} mod {ALIGNMENT}: must be 0"
        )
    for dim, extent in enumerate(tensor.shape[:-1]):
        step = tensor.stride(dim) * tensor.element_size()
        if extent > 1 and step % ALIGNMENT:
            raise LaunchInputError(
                f"{name} has a stride of {step} bytes in dimension {dim}: must be a multiple of {ALIGNMENT}"
            )
        if extent > 1 and step == 0 and written:
            raise LaunchInputError(f"{name} has stride 0 in dimension {dim}: a result must own its memory")


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


def main_launch(compiled: CompiledBackward, tensors: BackwardTensors, work: Workspaces, scale: float) -> Launch:
    """Describe the launch that writes dk and dv and adds up the dQ accumulator."""
    plan = compiled.plan
    batch, seqlen_k, heads, _ = tensors.k.shape
    loads = {"sQ": "q", "sK": "k", "sV": "v", "sdO": "dout"}
    return Launch(
        kernel=compiled.main.entry,
        grid=(num_tiles(seqlen_k, plan.tile_n), heads, batch),
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
            scale * LOG2_E,
            scale,
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
