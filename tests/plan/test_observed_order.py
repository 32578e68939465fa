"""What the compiled kernel does, warp by warp, is the plan's program: the pictures and the proof are about this kernel.

The main kernel runs on the emulator; what one warp waits for, issues, loads, stores, joins and signals, with phases and
columns, is compared with the steps that the plan derives for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from undertow import emulator
from undertow.backward_case import main_case
from undertow.emulator.events import AsyncIssued, BarrierOperation, MbarrierOperation, TmemAccess
from undertow.inputs import Shape
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.labels import PlanLabels
from undertow.plan.schedule import mma_program, synchronised_program
from undertow.plan.schema import Plan
from undertow.plan.steps import Guard, Issue, Join, Load, Signal, Step, Store, SynchronisedStep, Wait

TILES = 3
SHAPE = Shape(1, 128 * (TILES - 1) + 44, 100, 1)  # one CTA; the last query tile and the key tile are not full
K_PER_INSTRUCTION = 16

Done = tuple  # one thing that a warp did: what, on what, phase or columns


class Diary:
    """An observer: for each warp, in order, what it did that a plan speaks about."""

    subscriptions: ClassVar[tuple[type, ...]] = (AsyncIssued, BarrierOperation, MbarrierOperation, TmemAccess)

    def __init__(self, p: Plan):
        self.plan, self.labels = p, PlanLabels(p)
        self.entries: dict[int, list[Done]] = {warp: [] for warp in range(p.num_warps)}
        self.base = 0

    def start(self, program, launch) -> None:
        self.base = program.dynamic_base

    def finish(self) -> list:
        return []

    def observe(self, event) -> None:
        if isinstance(event, BarrierOperation):
            if event.op == "sync" and event.barrier == self.plan.barrier_ids["compute"]:
                self.entries[event.warp].append(("barrier", "compute"))
        elif isinstance(event, AsyncIssued):
            if event.operation.engine == "tensor":
                self.entries[event.operation.warp].append(self._issued(event.operation.details))
        elif isinstance(event, TmemAccess):
            if event.operation is None:
                columns = (event.column, event.column + event.num_columns)
                self.entries[event.warp].append((event.kind, *columns))
        elif event.operation is None and (event.op == "arrive" or (event.op == "wait" and event.completed)):
            what = (event.op, self.labels.smem(event.address - self.base))
            for warp in event.lanes.warps:
                self.entries[warp].append((*what, event.phase) if event.op == "wait" else what)

    def _issued(self, details: dict) -> Done:
        if "mbarrier" in details:
            return ("commit", self.labels.smem(details["mbarrier"] - self.base))
        shape = details["shape"]
        ops = [op for op in self.plan.mmas if self.plan.tmem_region(op.d).column == details["accumulator"] & 0xFFFF]
        return ("gemm", next(op.name for op in ops if (op.m, op.n) == (shape.m, shape.n)))


def word(p: Plan, step: Wait | Signal, tile: int) -> tuple[str, int]:
    """mbarrier and phase that a step of a tile's trip means."""
    pipeline = p.pipeline(step.pipeline)
    number = 0 if pipeline.once else tile + step.tile
    return f"{step.pipeline}.{step.side}[{number % pipeline.stages}]", number // pipeline.stages


def mma_diary(p: Plan) -> Iterator[Done]:
    """What the MMA warp must do."""
    program = mma_program(p)
    for trip in range(-1, TILES):
        steps: tuple[Step, ...] = program.prologue if trip < 0 else program.body
        for step in program.tail if trip == TILES - 1 else steps:
            if isinstance(step, Wait):
                yield ("wait", *word(p, step, trip))
            elif isinstance(step, Signal):
                yield ("commit", word(p, step, trip)[0])
            elif isinstance(step, Issue):
                op = p.mma(step.mma)
                yield from [("gemm", op.name)] * (op.k // K_PER_INSTRUCTION)


def compute_diary(p: Plan, warpgroup: int) -> Iterator[Done]:
    """What a compute warp must do, its epilogue included."""
    for tile in range(TILES):
        for step in synchronised_program(p, "compute"):
            yield from compute_step(p, step, tile, warpgroup)
    for step in p.program("epilogue"):
        if isinstance(step, Load):
            yield columns_of(p, step, 0, warpgroup, "read")
        else:
            yield from compute_step(p, step, 0, warpgroup)


def compute_step(p: Plan, step: SynchronisedStep, tile: int, warpgroup: int) -> Iterator[Done]:
    if isinstance(step, Wait):
        yield ("wait", *word(p, step, tile))
    elif isinstance(step, Signal):
        yield ("arrive", word(p, step, tile)[0])
    elif isinstance(step, Guard) or (isinstance(step, Join) and step.barrier):
        yield ("barrier", "compute")
    elif isinstance(step, Load | Store) and any(region.name == step.region for region in p.tmem):
        for stage in step.stages:
            yield columns_of(p, step, stage, warpgroup, "read" if isinstance(step, Load) else "write")


def columns_of(p: Plan, step: Load | Store, stage: int, warpgroup: int, kind: str) -> Done:
    columns = p.columns_of(step.region, stage, warpgroup)
    return (kind, columns.start, columns.stop)


@pytest.fixture(scope="module", params=SCHEDULES)
def executed(request) -> tuple[Plan, Diary]:
    p = plan(request.param)
    case = main_case(p, SHAPE)
    diary = Diary(p)
    emulator.launch(case.ptx, case.launch, emulator.Options(backend="numpy", completion="late"), [diary])
    return p, diary


def test_the_mma_warp_runs_the_derived_program(executed: tuple[Plan, Diary]) -> None:
    p, diary = executed
    assert diary.entries[p.role("mma").warps.start] == list(mma_diary(p))


@pytest.mark.parametrize("warp", range(4, 12))
def test_every_compute_warp_runs_the_plans_program_with_its_guards_and_joins(
    executed: tuple[Plan, Diary], warp: int
) -> None:
    p, diary = executed
    assert diary.entries[warp] == list(compute_diary(p, (warp - 4) // 4))


def test_idle_warps_do_nothing(executed: tuple[Plan, Diary]) -> None:
    p, diary = executed
    assert not any(diary.entries[warp] for warp in p.role("idle").warps)
