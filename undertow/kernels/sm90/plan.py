"""The SM90 backward kernel at head dim 64 as data.

Two compute warpgroups own 64 keys each and take turns: while one issues its GEMMs, the other does its softmax. A score
tile is kept transposed, keys by query rows, in the registers of the warpgroup that owns the keys.
"""

from __future__ import annotations

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
DS_STAGES = 2  # dS of tile t is read until the burst after the next one of the same warpgroup has started

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
        ("sQ", "sLSE"),
        stages=LOAD_STAGES,
        first_also=("sK",),
        why="S and dK have read Q, the softmax LSE",
    ),
    Pipeline(
        "load_compute_do",
        "load",
        "compute",
        ("sdO", "sD"),
        stages=LOAD_STAGES,
        first_also=("sV",),
        why="dP and dV have read dO, dP has started from D",
    ),
)


def plan(dtype: DType = DType.BF16, attention: Attention = DENSE) -> Plan:
    """The plan for one element type and variant of attention.

    dtype: element type of Q, K, V, dO, P and dS.
    Raises PlanError for a dtype that is not 16 bits wide, and for what this kernel does not do yet.
    """
    if dtype.bytes != 2:
        raise PlanError(f"dtype {dtype.label} is {dtype.bytes} bytes wide; allowed: bf16, f16")
    return Plan(
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


def smem_map(dtype: DType) -> tuple[SmemRegion, ...]:
    """Shared memory in the order it is packed. sdS: a panel of 64 query columns of all keys after another."""
    f32 = DType.F32
    return (
        SmemRegion("sLSE", 1, TILE_M, f32, stages=LOAD_STAGES, align=128),
        SmemRegion("sD", 1, TILE_M, f32, stages=LOAD_STAGES, align=128),
        SmemRegion("sQ", TILE_M, HEAD_DIM, dtype, stages=LOAD_STAGES),
        SmemRegion("sK", TILE_N, HEAD_DIM, dtype),
        SmemRegion("sV", TILE_N, HEAD_DIM, dtype),
        SmemRegion("sdO", TILE_M, HEAD_DIM, dtype, stages=LOAD_STAGES),
        SmemRegion("sdS", TILE_N, TILE_M, dtype, stages=DS_STAGES),
        SmemRegion("sdQ", WARPGROUP_ROWS, HEAD_DIM, f32, stages=WARPGROUPS),
    )


def load_program() -> tuple[Step, ...]:
    """One tile of the load warp; K travels with the first Q and V with the first dO."""
    return (
        Wait("load_compute_q", "empty", -LOAD_STAGES),
        Copy("sQ", "load_compute_q"),
        Copy("sLSE", "load_compute_q"),
        Wait("load_compute_do", "empty", -LOAD_STAGES),
        Copy("sdO", "load_compute_do"),
        Copy("sD", "load_compute_do"),
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
    warpgroup, within = divmod(row, WARPGROUP_ROWS)
    warp, within = divmod(within, 16)
    half, row_of_8 = divmod(within, 8)
    group, of_8 = divmod(column, 8)
    pair, element = divmod(of_8, 2)
    thread = warp * 32 + row_of_8 * 4 + pair
    share = warpgroup * WARPGROUP_ROWS * HEAD_DIM
    return share + (group * WARPGROUP_THREADS + thread) * 4 + half * 2 + element


def row_scalar_index(row: int) -> int:
    """Where LSE or D of a query row lies within the 16 of its group, so that a thread's four are one vector.

    A thread has the columns 8 j + c and 8 j + c + 1 of a score tile, c = 2 (lane % 4): four of two neighbouring j.
    """
    group, within = divmod(row, 16)
    j, of_8 = divmod(within, 8)
    pair, element = divmod(of_8, 2)
    return group * 16 + pair * 4 + j * 2 + element
