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
WARP_ROWS = 16  # keys of a compute warp, as wgmma orders its results
LOAD_STAGES = 2
ROW_TERMS = 16  # 16-bit terms that the workspace holds of a query row: one step of k
# What the terms of a number count, those in even places and those in odd ones; the exponents of f16 reach only so far.
TERM_UNITS = {DType.BF16: (1.0, 1.0), DType.F16: (2.0**6, 2.0**-10)}
TERM_PLACES = (0, 2, 1, 3)  # in the order in which a number is split up: two of the large unit, two of the small one
MOST_OF_TERM = {DType.BF16: 1e30, DType.F16: 6e4}  # in units
K_STAGES = 2  # the scores of a key/value tile begin before the last dQ of the one before
ITEM_AHEAD = 1  # items that are claimed ahead of the load warp's; whose claim is late share more in L2
ITEM_STAGES = 8  # load is up to 2 items ahead of compute, which still needs the one before its own
ITEM_WORDS = 16  # 32-bit words that say what an item is; twice as many where groups are split
DS_STAGES = 2  # every reader of a stage has finished before its writer has had its next turn
assert all(stages & (stages - 1) == 0 for stages in (LOAD_STAGES, K_STAGES, DS_STAGES))  # roles mask their counts

# Registers: 2 x 128 threads of 240 and 128 of 24 are 64512 of the 65536 of an SM.
ROLES = (
    Role("compute", range(8), 240, "all GEMMs; S to P, dP to dS; stages dQ; then the dK and dV epilogue"),
    Role("load", range(8, 9), 24, "all TMA and bulk loads"),
    Role("reduce", range(9, 11), 24, "dQ: SMEM to global by bulk reduce-add, one warp per compute warpgroup"),
    Role("schedule", range(11, 12), 24, "claims key/value tiles for the CTA and says what they are"),
)

STAGING_THREADS = WARPGROUP_THREADS + 32  # a compute warpgroup and the warp that reduces its dQ

BARRIERS = (
    NamedBarrier("turn0", ("compute",), "warpgroup 0 may issue its burst; warpgroup 1 arrives"),
    NamedBarrier("turn1", ("compute",), "warpgroup 1 may issue its burst; warpgroup 0 arrives"),
    NamedBarrier("dq_full0", ("compute", "reduce"), "warpgroup 0 has staged its dQ", threads=STAGING_THREADS),
    NamedBarrier("dq_full1", ("compute", "reduce"), "warpgroup 1 has staged its dQ", threads=STAGING_THREADS),
    NamedBarrier("dq_empty0", ("compute", "reduce"), "the bulk add has read that of 0", threads=STAGING_THREADS),
    NamedBarrier("dq_empty1", ("compute", "reduce"), "the bulk add has read that of 1", threads=STAGING_THREADS),
)

ITEM_PIPELINES = ("schedule_load_item", "schedule_compute_item", "schedule_reduce_item")


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
        smem=smem_map(dtype, attention),
        tmem=(),
        pipelines=pipelines(attention),
        barriers=BARRIERS,
        mmas=(),
        order=(),
        signal_scope=SignalScope.WARP,
        programs=(
            ("load", load_program(attention)),
            ("compute", compute_program()),
            ("reduce", (Wait("schedule_reduce_item", "full"), Signal("schedule_reduce_item", "empty"))),
            ("schedule", schedule_program()),
        ),
        attention=attention,
    )
    return replace(planned, programs=(*planned.programs, *programs(planned)))


def pipelines(attention: Attention = DENSE) -> tuple[Pipeline, ...]:
    """The pipelines of a variant. LSE travels with Q where the softmax reads it."""
    return (
        Pipeline(
            "load_compute_q",
            "load",
            "compute",
            ("sQ", "sRow", *lse_regions(attention)),
            stages=LOAD_STAGES,
            why="S, dP and dK have read Q and the row terms",
        ),
        Pipeline(
            "load_compute_do",
            "load",
            "compute",
            ("sdO",),
            stages=LOAD_STAGES,
            why="dP and dV have read dO",
        ),
        Pipeline(
            "load_compute_k",
            "load",
            "compute",
            ("sK",),
            stages=K_STAGES,
            per_item=True,
            why="the last dQ of the key/value tile has read K",
        ),
        Pipeline(
            "load_compute_v",
            "load",
            "compute",
            ("sV",),
            per_item=True,
            why="the last dP of the key/value tile has read V",
        ),
        *(
            Pipeline(f"schedule_{role}_item", "schedule", role, ("sItems",), stages=ITEM_STAGES, per_item=True, why=why)
            for role, why in (
                ("load", "load has read what the item is"),
                ("compute", "the dK and dV of the item are written"),
                ("reduce", "reduce has read what the item is"),
            )
        ),
    )


def lse_regions(attention: Attention) -> tuple[str, ...]:
    """Where LSE is in shared memory: only a softcap wants the scores as they are, and takes LSE off their tanh."""
    return ("sLSE",) if attention.softcap else ()


def smem_map(dtype: DType, attention: Attention = DENSE) -> tuple[SmemRegion, ...]:
    """Shared memory in the order it is packed. sdS: a panel of 64 query columns of all keys after another."""
    return (
        SmemRegion("sRow", TILE_M, ROW_TERMS, dtype, stages=LOAD_STAGES),
        *(SmemRegion(name, 1, TILE_M, DType.F32, stages=LOAD_STAGES) for name in lse_regions(attention)),
        SmemRegion("sQ", TILE_M, HEAD_DIM, dtype, stages=LOAD_STAGES),
        SmemRegion("sK", TILE_N, HEAD_DIM, dtype, stages=K_STAGES),
        SmemRegion("sV", TILE_N, HEAD_DIM, dtype),
        SmemRegion("sdO", TILE_M, HEAD_DIM, dtype, stages=LOAD_STAGES),
        SmemRegion("sdS", TILE_N, TILE_M, dtype, stages=DS_STAGES),
        SmemRegion("sdQ", WARPGROUP_ROWS, HEAD_DIM, DType.F32, stages=WARPGROUPS),
        SmemRegion("sItems", 1, ITEM_WORDS * (1 + attention.split), DType.F32, stages=ITEM_STAGES),
    )


def load_program(attention: Attention = DENSE) -> tuple[Step, ...]:
    """One tile of the load warp, K and V only with the first of a key/value tile.

    In the order in which stages become free: that of K has been since early in the item before, Q's is released in the
    burst before the tile's, and V, which has one stage, last.
    """
    return (
        Wait("schedule_load_item", "full"),
        Signal("schedule_load_item", "empty"),
        Wait("load_compute_k", "empty", -K_STAGES),
        Copy("sK", "load_compute_k"),
        Wait("load_compute_q", "empty", -LOAD_STAGES),
        Copy("sQ", "load_compute_q"),
        Copy("sRow", "load_compute_q"),
        *(Copy(name, "load_compute_q") for name in lse_regions(attention)),
        Wait("load_compute_do", "empty", -LOAD_STAGES),
        Copy("sdO", "load_compute_do"),
        Wait("load_compute_v", "empty", -1),
        Copy("sV", "load_compute_v"),
    )


def compute_program() -> tuple[Step, ...]:
    """The pipeline steps of a compute warp in one burst: dQ, dV and dK of t, S and dP of the next tile.

    K and V change where the next tile is the first of a key/value tile.
    """
    return (
        Wait("schedule_compute_item", "full", 1),
        Signal("load_compute_k", "empty"),
        Wait("load_compute_k", "full", 1),
        Wait("load_compute_q", "full", 1),
        Signal("load_compute_do", "empty"),
        Signal("load_compute_q", "empty"),
        Wait("load_compute_v", "full", 1),
        Wait("load_compute_do", "full", 1),
        Signal("schedule_compute_item", "empty"),
        Signal("load_compute_v", "empty"),
    )


def schedule_program() -> tuple[Step, ...]:
    """One item of the schedule warp."""
    ahead = {"schedule_load_item": ITEM_AHEAD}
    waits = (Wait(name, "empty", -ahead.get(name, ITEM_STAGES)) for name in ITEM_PIPELINES)
    return (*waits, *(Signal(name, "full") for name in ITEM_PIPELINES))


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

    number: 0 is -LSE / softmax_scale, or nothing under a softcap; 1 is -D. Rows have 32 bytes under the 32-byte
    swizzle, as wgmma reads them: the place within its 8 rows is all of a row that counts.
    """
    return (row * 2 + (number ^ (row // 4 % 2))) * (ROW_TERMS // 2)
