"""The order that a plan promises: a happens-before graph over a few unrolled tiles, built from nothing but the plan.

Actors are the load warp, the MMA warp, the tensor pipe (one after another, as one warp issues them), one compute warp
of each warpgroup (the two that share a quarter of TMEM's lanes) and the reduce warps. Every step of every program
becomes a node; program order, pipelines, guards and barriers become edges; loads, stores, copies and GEMMs access
cells. `checks.py` asks the graph whether two accesses that meet in a cell are ordered.

The tensor pipe is taken to execute the MMA warp's GEMMs in issue order. The ISA promises that only for GEMMs of the
same accumulator, shape and kind (PTX ISA, tcgen05 memory consistency); across accumulators it is how the baseline
kernel relies on the hardware, and an assumption here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from undertow.plan.schedule import mma_program, reads, synchronised_program
from undertow.plan.schema import Plan
from undertow.plan.steps import Copy, Guard, Issue, Join, Load, PassTurn, Signal, Step, Store, TakeTurn, Wait


@dataclass(frozen=True)
class Access:
    """One touch of a region's tile by a node: cells are TMEM columns, or bytes of shared memory."""

    space: str
    cells: range
    writes: bool
    region: str
    tile: int


def uncovered(cells: range, covers: Iterable[range]) -> list[range]:
    """What of `cells` none of `covers` has."""
    left = [cells]
    for cover in covers:
        pieces = [(range(c.start, min(c.stop, cover.start)), range(max(c.start, cover.stop), c.stop)) for c in left]
        left = [piece for pair in pieces for piece in pair if piece]
    return left


@dataclass
class Node:
    """One executed step."""

    who: str
    what: str
    accesses: list[Access] = field(default_factory=list)
    step: Step | None = None  # None for the two halves of a barrier
    tile: int = 0


class Order:
    """The happens-before graph of `tiles` tiles under a plan.

    Each actor's nodes stand in its program order; `before(a, b)` answers whether node a happens before node b.
    Building takes milliseconds; a cycle (a schedule that deadlocks) leaves `cyclic` true.
    """

    def __init__(self, plan: Plan, tiles: int):
        self.plan, self.tiles = plan, tiles
        self.nodes: list[Node] = []
        self.edges: dict[int, set[int]] = defaultdict(set)
        self._last: dict[str, int] = {}
        self._signals: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        self._waits: list[tuple[int, tuple[str, str, int]]] = []
        self.joins: dict[tuple[int, int, str], list[int]] = defaultdict(list)  # barrier -> arrive, leave, arrive, ...
        self.hand_overs: list[tuple[int, int, str]] = []  # node that signals, node that waits, `<pipeline>.<side>`
        self._build()
        self._reached = self._reach()

    def before(self, first: int, second: int) -> bool:
        """Whether node `first` happens before node `second` in every execution."""
        return bool(self._reached[first] >> second & 1)

    @property
    def cyclic(self) -> bool:
        return any(reached >> index & 1 for index, reached in enumerate(self._reached))

    @property
    def cycle(self) -> list[str]:
        """The shortest circle of steps that wait for each other, each once, if the order is cyclic."""
        circles = [
            path for index in range(len(self.nodes)) if self.before(index, index) for path in self._around(index)
        ]
        return [f"{self.nodes[index].who} {self.nodes[index].what}" for index in min(circles, key=len, default=[])]

    def unsignalled(self) -> list[tuple[str, str]]:
        """Waits of a phase that no step of the plan ever completes, each with what the waiting role does next."""
        found = []
        for index, key in self._waits:
            if key[2] >= 0 and not self._signals[key]:
                node = self.nodes[index]
                following = (n.what for n in self.nodes[index + 1 :] if n.who == node.who and n.what[:5] != "waits")
                found.append((f"{node.who} {node.what}", next(following, "ends")))
        return found

    def _around(self, start: int) -> list[list[int]]:
        """The shortest path from a node back to itself (breadth first), if there is one."""
        came_from, queue = {start: start}, [start]
        for index in queue:
            for follower in self.edges[index]:
                if follower == start:
                    path = [index]
                    while path[-1] != start:
                        path.append(came_from[path[-1]])
                    return [path[::-1]]
                if follower not in came_from:
                    came_from[follower] = index
                    queue.append(follower)
        return []

    # Building.

    def _build(self) -> None:
        for tile in range(self.tiles):
            for step in self.plan.program("load"):
                self._step("load", step, tile)
            for warpgroup in range(self.plan.role("compute").warpgroups):
                self._compute(warpgroup, tile)
            for step in self.plan.program("reduce"):
                self._step("reduce", step, tile)
        program = mma_program(self.plan)
        for tile in range(-1, self.tiles):
            part = program.prologue if tile < 0 else program.body if tile < self.tiles - 1 else program.tail
            for step in part:
                self._step("mma", step, tile)
        for warpgroup in range(self.plan.role("compute").warpgroups):
            for step in self.plan.program("epilogue"):
                self._step(f"compute[{warpgroup}]", step, self.tiles - 1, warpgroup)
        self._connect()

    def _compute(self, warpgroup: int, tile: int) -> None:
        who = f"compute[{warpgroup}]"
        for position, step in enumerate(synchronised_program(self.plan, "compute")):
            if isinstance(step, Guard):
                self._join(who, (tile, position, "guard"))
            elif isinstance(step, Join):
                if step.barrier:
                    self._join(who, (tile, position, "join"))
            else:
                self._step(who, step, tile, warpgroup)

    def _join(self, who: str, key: tuple[int, int, str]) -> None:
        """A compute-wide barrier: everything before it in any warp precedes everything after it in all."""
        arrive = self._add(who, f"arrives at barrier compute ({key[2]})")
        leave = self._add(who, "leaves barrier compute")
        self.joins[key] += [arrive, leave]

    def _add(
        self, who: str, what: str, accesses: Iterable[Access] = (), step: Step | None = None, tile: int = 0
    ) -> int:
        index = len(self.nodes)
        self.nodes.append(Node(who, what, list(accesses), step, tile))
        if who in self._last:
            self.edges[self._last[who]].add(index)
        self._last[who] = index
        return index

    def _step(self, who: str, step: Step, tile: int, warpgroup: int | None = None) -> None:
        if isinstance(step, Wait):
            what = f"waits {step.pipeline}.{step.side} of tile {tile + step.tile}"
            index = self._add(who, what, step=step, tile=tile + step.tile)
            self._waits.append((index, (step.pipeline, step.side, tile + step.tile)))
        elif isinstance(step, Signal):
            self._signal(who, step, tile + step.tile)
        elif isinstance(step, Copy):
            self._copy(who, step, tile)
        elif isinstance(step, Issue):
            self._issue(step, tile + step.tile)
        elif isinstance(step, TakeTurn | PassTurn):  # orders CTAs, and nothing within one
            self._add(who, f"{'takes' if isinstance(step, TakeTurn) else 'passes'} the turn of tile {tile}", step=step)
        elif isinstance(step, Load | Store):
            writes = isinstance(step, Store)
            verb = "stores" if writes else "loads"
            accesses = [a for stage in step.stages for a in self._touch(step.region, stage, tile, writes, warpgroup)]
            self._add(who, f"{verb} {step.region} of tile {tile}", accesses, step, tile)

    def _signal(self, who: str, step: Signal, tile: int) -> None:
        """Commits signal when the tensor pipe has done what was issued before; warps signal in program order."""
        index = self._add(who, f"signals {step.pipeline}.{step.side} of tile {tile}", step=step, tile=tile)
        if who == "mma":
            done = self._last.get("tensor pipe", index)
            self._signals[(step.pipeline, step.side, tile)].append(done)
        else:
            self._signals[(step.pipeline, step.side, tile)].append(index)

    def _copy(self, who: str, step: Copy, tile: int) -> None:
        pipeline = self.plan.pipeline(step.pipeline)
        regions = (step.region, *(pipeline.first_also if tile == 0 else ()))
        accesses = [a for name in regions for a in self._touch(name, 0, tile, True, None)]
        index = self._add(who, f"copies {', '.join(regions)} of tile {tile}", accesses, step, tile)
        self._signals[(step.pipeline, "full", tile)].append(index)

    def _issue(self, step: Issue, tile: int) -> None:
        op = self.plan.mma(step.mma)
        issued = self._add("mma", f"issues {op.name} of tile {tile}", step=step, tile=tile)
        accesses = [a for name in reads(op) for a in self._touch(name, None, tile, False, None)]
        if not op.into_zero and tile > 0:
            accesses += self._touch(op.d, None, tile - 1, False, None)  # the sum so far
        accesses += self._touch(op.d, None, tile, True, None)
        self.edges[issued].add(self._add("tensor pipe", f"{op.name} of tile {tile}", accesses, step, tile))

    def _touch(self, region: str, stage: int | None, tile: int, writes: bool, warpgroup: int | None) -> list[Access]:
        """Cells of a region's tile; a compute warp touches its own columns of a TMEM stage, others the whole tile."""
        if any(t.name == region for t in self.plan.tmem):
            return [Access("TMEM columns", self._columns(region, stage, warpgroup), writes, region, tile)]
        resident = any(region in p.first_also for p in self.plan.pipelines)
        part = self._bytes(region, stage, 0 if resident else tile, warpgroup if writes else None)
        return [Access("SMEM bytes", part, writes, region, 0 if resident else tile)]

    def _columns(self, region: str, stage: int | None, warpgroup: int | None) -> range:
        accumulator = any(p.once and region in p.carries for p in self.plan.pipelines)
        if warpgroup is None or stage is None or accumulator:
            tmem = self.plan.tmem_region(region)
            return range(tmem.column, tmem.end)
        return self.plan.columns_of(region, stage, warpgroup)

    def _bytes(self, region: str, stage: int | None, tile: int, warpgroup: int | None) -> range:
        """Bytes of the slot that a tile uses; of a tile that compute warps store, only the slice of one warpgroup.

        A buffer that no pipeline carries is staging of one role: its slot is the step's own stage.
        """
        smem = self.plan.smem_region(region)
        carried = any(region in p.carries for p in self.plan.pipelines)
        slot = (tile if carried else stage or 0) % smem.stages
        start = self.plan.smem_offsets[region] + slot * smem.stage_bytes
        if warpgroup is None:
            return range(start, start + smem.stage_bytes)
        warpgroups = self.plan.role("compute").warpgroups
        size = smem.stage_bytes // (2 * warpgroups)
        start += ((stage or 0) * warpgroups + warpgroup) * size
        return range(start, start + size)

    def _connect(self) -> None:
        for index, key in self._waits:
            for source in self._signals[key]:
                self.edges[source].add(index)
                self.hand_overs.append((source, index, f"{key[0]}.{key[1]}"))
        for pairs in self.joins.values():
            arrivals, departures = pairs[::2], pairs[1::2]
            for source in arrivals:
                self.edges[source].update(departures)

    def _reach(self) -> list[int]:
        """Transitive closure as one bit set per node."""
        reached = [0] * len(self.nodes)
        changed = True
        while changed:
            changed = False
            for index in range(len(self.nodes) - 1, -1, -1):
                bits = reached[index]
                for follower in self.edges[index]:
                    bits |= 1 << follower | reached[follower]
                if bits != reached[index]:
                    reached[index], changed = bits, True
        return reached
