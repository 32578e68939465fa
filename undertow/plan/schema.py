"""The vocabulary of a kernel plan: roles, memory regions, pipelines and programs, all frozen data.

A plan says who does what and in which order; numbers that follow from it (arrivals, bytes, barrier ids, offsets, alias
guards) are derived here, so that nobody can type them wrongly. Units: TMEM in 32-bit columns, SMEM in bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property

from undertow.plan.attention import DENSE, Attention
from undertow.plan.steps import Issue, Load, Signal, Step, Store, Wait

WARP_THREADS = 32
WARPGROUP_WARPS = 4
MBARRIER_BYTES = 8
TMEM_COLUMNS = 512  # 32-bit columns per SM: PTX ISA, "Tensor Memory"
SMEM_BYTES_PER_CTA = 227 * 1024  # largest dynamic allocation of one CTA on sm_90 and sm_100: CUDA programming guide
REGISTERS_PER_SM = 64 * 1024


class PlanError(ValueError):
    """A plan that cannot work; the message shows the arithmetic that says so."""


class DType(enum.Enum):
    """Element type of a region: its name and its size in bytes."""

    BF16 = ("bf16", 2)
    F16 = ("f16", 2)
    F32 = ("f32", 4)

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def bytes(self) -> int:
        return self.value[1]


class Arrival(enum.Enum):
    """Who completes one side of a pipeline: it fixes the arrival count of that mbarrier."""

    TMA = "one arrival that expects bytes, then the bytes"
    COMMIT = "one tcgen05.commit of the MMA warp"
    WARPS = "one elected lane of every warp of the role"


class SignalScope(enum.Enum):
    """What joins the compute warps before one of their signals."""

    BARRIER = "a compute-wide named barrier"
    WARP = "a warp sync; the mbarrier's arrival count is the join"


@dataclass(frozen=True)
class Role:
    """A set of warps that run one loop."""

    name: str
    warps: range
    registers: int  # per thread, what setmaxnreg asks for
    does: str

    @property
    def threads(self) -> int:
        return len(self.warps) * WARP_THREADS

    @property
    def warpgroups(self) -> int:
        return -(-len(self.warps) // WARPGROUP_WARPS)


@dataclass(frozen=True)
class SmemRegion:
    """A shared-memory buffer of `stages` tiles of `rows` x `columns` elements."""

    name: str
    rows: int
    columns: int
    dtype: DType
    stages: int = 1
    align: int = 1024  # bytes; the 128-byte swizzle repeats every 1024

    @property
    def stage_bytes(self) -> int:
        return self.rows * self.columns * self.dtype.bytes

    @property
    def bytes(self) -> int:
        return self.stage_bytes * self.stages


@dataclass(frozen=True)
class TmemRegion:
    """A tile in tensor memory: 128 lanes by `columns` 32-bit columns; 16-bit types pack two elements a column."""

    name: str
    column: int
    columns: int
    dtype: DType

    @property
    def end(self) -> int:
        return self.column + self.columns

    def overlap(self, other: TmemRegion) -> range:
        """The columns that both regions cover (empty if none)."""
        return range(max(self.column, other.column), min(self.end, other.end))


@dataclass(frozen=True)
class Pipeline:
    """A hand-off `<producer>_<consumer>_<resource>`: a full and an empty mbarrier per stage.

    `carries` names the regions that full hands over. `returns` names what the consumer hands back with empty, where it
    is more than the right to overwrite. `released_by` names a pipeline whose full side already implies this one's empty
    side, so that no empty barrier exists; `once` marks a hand-off that happens once per CTA and needs none either.
    `first_also` are regions that travel with the first tile only. `per_item` ones count key/value tiles of a CTA.
    """

    name: str
    producer: str
    consumer: str
    carries: tuple[str, ...]
    stages: int = 1
    returns: tuple[str, ...] = ()
    first_also: tuple[str, ...] = ()
    released_by: str | None = None
    once: bool = False
    per_item: bool = False
    why: str = ""

    @property
    def has_empty(self) -> bool:
        return not self.once and self.released_by is None


@dataclass(frozen=True)
class MmaOp:
    """One GEMM of the tile loop: d (+)= a b, of shape (m, n, k); `into_zero` if it starts a new sum every tile.

    `mn_major` names the SMEM operands whose rows run along k, so that m or n is contiguous; in all others k is.
    """

    name: str
    math: str
    a: str
    b: str
    d: str
    m: int
    n: int
    k: int
    into_zero: bool = False
    mn_major: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier among the warps of some roles; ids are given in plan order (0 is the CTA-wide one).

    threads: how many take part, where these are not all warps of the roles.
    """

    name: str
    roles: tuple[str, ...]
    does: str
    threads: int | None = None


@dataclass(frozen=True)
class Plan:
    """A whole warp-specialised kernel as data. `checks.check` proves it before it is compiled."""

    name: str
    what: str
    tile_m: int  # query rows per tile
    tile_n: int  # key/value rows per CTA
    head_dim: int
    dtype: DType
    roles: tuple[Role, ...]
    smem: tuple[SmemRegion, ...]
    tmem: tuple[TmemRegion, ...]
    pipelines: tuple[Pipeline, ...]
    barriers: tuple[NamedBarrier, ...]
    mmas: tuple[MmaOp, ...]
    order: tuple[Issue, ...]  # the MMA warp's issue order in one trip of its loop
    signal_scope: SignalScope
    programs: tuple[tuple[str, tuple[Step, ...]], ...]  # one tile of each other role, in program order
    attention: Attention = DENSE
    omitted_guards: tuple[str, ...] = ()  # only tests set this: the hazard must then be found
    events: bool = False  # the kernel has named spans for a tracer

    def role(self, name: str) -> Role:
        return _named(self.roles, name, "role")

    def smem_region(self, name: str) -> SmemRegion:
        return _named(self.smem, name, "SMEM region")

    def tmem_region(self, name: str) -> TmemRegion:
        return _named(self.tmem, name, "TMEM region")

    def pipeline(self, name: str) -> Pipeline:
        return _named(self.pipelines, name, "pipeline")

    def mma(self, name: str) -> MmaOp:
        return _named(self.mmas, name, "MMA")

    def has_pipeline(self, name: str) -> bool:
        return any(p.name == name for p in self.pipelines)

    def program(self, role: str) -> tuple[Step, ...]:
        return dict(self.programs)[role]

    @property
    def num_warps(self) -> int:
        return max(role.warps.stop for role in self.roles)

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP_THREADS

    # What follows from the data above.

    def full_arrival(self, pipeline: Pipeline) -> Arrival:
        return _arrival(pipeline.producer)

    def empty_arrival(self, pipeline: Pipeline) -> Arrival:
        arrival = _arrival(pipeline.consumer)
        return Arrival.WARPS if arrival is Arrival.TMA else arrival  # bytes arrive on the full side only

    def arrivals(self, pipeline: Pipeline, side: str) -> int:
        """Arrival count of a pipeline's `full` or `empty` mbarrier."""
        role = pipeline.producer if side == "full" else pipeline.consumer
        return len(self.role(role).warps) if _arrival(role) is Arrival.WARPS else 1

    def tx_bytes(self, pipeline: Pipeline, first: bool = False) -> int:
        """Bytes that one full phase of a TMA pipeline transfers; `first` adds what travels with the first tile."""
        names = pipeline.carries + (pipeline.first_also if first else ())
        return sum(self.smem_region(name).stage_bytes for name in names)

    @cached_property
    def barrier_ids(self) -> dict[str, int]:
        """Named barrier -> hardware id; 0 is left to the CTA-wide barrier."""
        return {barrier.name: index for index, barrier in enumerate(self.barriers, start=1)}

    def barrier_threads(self, name: str) -> int:
        barrier = _named(self.barriers, name, "named barrier")
        if barrier.threads is not None:
            return barrier.threads
        return sum(self.role(role).threads for role in barrier.roles)

    @cached_property
    def mbarriers(self) -> dict[str, int]:
        """`<pipeline>.full[stage]` / `.empty[stage]` -> byte offset from the start of shared memory."""
        names = []
        for pipeline in self.pipelines:
            names += [f"{pipeline.name}.full[{stage}]" for stage in range(pipeline.stages)]
            if pipeline.has_empty:
                names += [f"{pipeline.name}.empty[{stage}]" for stage in range(pipeline.stages)]
        return {name: index * MBARRIER_BYTES for index, name in enumerate(names)}

    @cached_property
    def tmem_pointer_offset(self) -> int:
        """Byte offset of the word that tcgen05.alloc writes the TMEM base to."""
        return len(self.mbarriers) * MBARRIER_BYTES

    @cached_property
    def smem_offsets(self) -> dict[str, int]:
        """Region -> byte offset, packed in plan order behind the barriers and the TMEM pointer."""
        offsets, end = {}, self.tmem_pointer_offset + 4
        for region in self.smem:
            start = -(-end // region.align) * region.align
            offsets[region.name] = start
            end = start + region.bytes
        return offsets

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        last = self.smem[-1]
        return self.smem_offsets[last.name] + last.bytes

    @property
    def tmem_columns(self) -> int:
        """Columns to allocate: a power of two of at least 32 that holds the map."""
        columns = 32
        while columns < max(region.end for region in self.tmem):
            columns *= 2
        return columns

    def queries_of(self, stage: int, warpgroup: int) -> range:
        """Query rows of a tile that a thread of compute warpgroup `warpgroup` handles in `stage`.

        A thread has one key row and 32 query rows per stage. The warpgroups interleave: [64 s + 32 w, +32).
        """
        start = 64 * stage + 32 * warpgroup
        return range(start, start + 32)

    def columns_of(self, region: str, stage: int, warpgroup: int) -> range:
        """TMEM columns that compute warpgroup `warpgroup` touches in `stage` of a tile: 32 elements per thread."""
        tmem = self.tmem_region(region)
        per_column = 4 // tmem.dtype.bytes
        elements = self.queries_of(stage, warpgroup)
        return range(tmem.column + elements.start // per_column, tmem.column + elements.stop // per_column)

    @cached_property
    def guarded_stores(self) -> tuple[Store, ...]:
        """Stores of a compute warp that need an alias guard, derived from the TMEM map.

        Compute warp w of one warpgroup shares its lanes with warp w of the other. If a store covers columns of which
        the other warp loads something in the same tile, every warp must have loaded before any warp stores: one
        compute-wide barrier before that store. A map without such an overlap needs none.
        """
        tmem = {region.name for region in self.tmem}
        steps = [step for step in self.program("compute") if isinstance(step, Load | Store) and step.region in tmem]
        loads = [step for step in steps if isinstance(step, Load)]
        return tuple(
            step
            for step in steps
            if isinstance(step, Store)
            and step.region not in self.omitted_guards
            and any(self.stored_over(step, load) for load in loads)
        )

    @cached_property
    def guards(self) -> dict[str, int]:
        """Region -> alias guards executed per tile."""
        names = [store.region for store in self.guarded_stores]
        return {name: names.count(name) for name in names}

    def stored_over(self, store: Store, load: Load) -> range | None:
        """First columns that a warp stores although the warp with the same lanes in the other warpgroup loads them."""
        warpgroups = range(self.role("compute").warpgroups)
        for writer, reader in ((w, r) for w in warpgroups for r in warpgroups if w != r):
            for written in (self.columns_of(store.region, stage, writer) for stage in store.stages):
                for read in (self.columns_of(load.region, stage, reader) for stage in load.stages):
                    shared = range(max(written.start, read.start), min(written.stop, read.stop))
                    if shared:
                        return shared
        return None

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The signals that compute warps send to the MMA warp, each preceded by a join of `signal_scope`."""
        steps = [step for step in self.program("compute") if isinstance(step, Signal)]
        ends = {pipeline.name: (pipeline.producer, pipeline.consumer) for pipeline in self.pipelines}
        return tuple(step for step in steps if "mma" in ends[step.pipeline])

    @property
    def compute_barrier_sites(self) -> int:
        """Places in the compute loop that hold a compute-wide barrier."""
        return len(self.guards) + (len(self.signals) if self.signal_scope is SignalScope.BARRIER else 0)

    @property
    def compute_barriers_per_tile(self) -> int:
        """Compute-wide barriers that one tile executes."""
        signals = len(self.signals) if self.signal_scope is SignalScope.BARRIER else 0
        return sum(self.guards.values()) + signals

    def without_guard(self, region: str) -> Plan:
        """The same plan with one alias guard left out, which `checks.check` refuses: for tests of the detectors."""
        if region not in self.guards:
            raise PlanError(f"{self.name}: no alias guard for {region}; guards: {sorted(self.guards) or 'none'}")
        return replace(self, name=f"{self.name}-without-{region}-guard", omitted_guards=(*self.omitted_guards, region))


def _arrival(role: str) -> Arrival:
    return {"load": Arrival.TMA, "mma": Arrival.COMMIT}.get(role, Arrival.WARPS)


def _named(items, name: str, what: str):
    for item in items:
        if item.name == name:
            return item
    raise PlanError(f"no {what} {name!r}; there are {', '.join(item.name for item in items)}")


__all__ = [
    "Arrival",
    "DType",
    "Issue",
    "Load",
    "MmaOp",
    "NamedBarrier",
    "Pipeline",
    "Plan",
    "PlanError",
    "Role",
    "Signal",
    "SignalScope",
    "SmemRegion",
    "Step",
    "Store",
    "TmemRegion",
    "Wait",
]
