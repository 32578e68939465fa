"""A second opinion on a plan's order: run it on a toy machine whose TMEM columns remember who wrote them.

Written without `undertow.plan.order`: no graph, only actors that step, counters of completed phases, and one token
(region, tile) per column. An adversary holds one actor back in front of one access for as long as anybody else can
move. If two accesses to a column are not ordered, holding back each of them in turn shows both orders, and in one of
them somebody reads a token that is not the one it came for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from undertow.plan.schedule import mma_program, synchronised_program
from undertow.plan.schema import TMEM_COLUMNS, Plan
from undertow.plan.steps import Copy, Guard, Issue, Join, Load, Signal, Step, Store, Wait

WARPGROUPS = (0, 1)  # the two compute warps that share a quarter of the lanes


class WrongRead(Exception):
    """Somebody read a column that holds another tile's, or another region's, value."""


class Stuck(Exception):
    """Nobody can move, and not everybody is done."""


@dataclass
class Action:
    """One step of an actor: `ready` says whether it can be taken, `do` takes it."""

    do: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    touches_tmem: bool = False


@dataclass
class Machine:
    """A plan's actors over `tiles` tiles."""

    plan: Plan
    tiles: int
    columns: list[tuple[str, int] | None] = field(default_factory=lambda: [None] * TMEM_COLUMNS)
    arrivals: Counter = field(default_factory=Counter)
    pipe: deque[Action] = field(default_factory=deque)  # the tensor pipe: GEMMs and commits in issue order

    def __post_init__(self) -> None:
        self.actors: dict[str, deque[Action]] = {
            "load": self._queue(self._actions("load", None)),
            "mma": self._queue(self._mma()),
            "tensor pipe": self.pipe,
            "reduce": self._queue(self._actions("reduce", None)),
            **{f"compute[{w}]": self._queue(self._compute(w)) for w in WARPGROUPS},
        }

    def run(self, held: str, accesses: int) -> int:
        """Run to the end; actor `held` pauses before its `accesses`-th TMEM access until nobody else can move.

        Returns how many TMEM accesses `held` made. Raises WrongRead or Stuck.
        """
        made, released = 0, False
        while any(self.actors.values()):
            moved = False
            for name, queue in self.actors.items():
                while queue and queue[0].ready():
                    if name == held and queue[0].touches_tmem:
                        if made == accesses and not released:
                            break
                        made += 1
                    queue.popleft().do()
                    moved = True
            if not moved:
                if released or made != accesses:
                    raise Stuck(", ".join(name for name, queue in self.actors.items() if queue))
                released = True
        return made

    # What the steps do.

    def _queue(self, actions: Iterator[Action]) -> deque[Action]:
        return deque(actions)

    def _actions(self, role: str, warpgroup: int | None) -> Iterator[Action]:
        for tile in range(self.tiles):
            for step in self.plan.program(role):
                yield self._action(step, tile, warpgroup)

    def _compute(self, warpgroup: int) -> Iterator[Action]:
        for tile in range(self.tiles):
            for place, step in enumerate(synchronised_program(self.plan, "compute")):
                if isinstance(step, Guard) or (isinstance(step, Join) and step.barrier):
                    yield from self._barrier(("barrier", tile, place))
                elif not isinstance(step, Join):
                    yield self._action(step, tile, warpgroup)
        for step in self.plan.program("epilogue"):
            yield self._action(step, self.tiles - 1, None)

    def _barrier(self, key: tuple) -> Iterator[Action]:
        yield Action(lambda: self.arrivals.update([key]))
        yield Action(lambda: None, lambda: self.arrivals[key] == len(WARPGROUPS))

    def _mma(self) -> Iterator[Action]:
        program = mma_program(self.plan)
        for trip in range(-1, self.tiles):
            part = program.prologue if trip < 0 else program.body if trip < self.tiles - 1 else program.tail
            for step in part:
                if isinstance(step, Wait):
                    yield self._action(step, trip, None)
                elif isinstance(step, Signal):
                    commit = self._action(step, trip, None)
                    yield Action(lambda commit=commit: self.pipe.append(commit))
                elif isinstance(step, Issue):
                    gemm = self._gemm(step.mma, trip + step.tile)
                    yield Action(lambda gemm=gemm: self.pipe.append(gemm))

    def _action(self, step: Step, tile: int, warpgroup: int | None) -> Action:
        if isinstance(step, Wait):
            key = (step.pipeline, step.side, tile + step.tile)
            return Action(lambda: None, lambda: key[2] < 0 or self.arrivals[key] >= self._expected(*key[:2]))
        if isinstance(step, Signal | Copy):
            side = step.side if isinstance(step, Signal) else "full"
            at = tile + step.tile if isinstance(step, Signal) else tile
            return Action(lambda: self.arrivals.update([(step.pipeline, side, at)]))
        if isinstance(step, Load | Store) and any(r.name == step.region for r in self.plan.tmem):
            where = [column for stage in step.stages for column in self._owned(step.region, stage, warpgroup)]
            if isinstance(step, Store):
                return Action(lambda: self._write(where, (step.region, tile)), touches_tmem=True)
            return Action(lambda: self._read(where, (step.region, tile)), touches_tmem=True)
        return Action(lambda: None)  # shared memory is not part of this model

    def _expected(self, pipeline: str, side: str) -> int:
        found = self.plan.pipeline(pipeline)
        return len(WARPGROUPS) if (found.producer if side == "full" else found.consumer) == "compute" else 1

    def _owned(self, name: str, stage: int, warpgroup: int | None) -> list[int]:
        """Columns under the 32 query rows that a compute warp owns in a stage; other readers take the whole region."""
        region = self.plan.tmem_region(name)
        if warpgroup is None:
            return list(range(region.column, region.column + region.columns))
        elements = range(64 * stage + 32 * warpgroup, 64 * stage + 32 * warpgroup + 32)
        return sorted({region.column + element * region.dtype.bytes // 4 for element in elements})

    def _gemm(self, name: str, tile: int) -> Action:
        op = self.plan.mma(name)
        tmem = {region.name for region in self.plan.tmem}

        def do() -> None:
            for operand in {op.a, op.b} & tmem:
                self._read(self._owned(operand, 0, None), (operand, tile))
            if not op.into_zero and tile > 0:
                self._read(self._owned(op.d, 0, None), (op.d, tile - 1))
            self._write(self._owned(op.d, 0, None), (op.d, tile))

        return Action(do, touches_tmem=True)

    def _read(self, where: list[int], wanted: tuple[str, int]) -> None:
        for column in where:
            if self.columns[column] != wanted:
                raise WrongRead(f"column {column} holds {self.columns[column]}, not {wanted}")

    def _write(self, where: list[int], token: tuple[str, int]) -> None:
        for column in where:
            self.columns[column] = token


def works_in_every_order(plan: Plan, tiles: int = 3) -> bool:
    """Whether no adversary makes anybody read a wrong column or wait for ever."""
    try:
        for held in Machine(plan, tiles).actors:
            accesses = 0
            while Machine(plan, tiles).run(held, accesses) > accesses:
                accesses += 1
    except (WrongRead, Stuck):
        return False
    return True
