"""The order that a plan promises where warpgroups issue their own GEMMs and meet at named barriers.

The graph is that of `order.Order`; actors are the load warp, the compute warpgroups, each with its tensor cores, and
the reduce warps. A warpgroup is one actor: its four warps arrive together at everything that it tells others. GEMMs
read shared memory from their issue on until a wait for their group; nothing is assumed of the order among them.

A CTA may work on several key/value tiles, one after another, of the same number of query tiles each. Pipelines that
count key/value tiles are used in the first query tile of each; those of a schedule warp are taken as done.

A named barrier counts arrivals in rounds. Who arrives a second time before a round is full completes it in somebody
else's name, so that rounds have to be kept apart by other edges; `rounds` says where they are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from undertow.plan.order import Access, Node, Order, uncovered
from undertow.plan.schema import WARP_THREADS, WARPGROUP_WARPS, Plan
from undertow.plan.steps import Arrive, Copy, Finish, Group, IfFirst, IfLast, Put, Signal, Step, Sync, Take, Touch, Wait

FIRST, NEXT, LAST, EPILOGUE = "first", "next", "last", "epilogue"  # parts of an actor's program


def actors(plan: Plan) -> list[str]:
    """The actors whose whole programs the plan holds, as `<role>[<warpgroup>]`; none in a plan of other kernels."""
    return list(dict.fromkeys(name.partition(".")[0] for name, _ in plan.programs if "." in name))


def threads_of(plan: Plan, actor: str) -> int:
    """How many threads an actor brings to a barrier: a warpgroup, or one warp of a role that has one for each."""
    role = plan.role(actor.partition("[")[0])
    warpgroup = WARPGROUP_WARPS * WARP_THREADS
    return warpgroup if role.threads >= 2 * warpgroup else WARP_THREADS


class WarpgroupOrder(Order):
    """The happens-before graph of `tiles` tiles under a plan that says all that its warpgroups do.

    per_item: query tiles of each key/value tile; all of them if None.
    """

    def __init__(self, plan: Plan, tiles: int, per_item: int | None = None):
        self._per_item = per_item or tiles
        self._groups: dict[str, list[int]] = defaultdict(list)
        self.meetings: dict[str, dict[str, list[tuple[int, int | None]]]] = defaultdict(lambda: defaultdict(list))
        super().__init__(plan, tiles)

    def rounds(self) -> Iterator[str]:
        """What is wrong with the rounds of named barriers, in words."""
        for barrier, parties in self.meetings.items():
            brought = {who: threads_of(self.plan, who) for who in parties}
            counted = self.plan.barrier_threads(barrier)
            if sum(brought.values()) != counted:
                told = " + ".join(f"{who} {threads}" for who, threads in brought.items())
                yield f"barrier {barrier}: {told} = {sum(brought.values())} threads arrive, but it counts {counted}"
                continue
            times = {who: len(visits) for who, visits in parties.items()}
            if len(set(times.values())) > 1:
                told = ", ".join(f"{who} {count} times" for who, count in times.items())
                yield f"barrier {barrier} has no whole number of rounds in {self.tiles} tiles: {told}"
                continue
            yield from self._kept_apart(barrier, parties)

    def uncounted(self) -> Iterator[str]:
        """Waits for a phase that gets other arrivals than its mbarrier counts, in words."""
        for index, (name, side, tile) in self._waits:
            pipeline = self.plan.pipeline(name)
            warps = [self._warps(self.nodes[signal].who) for signal in self._signals[name, side, tile]]
            counted = self.plan.arrivals(pipeline, side)
            if tile >= 0 and side == "empty" and sum(warps) != counted:
                arrive = f"{' + '.join(map(str, warps)) or 0} warps arrive, but it counts {counted}"
                yield f"{self.nodes[index].who} {self.nodes[index].what}, at which {arrive}"

    def _warps(self, who: str) -> int:
        return threads_of(self.plan, who) // WARP_THREADS

    def unwritten(self) -> Iterator[str]:
        """Reads of bytes that nobody has written for them before, in words."""
        touches = [(index, access) for index, node in enumerate(self.nodes) for access in node.accesses]
        written = defaultdict(list)
        for index, access in touches:
            if access.writes:
                written[access.region, access.tile].append((index, access.cells))
        for index, access in touches:
            own = written[access.region, access.tile]
            missing = uncovered(access.cells, (cells for other, cells in own if self.before(other, index)))
            if missing and not access.writes:
                where = f"{access.space} [{missing[0].start}, {missing[-1].stop})"
                who = self.nodes[index].who
                yield f"{who} reads {access.region} of tile {access.tile}, of which nobody wrote {where}"

    def _kept_apart(self, barrier: str, parties: dict[str, list[tuple[int, int | None]]]) -> Iterator[str]:
        for who, visits in parties.items():
            for number, (arrival, _) in enumerate(visits[1:]):
                for other, others in parties.items():
                    if other != who and not self.before(others[number][0], arrival):
                        yield (
                            f"{who} may arrive at barrier {barrier} for round {number + 1}"
                            f" while {other} has not arrived for round {number}"
                        )
                        return

    # Building.

    def _build(self) -> None:
        for tile in range(self.tiles):
            for step in self.plan.program("load"):
                self._step("load", step, tile)
        programs = dict(self.plan.programs)
        for who in actors(self.plan):
            parts = {name.partition(".")[2]: programs[name] for name in programs if name.startswith(f"{who}.")}
            begin = 1 if LAST in parts else 0  # the first trip of a warpgroup is that of tile 0
            trips = [(FIRST, 0), *((NEXT, tile) for tile in range(begin, self.tiles))]
            for part, tile in (*trips, (LAST, self.tiles), (EPILOGUE, self.tiles)):
                for step in parts.get(part, ()):
                    self._step(who, step, tile)
        self._connect()

    def _step(self, who: str, step: Step, tile: int, warpgroup: int | None = None) -> None:
        if isinstance(step, IfFirst | IfLast):
            at = tile if isinstance(step, IfFirst) else tile + step.tile + 1
            if at > 0 and at % self._per_item == 0:
                for inner in step.steps:
                    self._step(who, inner, tile)
        elif isinstance(step, Wait | Signal | Copy) and self.plan.pipeline(step.pipeline).per_item:
            self._of_item(who, step, tile)
        elif isinstance(step, Sync):
            arrival = self._add(who, f"arrives at barrier {step.barrier}", step=step, tile=tile)
            departure = self._add(who, f"leaves barrier {step.barrier}")
            self.meetings[step.barrier][who].append((arrival, departure))
        elif isinstance(step, Arrive):
            arrival = self._add(who, f"arrives at barrier {step.barrier}", step=step, tile=tile)
            self.meetings[step.barrier][who].append((arrival, None))
        elif isinstance(step, Group):
            issued = self._add(who, f"issues {step.what}", step=step, tile=tile)
            accesses = [a for touch in step.reads for a in self._parts(touch, tile, False)]
            self.nodes.append(Node(f"{step.what} of {who}", "reads its operands", accesses, step, tile))
            self.edges[issued].add(len(self.nodes) - 1)
            self._groups[who].append(len(self.nodes) - 1)
        elif isinstance(step, Finish):
            index = self._add(who, f"waits for all groups but {step.pending}", step=step, tile=tile)
            groups = self._groups[who]
            for complete in groups[: len(groups) - step.pending]:
                self.edges[complete].add(index)
        elif isinstance(step, Put | Take):
            writes = isinstance(step, Put)
            value = step.touch.value or step.touch.region
            accesses = self._parts(step.touch, tile, writes)
            what = f"{'stores' if writes else 'reads'} {value} of tile {tile + step.touch.tile}"
            self._add(who, what, accesses, step, tile)
        else:
            super()._step(who, step, tile, warpgroup)

    def _of_item(self, who: str, step: Wait | Signal | Copy, tile: int) -> None:
        """A step of a pipeline that counts key/value tiles; a signal says of which query tile, a wait of which item."""
        if self.plan.pipeline(step.pipeline).producer == "schedule" or (who == "load" and tile % self._per_item):
            return
        if isinstance(step, Signal):
            super()._step(who, replace(step, tile=0), (tile + step.tile) // self._per_item)
        else:
            super()._step(who, step, tile // self._per_item)

    def _parts(self, touch: Touch, trip: int, writes: bool) -> list[Access]:
        """The bytes of a touch, as one access for each part."""
        smem = self.plan.smem_region(touch.region)
        resident = any(touch.region in pipeline.first_also for pipeline in self.plan.pipelines)
        tile = 0 if resident else trip + touch.tile
        if any(touch.region in pipeline.carries and pipeline.per_item for pipeline in self.plan.pipelines):
            tile = max(tile, 0) // self._per_item
        slot = tile % smem.stages if touch.stage is None else touch.stage
        start = self.plan.smem_offsets[touch.region] + slot * smem.stage_bytes
        parts = touch.parts or (range(smem.stage_bytes),)
        value = touch.value or touch.region
        return [Access("SMEM bytes", range(start + p.start, start + p.stop), writes, value, tile) for p in parts]

    def _connect(self) -> None:
        super()._connect()
        for parties in self.meetings.values():
            for visits in zip(*parties.values()):
                arrivals = [arrival for arrival, _ in visits]
                for departure in (leave for _, leave in visits if leave is not None):
                    for arrival in arrivals:
                        self.edges[arrival].add(departure)
