"""How flash-attn-4 4.0.0b36 launches its SM100 backward at head dim 64, dense, bf16: three launch descriptions.

Grids, blocks, shared memory and parameters are what its own host code asks for. Its kernels want the sequence first:
shapes are (seqlen, 64, heads, batch), strides in elements. Each launch ends with what its tile scheduler takes: the
three extents of the grid and values that depend on no shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.plan import description as launch

TILE = 128
HEAD_DIM = 64
MAIN_DYNAMIC_SMEM = 150528
POSTPROCESS_DYNAMIC_SMEM = 16384
LOG2_E = math.log2(math.e)
SOFTMAX_SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Problem:
    """Operands (batch, seqlen, heads, 64) bf16, LSE (batch, heads, seqlen_q) fp32, and zero-filled results."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """batch, seqlen_q, seqlen_k, heads"""
        batch, seqlen_q, heads, _ = self.q.shape
        return batch, seqlen_q, self.k.shape[1], heads


@dataclass(frozen=True)
class Buffers:
    """fp32 buffers between the launches, whole tiles of query rows: all NaN until the kernels fill them."""

    d: Tensor  # (batch, heads, padded)
    lse_log2: Tensor  # (batch, heads, padded)
    dq_accumulator: Tensor  # (batch, heads, padded * 64)

    @classmethod
    def for_problem(cls, problem: Problem) -> Buffers:
        batch, seqlen_q, _, heads = problem.sizes
        padded = tiles(seqlen_q) * TILE
        shapes = ((batch, heads, padded), (batch, heads, padded), (batch, heads, padded * HEAD_DIM))
        return cls(*(torch.full(shape, math.nan) for shape in shapes))


def tiles(seqlen: int) -> int:
    return -(-seqlen // TILE)


def preprocess(problem: Problem, buffers: Buffers) -> launch.Launch:
    batch, seqlen_q, _, heads = problem.sizes
    grid = (tiles(seqlen_q), heads, batch)
    return launch.Launch(
        grid=grid,
        block=(256, 1, 1),
        params=(
            rows(problem.out),
            rows(problem.dout),
            row_scalars(buffers.d),
            row_scalars(problem.lse),
            row_scalars(buffers.lse_log2),
            row_scalars(buffers.dq_accumulator),
            LOG2_E,
            *grid,
            launch.Ints(1, 1, 0),
            1,
        ),
    )


def main(problem: Problem, buffers: Buffers) -> launch.Launch:
    batch, seqlen_q, seqlen_k, heads = problem.sizes
    grid = (tiles(seqlen_k), heads, batch)
    query = launch.Ints(seqlen_q, HEAD_DIM, heads, batch)
    key = launch.Ints(seqlen_k, HEAD_DIM, heads, batch)
    return launch.Launch(
        grid=grid,
        block=(512, 1, 1),
        dynamic_smem=MAIN_DYNAMIC_SMEM,
        params=(
            query,
            key,
            key,
            row_scalars(buffers.lse_log2),
            row_scalars(buffers.d),
            launch.Ints(HEAD_DIM, seqlen_q, heads, batch),  # dO, transposed
            rows(problem.dv),
            rows(problem.dk),
            row_scalars(buffers.dq_accumulator),
            key,
            key,
            *(tensor_map(x, box=(64, 128), swizzle=128) for x in (problem.q, problem.k, problem.v, problem.dout)),
            *(tensor_map(x, box=(32, 128), swizzle=64) for x in (problem.dv, problem.dk)),
            *(launch.Opaque(32) for _ in range(5)),
            SOFTMAX_SCALE,
            SOFTMAX_SCALE * LOG2_E,
            *grid,
            launch.Ints(1, 1, 0),
            1,
        ),
    )


def postprocess(problem: Problem, buffers: Buffers) -> launch.Launch:
    batch, seqlen_q, _, heads = problem.sizes
    grid = (tiles(seqlen_q), heads, batch)
    accumulator = buffers.dq_accumulator
    return launch.Launch(
        grid=grid,
        block=(128, 1, 1),
        dynamic_smem=POSTPROCESS_DYNAMIC_SMEM,
        params=(
            launch.Tensor(accumulator, dims=tuple(accumulator.shape), strides=accumulator.stride()[:2]),
            launch.Tensor(problem.dq, dims=tuple(problem.dq.shape), strides=problem.dq.stride()[:3]),
            SOFTMAX_SCALE,
            launch.Opaque(32),
            *grid,
            launch.Ints(1, 1, 0),
            1,
        ),
    )


def rows(x: Tensor) -> launch.Tensor:
    """(batch, seqlen, heads, 64) as (seqlen, 64, heads, batch), the unit stride of the second left out."""
    batch, seqlen, heads, _ = x.shape
    return launch.Tensor(x, dims=(seqlen, HEAD_DIM, heads, batch), strides=(x.stride(1), x.stride(2), x.stride(0)))


def row_scalars(x: Tensor) -> launch.Tensor:
    """(batch, heads, n) as (n, heads, batch), the unit stride of the first left out."""
    batch, heads, length = x.shape
    return launch.Tensor(x, dims=(length, heads, batch), strides=(x.stride(1), x.stride(0)))


def tensor_map(x: Tensor, box: tuple[int, int], swizzle: int) -> launch.TensorMap:
    batch, seqlen, heads, _ = x.shape
    size = x.element_size()
    return launch.TensorMap(
        x,
        dtype="bf16",
        dims=(HEAD_DIM, seqlen, heads, batch),
        strides=(x.stride(1) * size, x.stride(2) * size, x.stride(0) * size),
        box=(*box, 1, 1),
        swizzle=swizzle,
    )
