"""Derive what follows from a plan's order and regions: the MMA warp's program, and the guards and joins of the others.

One trip of the loop handles tile t and starts tile t + 1. The same trip, run for t = -1 with only the `tile=1` issues,
is the prologue; run for the last t with only the `tile=0` issues, it is the tail. So an order is one line of data, and
what it must wait for follows from who reads and writes which columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from undertow.plan.schema import MmaOp, Pipeline, Plan, SignalScope
from undertow.plan.steps import Guard, Issue, Join, Load, Signal, Step, Store, SynchronisedStep, Wait


@dataclass(frozen=True)
class MmaProgram:
    """What the MMA warp does before, in and after its loop. Tile offsets count from the trip's t in all three."""

    prologue: tuple[Step, ...]  # the trip of t = -1
    body: tuple[Step, ...]  # trips of t = 0 .. tiles - 2
    tail: tuple[Step, ...]  # the trip of t = tiles - 1


def mma_program(plan: Plan) -> MmaProgram:
    """The MMA warp's program under `plan`."""
    trip = _without_repeated_waits([step for issue in plan.order for step in _around(plan, issue)])
    prologue = tuple(_keep_tiles(trip, kept=1, first_tile=1))
    tail = tuple(_tail(plan, trip))
    return MmaProgram(prologue, tuple(trip), tail)


def reads(op: MmaOp) -> tuple[str, str]:
    """The regions that a GEMM reads as operands."""
    return (op.a, op.b)


def position(plan: Plan, name: str) -> int:
    """Place of an MMA in the issue order."""
    return next(index for index, issue in enumerate(plan.order) if issue.mma == name)


def issue_of(plan: Plan, name: str) -> Issue:
    return plan.order[position(plan, name)]


def _around(plan: Plan, issue: Issue) -> list[Step]:
    """Everything one issue brings: waits for operands, waits for the columns it overwrites, the issue, its commits."""
    op = plan.mma(issue.mma)
    steps: list[Step] = [
        Wait(p.name, side, issue.tile) for region in reads(op) for p, side in _handed_over(plan, region)
    ]
    steps += _overwrite_waits(plan, issue)
    steps.append(issue)
    steps += [Signal(p.name, "full", issue.tile) for p in _produced(plan, op.d) if not p.once]
    steps += [Signal(p.name, "empty", issue.tile) for p in _consumed_last_by(plan, issue)]
    return steps


def _handed_over(plan: Plan, region: str) -> list[tuple[Pipeline, str]]:
    """Where the MMA warp learns that `region` holds a new tile: a full side, or an empty side that returns it."""
    found = []
    for pipeline in plan.pipelines:
        if pipeline.consumer == "mma" and region in pipeline.carries:
            found.append((pipeline, "full"))
        if pipeline.producer == "mma" and region in pipeline.returns:
            found.append((pipeline, "empty"))
    return found


def _produced(plan: Plan, region: str) -> list[Pipeline]:
    return [p for p in plan.pipelines if p.producer == "mma" and region in p.carries]


def _overwrite_waits(plan: Plan, issue: Issue) -> list[Step]:
    """Waits that make `issue`'s output columns free: its own consumers, and consumers of results it lies over."""
    op, waits = plan.mma(issue.mma), []
    for pipeline in plan.pipelines:
        if pipeline.producer != "mma" or pipeline.once:
            continue
        for region in pipeline.carries:
            if not plan.tmem_region(region).overlap(plan.tmem_region(op.d)):
                continue
            tile = issue.tile - 1 if region == op.d else _last_written(plan, region, issue)
            side = (pipeline.name, "empty") if pipeline.released_by is None else (pipeline.released_by, "full")
            waits.append(Wait(*side, tile))
    return waits


def _last_written(plan: Plan, region: str, before: Issue) -> int:
    """Tile offset of the last GEMM into `region` that is issued before `before`, in the endless order of trips."""
    writer = next(issue for issue in plan.order if plan.mma(issue.mma).d == region)
    earlier = position(plan, writer.mma) < position(plan, before.mma)
    return writer.tile if earlier else writer.tile - 1


def _consumed_last_by(plan: Plan, issue: Issue) -> list[Pipeline]:
    """Pipelines whose resource `issue` is the last GEMM to read in a tile, so that its commit hands the slot back."""
    done = []
    for pipeline in plan.pipelines:
        if pipeline.consumer != "mma" or not pipeline.has_empty:
            continue
        readers = [i for i in plan.order if set(reads(plan.mma(i.mma))) & set(pipeline.carries)]
        if readers and max(readers, key=lambda i: (-i.tile, position(plan, i.mma))) == issue:
            done.append(pipeline)
    return done


def _without_repeated_waits(trip: list[Step]) -> list[Step]:
    """Drop waits for a phase that the warp has waited for before, in this trip or (a tile later) in the one before.

    An earlier wait that belongs to the next tile's issue does not count for this tile's: the last trip has no next one.
    """
    waits = [step for step in trip if isinstance(step, Wait)]
    kept: list[Step] = []
    seen: list[tuple[Wait, int]] = []
    for index, step in enumerate(trip):
        if isinstance(step, Wait):
            owner = _owner(trip, index).tile
            earlier_trip = replace(step, tile=step.tile + 1) in waits
            if earlier_trip or any(wait == step and tile <= owner for wait, tile in seen):
                continue
            seen.append((step, owner))
        kept.append(step)
    return kept


def _keep_tiles(trip: list[Step], kept: int, first_tile: int) -> list[Step]:
    """The part of a trip that belongs to issues of tile offset `kept`, less waits for tiles before `first_tile`."""
    out: list[Step] = []
    for index, step in enumerate(trip):
        owner = step if isinstance(step, Issue) else _owner(trip, index)
        if owner.tile != kept or (isinstance(step, Wait) and step.tile < first_tile):
            continue
        out.append(step)
    return out


def _owner(trip: list[Step], index: int) -> Issue:
    """The issue that a wait precedes or a signal follows."""
    after = trip[index:] if isinstance(trip[index], Wait) else trip[index::-1]
    return next(step for step in after if isinstance(step, Issue))


def _tail(plan: Plan, trip: list[Step]) -> list[Step]:
    """The last trip: no next tile, no slot to hand back, and the finished accumulators go to the epilogue."""
    last = [
        s for s in _keep_tiles(trip, kept=0, first_tile=-len(trip)) if not (isinstance(s, Signal) and s.side == "empty")
    ]
    out: list[Step] = [
        Signal(p.name, "full") for op in plan.mmas for p in _once(plan, op) if issue_of(plan, op.name).tile
    ]
    for step in last:
        out.append(step)
        if isinstance(step, Issue):
            out += [Signal(p.name, "full") for p in _once(plan, plan.mma(step.mma))]
    return out


def _once(plan: Plan, op: MmaOp) -> list[Pipeline]:
    return [p for p in _produced(plan, op.d) if p.once]


def synchronised_program(plan: Plan, role: str) -> tuple[SynchronisedStep, ...]:
    """A role's program of one tile, with the alias guards and the joins before its signals.

    A guard stands right behind the last TMEM load before its store: the earliest legal place, so that warps wait for
    each other's loads and not for each other's arithmetic. Signals that follow one another share one join.
    """
    program: list[SynchronisedStep] = list(plan.program(role))
    tmem = {region.name for region in plan.tmem}
    for store in plan.guarded_stores if role == "compute" else ():
        before = range(program.index(store))
        loads = [i for i in before if isinstance(step := program[i], Load) and step.region in tmem]
        program.insert(loads[-1] + 1 if loads else before.stop, Guard(store.region))
    out: list[SynchronisedStep] = []
    stored: set[str] = set()
    for index, step in enumerate(program):
        if isinstance(step, Store):
            stored.add(step.region)
        elif isinstance(step, Signal) and not isinstance(program[index - 1], Signal):
            out.append(_join(plan, program[index:], stored))
            stored = set()
        out.append(step)
    return tuple(out)


def _join(plan: Plan, following: list[SynchronisedStep], stored: set[str]) -> Join:
    signals = []
    for step in following:
        if not isinstance(step, Signal):
            break
        signals.append(step)
    wide = plan.signal_scope is SignalScope.BARRIER and any(signal in plan.signals for signal in signals)
    tmem = {region.name for region in plan.tmem}
    read_by_mma = {name for op in plan.mmas for name in reads(op)} - tmem
    return Join("compute" if wide else None, tmem=bool(stored & tmem), smem=bool(stored & read_by_mma))
