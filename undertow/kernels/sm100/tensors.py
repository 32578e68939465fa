"""What a backward pass reads and writes, and what the kernels cannot take, said by name before anything is launched.

Layouts: rows are (batch, seqlen, heads, 64) with any strides, LSE is (batch, heads, seqlen_q) fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, padded_rows
from undertow.kernels.sm100.plan import HEAD_DIM
from undertow.plan.schema import DType, Plan
from undertow.plan.tiles import MAX_SEQLEN

ALIGNMENT = 16  # bytes; of every base address and stride, for 16-byte accesses and for TMA
MAX_GRID_YZ = 65535  # CUDA programming guide: blocks in the y and z dimension of a grid
TORCH_TYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}


class LaunchInputError(ValueError):
    """A tensor or scalar that the kernels cannot take; the message names it, its value and what is allowed."""


@dataclass(frozen=True)
class BackwardTensors:
    """What a backward pass reads and, in dq, dk, dv, writes. Nothing is copied.

    q, out, dout, dq: (batch, seqlen_q, heads, 64); k, v, dk, dv: (batch, seqlen_k, kv_heads, 64), all of the plan's
    type; kv_heads divides heads, and query head h reads key/value head h // (heads / kv_heads).
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


def allocate_workspaces(q: torch.Tensor) -> Workspaces:
    """Allocate the buffers for query rows shaped like `q`, on its device."""
    batch, seqlen, heads, _ = q.shape
    rows = (batch, heads, padded_rows(seqlen))
    tiles = (batch, heads, padded_rows(seqlen) * HEAD_DIM // DQ_ACCUMULATOR_TILE, DQ_ACCUMULATOR_TILE)
    return Workspaces(*(q.new_empty(shape, dtype=torch.float32) for shape in (rows, rows, tiles)))


def check_tensors(plan: Plan, tensors: BackwardTensors) -> None:
    """Refuse what the kernels cannot take.

    Raises: LaunchInputError for a wrong rank, shape, type, device, stride or alignment, naming the tensor.
    """
    if tensors.q.ndim != 4 or tensors.k.ndim != 4:
        raise LaunchInputError(
            f"q has shape {tuple(tensors.q.shape)}, k has shape {tuple(tensors.k.shape)}: "
            f"must be (batch, seqlen, heads, {HEAD_DIM})"
        )
    (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = tensors.q.shape, tensors.k.shape
    query, key = (batch, seqlen_q, heads, HEAD_DIM), (batch, seqlen_k, kv_heads, HEAD_DIM)
    for extent, name, highest in (
        (batch, "batch", MAX_GRID_YZ),
        (heads, "heads", MAX_GRID_YZ),
        (kv_heads, "kv_heads", MAX_GRID_YZ),
        (seqlen_q, "seqlen_q", MAX_SEQLEN),
        (seqlen_k, "seqlen_k", MAX_SEQLEN),
    ):
        if not 1 <= extent <= highest:
            raise LaunchInputError(f"{name}={extent}: must be in [1, {highest}]")
    if heads % kv_heads:
        raise LaunchInputError(f"k has {kv_heads} heads, q has {heads}: heads of k must divide those of q")
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
