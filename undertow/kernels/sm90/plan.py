"""The SM90 backward kernel at head dim 64 as data.

Two compute warpgroups own 64 keys each and take turns: while one issues its GEMMs, the other does its softmax. A score
tile is kept transposed, keys by query rows, in the registers of the warpgroup that owns the keys.
"""

from __future__ import annotations

from dataclasses import replace

from undertow.kernels.sm90.turns import programs
from undertow.plan.attention import DENSE, Attention
from undertow.plan.schema import (
    DType,
    NamedBarrier,
    Pipeline,
    Plan,
    PlanError,
    Role,
    SignalScope,
    SmemRegion,
)
from undertow.plan.steps import Copy, Signal, Step, Wait

TILE_M = 128
TILE_N = 128
HEAD_DIM = 64
WARPGROUPS = 2
WARPGROUP_ROWS = 64  # keys that a compute warpgroup owns; also the query rows of its share of dQ
WARPGROUP_THREADS = 128
LOAD_STAGES = 2
ROW_TERMS = 16  # 16-bit terms that the workspace holds of a query row: one step of k
TERM_UNITS = {DType.BF16: 1.0, DType.F16: 64.0}  # what a term counts; the exponents of f16 reach only so far
DS_STAGES = 2  # every reader of a stage has finished before its writer has had its next turn

# Registers: 2 x 128 threads of 240 and 128 of 24 are 64512 of the 65536 of an SM.
ROLES = (
    Role("compute", range(8), 240, "all GEMMs; S to P, dP to dS; stages dQ; then the dK and dV epilogue"),
    Role("load", range(8, 9), 24, "all TMA and bulk loads"),
    Role("reduce", range(9, 11), 24, "dQ: SMEM to global by bulk reduce-add, one warp per compute warpgroup"),
    Role("idle", range(11, 12), 24, "nothing; it fills the warpgroup"),
)

STAGING_THREADS = WARPGROUP_THREADS + 32  # a compute warpgroup and the warp that reduces its dQ

BARRIERS = (
    NamedBarrier("turn0", ("compute",), "warpgroup 0 may issue its burst; warpgroup 1 arrives"),
    NamedBarrier("turn1", ("compute",), "warpgroup 1 may issue its burst; warpgroup 0 arrives"),
    NamedBarrier("dq_full0", ("compute", "reduce"), "warpgroup 0 has staged its dQ", threads=STAGING_THREADS),
    NamedBarrier("dq_full1", ("compute", "reduce"), "warpgroup 1 has staged its dQ", threads=STAGING_THREADS),
    NamedBarrier("dq_empty0", ("compute", "reduce"), "the bulk add has read that of 0", threads=STAGING_THREADS),
    NamedBarrier("dq_empty1", ("compute", "reduce"), "the bulk add has read that of 1", threads=STAGING_THREADS),
    NamedBarrier("own0", ("compute",), "among the warps of warpgroup 0", threads=WARPGROUP_THREADS),
    NamedBarrier("own1", ("compute",), "among the warps of warpgroup 1", threads=WARPGROUP_THREADS),
)

PIPELINES = (
    Pipeline(
        "load_compute_q",
        "load",
        "compute",
        ("sQ", "sRow"),
        stages=LOAD_STAGES,
        first_also=("sK",),
        why="S, dP and dK have read Q and the row terms",
    ),
    Pipeline(
        "load_compute_do",
        "load",
        "compute",
        ("sdO",),
        stages=LOAD_STAGES,
        first_also=("sV",),
        why="dP and dV have read dO",
    ),
)


def plan(dtype: DType = DType.BF16, attention: Attention = DENSE) -> Plan:
    """The plan for one element type and variant of attention.

    dtype: element type of Q, K, V, dO, P and dS.
    Raises PlanError for a dtype that is not 16 bits wide.
    """
    if dtype.bytes != 2:
        raise PlanError(f"dtype {dtype.label} is {dtype.bytes} bytes wide; allowed: bf16, f16")
    planned = Plan(
        name="pingpong",
        what="two warpgroups in turns, dQ of the first one tile late",
        tile_m=TILE_M,
        tile_n=TILE_N,
        head_dim=HEAD_DIM,
        dtype=dtype,
        roles=ROLES,
        smem=smem_map(dtype),
        tmem=(),
        pipelines=PIPELINES,
        barriers=BARRIERS,
        mmas=(),
        order=(),
        signal_scope=SignalScope.WARP,
        programs=(("load", load_program()), ("compute", compute_program())),
        attention=attention,
    )
    return replace(planned, programs=(*planned.programs, *programs(planned)))


def smem_map(dtype: DType) -> tuple[SmemRegion, ...]:
    """Shared memory in the order it is packed. sdS: a panel of 64 query columns of all keys after another."""
    return (
        SmemRegion("sRow", TILE_M, ROW_TERMS, dtype, stages=LOAD_STAGES),
        SmemRegion("sQ", TILE_M, HEAD_DIM, dtype, stages=LOAD_STAGES),
        SmemRegion("sK", TILE_N, HEAD_DIM, dtype),
        SmemRegion("sV", TILE_N, HEAD_DIM, dtype),
        SmemRegion("sdO", TILE_M, HEAD_DIM, dtype, stages=LOAD_STAGES),
        SmemRegion("sdS", TILE_N, TILE_M, dtype, stages=DS_STAGES),
        SmemRegion("sdQ", WARPGROUP_ROWS, HEAD_DIM, DType.F32, stages=WARPGROUPS),
    )


def load_program() -> tuple[Step, ...]:
    """One tile of the load warp; K travels with the first Q and V with the first dO."""
    return (
        Wait("load_compute_q", "empty", -LOAD_STAGES),
        Copy("sQ", "load_compute_q"),
        Copy("sRow", "load_compute_q"),
        Wait("load_compute_do", "empty", -LOAD_STAGES),
        Copy("sdO", "load_compute_do"),
    )


def compute_program() -> tuple[Step, ...]:
    """The pipeline steps of a compute warp in one burst: dV and dK of t, S and dP of the next tile."""
    return (
        Wait("load_compute_q", "full", 1),
        Signal("load_compute_q", "empty"),
        Wait("load_compute_do", "full", 1),
        Signal("load_compute_do", "empty"),
    )


def dq_accumulator_index(row: int, column: int) -> int:
    """Element of a tile's flat fp32 dQ accumulator that holds (query row, head-dim column).

    A warpgroup's 64 x 64 share is stored as its threads hold it after the GEMM: [group of 8 columns][thread][4], where
    a thread has columns c and c + 1 of rows r and r + 8.
    """
    thread = row // 16 % 4 * 32 + row % 8 * 4 + column % 8 // 2
    within = (column // 8 * WARPGROUP_THREADS + thread) * 4 + row // 8 % 2 * 2 + column % 2
    return row // WARPGROUP_ROWS * (WARPGROUP_ROWS * HEAD_DIM) + within


def row_term_index(row: int, number: int) -> int:
    """Element of a tile's row terms at which the terms of a number of a query row begin, 8 of them.

    number: 0 is -LSE / softmax_scale, or -LSE * log2(e) under a softcap; 1 is -D. Rows have 32 bytes under the 32-byte
    swizzle, as wgmma reads them: the place within its 8 rows is all of a row that counts.
    """
    return (row * 2 + (number ^ (row // 4 % 2))) * (ROW_TERMS // 2)
