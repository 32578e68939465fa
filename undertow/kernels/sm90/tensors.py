"""The buffers between the SM90 kernels, and what of a call these kernels cannot take besides what no kernel can."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from undertow.kernels.sm90.plan import ROW_TERMS, TILE_M, WARPGROUPS
from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS
from undertow.kernels.sm100.tensors import BackwardTensors, LaunchInputError, kv_tiles, query_tiles
from undertow.plan.schema import DType

CLAIMS = 4  # 32-bit words that the workspace has for one: what follows begins at 16 bytes
ROW_TERMS_TILE = TILE_M * ROW_TERMS  # 16-bit elements
PARTIAL_TILE = 2 * DQ_ACCUMULATOR_TILE  # fp32: dV, then dK of a tile of keys, each in the order of the dQ accumulator
# In size: the kernels divide LSE by it. What is beyond 3.84e6 in f16, or 1e30 in bf16, is NaN then: see `preprocess`.
LEAST_SCALE = {DType.BF16: 1e-20, DType.F16: 4e-6}


@dataclass(frozen=True)
class Workspaces:
    """Buffers between the kernels, in whole tiles of query rows; preprocess fills every element of them.

    Packed sequences share a batch element; every sequence has tiles of its own (`kernels.sm100.sequences`).
    """

    terms: torch.Tensor  # (batch, heads, tiles, 2048) of the 16-bit type, as `plan.row_term_index` orders them
    dq_accumulator: torch.Tensor  # (batch, heads, tiles, 8192) fp32
    claims: torch.Tensor  # (1) int32
    lse: torch.Tensor | None = None  # (batch, heads, tiles, 128) fp32, -LSE * log2(e), under a softcap
    turns: torch.Tensor | None = None  # (batch, heads, 2 tiles) int32, in deterministic mode
    dsink_parts: torch.Tensor | None = None  # (batch, heads, 8 tiles) fp32, with a sink
    partial: torch.Tensor | None = None  # (batch, kv_heads * parts, tiles of keys, 16384) fp32, where groups are split


def allocate_workspaces(tensors: BackwardTensors, deterministic: bool = False, softcap: bool = False) -> Workspaces:
    """Allocate the buffers for a backward pass, on the device of q, but for those of split groups."""
    batch, _, heads, _ = tensors.batched.q.shape
    tiles = query_tiles(tensors)

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return tensors.q.new_empty((batch, heads, *shape), dtype=dtype)

    return Workspaces(
        buffer(tiles, ROW_TERMS_TILE, dtype=tensors.q.dtype),
        buffer(tiles, DQ_ACCUMULATOR_TILE),
        tensors.q.new_zeros(1, dtype=torch.int32),  # without a query row there is no preprocess to clear it
        buffer(tiles, TILE_M) if softcap else None,
        buffer(WARPGROUPS * tiles, dtype=torch.int32) if deterministic else None,
        buffer(tiles * (ROW_KERNEL_THREADS // 32)) if tensors.sink is not None else None,
    )


def allocate_partial(tensors: BackwardTensors, parts: int) -> torch.Tensor:
    """Allocate the buffer for dV and dK of `parts` of every group."""
    batch, _, kv_heads, _ = tensors.batched.k.shape
    shape = (batch, kv_heads * parts, kv_tiles(tensors), PARTIAL_TILE)
    return tensors.q.new_empty(shape, dtype=torch.float32)


def check_scale(settings: Settings, dtype: DType) -> None:
    """Refuse a scale whose quotients these kernels cannot hold; under a softcap nothing is divided by it.

    Raises: LaunchInputError.
    """
    scale, least = settings.scale, LEAST_SCALE[dtype]
    if settings.softcap is None and not abs(scale) >= least:
        raise LaunchInputError(f"softmax_scale={scale}: must be at least {least:g} in size for {dtype.label} on sm_90a")
