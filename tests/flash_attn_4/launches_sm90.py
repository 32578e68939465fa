"""How flash-attn-4 4.0.0b36 launches its SM90 backward at head dim 64, bf16: main kernel and postprocess.

As in `launches`; the preprocess kernel is launched in the same way. The main kernel has two warpgroups that multiply
and one that copies, tiles of 128 x 128, and the same parameters whether the mask is causal or not.
"""

from __future__ import annotations

from dataclasses import replace

from tests.flash_attn_4.launches import (
    HEAD_DIM,
    LOG2_E,
    SOFTMAX_SCALE,
    Buffers,
    Problem,
    preprocess,
    row_scalars,
    tensor_map,
    tiles,
)
from tests.flash_attn_4.launches import postprocess as sm100_postprocess
from undertow.plan import description as launch

__all__ = ["main", "postprocess", "preprocess"]

MAIN_DYNAMIC_SMEM = 199680
POSTPROCESS_DYNAMIC_SMEM = 32768


def main(problem: Problem, buffers: Buffers) -> launch.Launch:
    batch, seqlen_q, seqlen_k, heads = problem.sizes
    grid = (tiles(seqlen_k), heads, batch)
    query = launch.Ints(seqlen_q, HEAD_DIM, heads, batch)
    key = launch.Ints(seqlen_k, HEAD_DIM, heads, batch)
    mapped = (problem.q, problem.k, problem.v, problem.dout, problem.dk, problem.dv)
    return launch.Launch(
        grid=grid,
        block=(384, 1, 1),
        dynamic_smem=MAIN_DYNAMIC_SMEM,
        params=(
            *(query, key, key, query, key, key),
            *(tensor_map(x, box=(64, 128), swizzle=128) for x in mapped),
            row_scalars(buffers.lse_log2),
            row_scalars(buffers.d),
            row_scalars(buffers.dq_accumulator),
            *(launch.Opaque(1) for _ in range(4)),
            SOFTMAX_SCALE * LOG2_E,
            SOFTMAX_SCALE,
            *grid,
            launch.Ints(1, 1, 0),
            1,
        ),
    )


def postprocess(problem: Problem, buffers: Buffers) -> launch.Launch:
    described = sm100_postprocess(problem, buffers)
    accumulator, dq, scale, _, *scheduler = described.params
    return replace(
        described,
        block=(256, 1, 1),
        dynamic_smem=POSTPROCESS_DYNAMIC_SMEM,
        params=(accumulator, dq, scale, launch.Opaque(1), *scheduler),
    )
