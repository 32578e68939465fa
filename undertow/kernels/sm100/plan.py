"""The SM100 backward kernel at head dim 64 as data: four schedules that share roles, tiles and role code.

Source of the design: the article on head dim 64 (TMEM maps, warps, alias guards, MMA orders) and our notes on register
and shared-memory budgets. Score tiles are kept transposed: a TMEM lane is a key row, a column is a query row.
"""

from __future__ import annotations

from undertow.plan.attention import DENSE, Attention
from undertow.plan.schema import (
    DType,
    MmaOp,
    NamedBarrier,
    Pipeline,
    Plan,
    PlanError,
    Role,
    SignalScope,
    SmemRegion,
    TmemRegion,
)
from undertow.plan.steps import Copy, Issue, Load, PassTurn, Signal, Step, Store, TakeTurn, Wait

TILE_M = 128
TILE_N = 128
HEAD_DIM = 64
SCHEDULES = ("aliased", "slots", "signals", "split")

WHAT = {
    "aliased": "the baseline: P over S and dS over dP, alias guards, a compute-wide barrier before each signal",
    "slots": "P and dS in TMEM slots of their own; the compute-wide barriers before the signals stay",
    "signals": "the baseline's TMEM map, order and guards; signals need a warp sync only",
    "split": "slots of their own, signals by warp sync, the next QK under the softmax: no compute-wide barrier",
}


# Registers: each SM sub-partition holds one reduce warp, two compute warps and one warp of the last warpgroup, so
# 152 + 2 * 136 + 88 = 512 threads' worth of its 16 K registers. setmaxnreg must be the same instruction in all four
# warps of a warpgroup (PTX ISA, setmaxnreg), so the idle warps share the value of the MMA and load warps. The reduce
# warps need 81 (measured); under a softcap they leave 8 more to each compute warp, which holds tanh beside P.
def roles(attention: Attention = DENSE) -> tuple[Role, ...]:
    """Who does what, and with how many registers."""
    reduce, compute = (136, 144) if attention.softcap else (152, 136)
    return (
        Role("reduce", range(4), reduce, "dQ: TMEM to registers to SMEM to global, by bulk reduce-add"),
        Role("compute", range(4, 12), compute, "S to P, dP to dS; then the dK and dV epilogue"),
        Role("mma", range(12, 13), 88, "issues the five GEMMs; owns the TMEM allocation"),
        Role("load", range(13, 14), 88, "all TMA and bulk loads"),
        Role("idle", range(14, 16), 88, "nothing; they fill the warpgroup"),
    )


MMAS = (
    MmaOp("QK", "S^T = K Q^T", a="sK", b="sQ", d="S", m=TILE_N, n=TILE_M, k=HEAD_DIM, into_zero=True),
    MmaOp("dP", "dP^T = V dO^T", a="sV", b="sdO", d="dP", m=TILE_N, n=TILE_M, k=HEAD_DIM, into_zero=True),
    MmaOp("PdO", "dV += P^T dO", a="P", b="sdO", d="dV", m=TILE_N, n=HEAD_DIM, k=TILE_M, mn_major=("sdO",)),
    MmaOp("dK", "dK += dS^T Q", a="dS", b="sQ", d="dK", m=TILE_N, n=HEAD_DIM, k=TILE_M, mn_major=("sQ",)),
    MmaOp("dQ", "dQ = dS K", "sdS", "sK", "dQ", m=TILE_M, n=HEAD_DIM, k=TILE_N, into_zero=True, mn_major=("sdS", "sK")),
)

ALIASED_ORDER = (Issue("QK", 1), Issue("dK"), Issue("dQ"), Issue("dP", 1), Issue("PdO", 1))
SPLIT_ORDER = (Issue("QK", 1), Issue("PdO"), Issue("dK"), Issue("dQ"), Issue("dP", 1))

BARRIERS = (
    NamedBarrier("compute", ("compute",), "alias guards and barrier-scoped signals of the compute warps"),
    NamedBarrier("reduce", ("reduce",), "the dQ staging buffer is written, or free again"),
    NamedBarrier("teardown", ("reduce", "compute", "mma"), "nobody reads TMEM any more: it can be freed"),
)

DQ_STAGE_COLUMNS = 32  # columns of dQ in one staging buffer: half a head dim


def plan(schedule: str = "split", dtype: DType = DType.BF16, attention: Attention = DENSE) -> Plan:
    """The plan of one schedule.

    schedule: one of SCHEDULES. dtype: element type of Q, K, V, dO, P and dS. attention: the variant.
    Raises PlanError for an unknown schedule or a dtype that is not 16 bits wide.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule {schedule!r} is unknown; allowed: {', '.join(SCHEDULES)}")
    if dtype.bytes != 2:
        raise PlanError(f"dtype {dtype.label} is {dtype.bytes} bytes wide; allowed: bf16, f16")
    own_slots = schedule in ("slots", "split")
    return Plan(
        name=schedule,
        what=WHAT[schedule],
        tile_m=TILE_M,
        tile_n=TILE_N,
        head_dim=HEAD_DIM,
        dtype=dtype,
        roles=roles(attention),
        smem=smem_map(dtype),
        tmem=tmem_map(own_slots, dtype),
        pipelines=pipelines(own_slots),
        barriers=BARRIERS,
        mmas=MMAS,
        order=SPLIT_ORDER if own_slots else ALIASED_ORDER,
        signal_scope=SignalScope.WARP if schedule in ("signals", "split") else SignalScope.BARRIER,
        programs=(
            ("load", load_program()),
            ("compute", compute_program(own_slots)),
            ("reduce", reduce_program(attention.deterministic)),
            ("epilogue", epilogue_program()),
        ),
        attention=attention,
    )


def smem_map(dtype: DType) -> tuple[SmemRegion, ...]:
    """Shared memory in the order it is packed."""
    f32 = DType.F32
    return (
        SmemRegion("sQ", TILE_M, HEAD_DIM, dtype, stages=2),
        SmemRegion("sK", TILE_N, HEAD_DIM, dtype),
        SmemRegion("sV", TILE_N, HEAD_DIM, dtype),
        SmemRegion("sdO", TILE_M, HEAD_DIM, dtype),
        SmemRegion("sdS", TILE_N, TILE_M, dtype),
        SmemRegion("sdQ", TILE_M, DQ_STAGE_COLUMNS, f32, stages=2),
        SmemRegion("sLSE", 1, TILE_M, f32, stages=2, align=128),
        SmemRegion("sD", 1, TILE_M, f32, align=128),
    )


def tmem_map(own_slots: bool, dtype: DType) -> tuple[TmemRegion, ...]:
    """Tensor memory: the article's Figure 1, or Figure 4 where P and dS have slots of their own."""
    packed = TILE_M * dtype.bytes // 4
    s, dv, dp, dk = 0, 128, 192, 320
    p, ds = (384, 384 + packed) if own_slots else (s, dp)
    return (
        TmemRegion("S", s, TILE_M, DType.F32),
        TmemRegion("dV", dv, HEAD_DIM, DType.F32),
        TmemRegion("dP", dp, TILE_M, DType.F32),
        TmemRegion("dQ", dp, HEAD_DIM, DType.F32),
        TmemRegion("dK", dk, HEAD_DIM, DType.F32),
        TmemRegion("P", p, packed, dtype),
        TmemRegion("dS", ds, packed, dtype),
    )


def pipelines(own_slots: bool) -> tuple[Pipeline, ...]:
    """Every hand-off between roles. With slots of its own P gets a pipeline; else S's empty side also returns P."""
    s_why = "S is in registers" if own_slots else "S is read and P is written over it"
    s = Pipeline("mma_compute_s", "mma", "compute", ("S",), returns=() if own_slots else ("P",), why=s_why)
    p = Pipeline("compute_mma_p", "compute", "mma", ("P",), why="PdO has read P")
    return (
        Pipeline("load_mma_q", "load", "mma", ("sQ",), stages=2, first_also=("sK",), why="QK and dK have read Q"),
        Pipeline("load_mma_do", "load", "mma", ("sdO",), first_also=("sV",), why="dP and PdO have read dO"),
        Pipeline("load_compute_lse", "load", "compute", ("sLSE",), stages=2, why="the softmax has read LSE"),
        Pipeline("load_compute_d", "load", "compute", ("sD",), why="dS is formed"),
        s,
        Pipeline(
            "mma_compute_dp",
            "mma",
            "compute",
            ("dP",),
            released_by="compute_mma_ds",
            why="a warp that has written dS has read dP",
        ),
        *((p,) if own_slots else ()),
        Pipeline("compute_mma_ds", "compute", "mma", ("dS", "sdS"), why="dK and dQ have read dS"),
        Pipeline("mma_reduce_dq", "mma", "reduce", ("dQ",), why="dQ is in registers"),
        Pipeline("mma_epilogue_dv", "mma", "compute", ("dV",), once=True),
        Pipeline("mma_epilogue_dk", "mma", "compute", ("dK",), once=True),
    )


def load_program() -> tuple[Step, ...]:
    """One tile of the load warp; K travels with the first Q and V with the first dO."""
    return (
        Wait("load_mma_q", "empty", -2),
        Copy("sQ", "load_mma_q"),
        Wait("load_compute_lse", "empty", -2),
        Copy("sLSE", "load_compute_lse"),
        Wait("load_mma_do", "empty", -1),
        Copy("sdO", "load_mma_do"),
        Wait("load_compute_d", "empty", -1),
        Copy("sD", "load_compute_d"),
    )


def compute_program(own_slots: bool) -> tuple[Step, ...]:
    """One tile of a compute warp. A guard stands before each store that `Plan.guards` names, nowhere else."""
    softmax: tuple[Step, ...] = (Load("sLSE", (0, 1)),)
    if own_slots:
        softmax = (Signal("mma_compute_s", "empty"), *softmax, Wait("compute_mma_p", "empty", -1))
    written = Signal("compute_mma_p", "full") if own_slots else Signal("mma_compute_s", "empty")
    return (
        Wait("load_compute_lse", "full"),
        Wait("mma_compute_s", "full"),
        Load("S", (0, 1)),
        *softmax,
        Store("P", (0, 1)),
        written,
        Signal("load_compute_lse", "empty"),
        Wait("load_compute_d", "full"),
        Wait("mma_compute_dp", "full"),
        Wait("compute_mma_ds", "empty", -1),
        Load("dP", (0,)),
        Load("sD", (0,)),
        Store("dS", (0,)),
        Store("sdS", (0,)),
        Load("dP", (1,)),
        Load("sD", (1,)),
        Store("dS", (1,)),
        Store("sdS", (1,)),
        Signal("load_compute_d", "empty"),
        Signal("compute_mma_ds", "full"),
    )


def reduce_program(deterministic: bool = False) -> tuple[Step, ...]:
    """One tile of a reduce warp: TMEM is free before the staging starts, and before it waits for its turn."""
    adds: tuple[Step, ...] = (Store("sdQ", (0,)), Store("sdQ", (1,)))
    if deterministic:
        adds = (TakeTurn("dQ"), *adds, PassTurn("dQ"))
    return (Wait("mma_reduce_dq", "full"), Load("dQ"), Signal("mma_reduce_dq", "empty"), *adds)


def epilogue_program() -> tuple[Step, ...]:
    """What the compute warps do once, after their last tile."""
    return (
        Wait("mma_epilogue_dv", "full"),
        Load("dV"),
        Wait("mma_epilogue_dk", "full"),
        Load("dK"),
    )


def dq_accumulator_index(row: int, column: int) -> int:
    """Element of a tile's flat fp32 dQ accumulator that holds (query row, head-dim column).

    A tile of 128 x 64 is stored as the reduce warps hold it: [half of 32 columns][group of 4 columns][row][4], so that
    both the 16-byte SMEM stores and the bulk reduce-add are contiguous.
    """
    half, within = divmod(column, DQ_STAGE_COLUMNS)
    group, element = divmod(within, 4)
    return ((half * (DQ_STAGE_COLUMNS // 4) + group) * TILE_M + row) * 4 + element
