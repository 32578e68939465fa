"""The proof of the SM90 plan: it holds, what is taken away is refused by name, and the kernel is what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

import pytest

from undertow import emulator
from undertow.backward_case import main_case
from undertow.emulator.events import BarrierOperation, MbarrierOperation, WarpgroupStep
from undertow.inputs import Shape
from undertow.kernels.sm90 import launch
from undertow.kernels.sm90.plan import plan
from undertow.plan.attention import Attention
from undertow.plan.checks import check
from undertow.plan.labels import PlanLabels
from undertow.plan.schema import DType, Plan, PlanError
from undertow.plan.steps import Arrive, Copy, Finish, Group, IfFirst, IfLast, Put, Signal, Step, Sync, Take, Touch, Wait

TILES = 3
SHAPE = Shape(1, 128 * (TILES - 1) + 44, 300, 1)  # three key/value tiles
ITEMS = 3
# GEMM: columns and instructions of its group; that of the row terms included, where there is one
GROUPS = {"S": (128, 5), "dP": (128, 5), "dV": (64, 8), "dK": (64, 8), "dQ": (64, 8)}
Done = tuple  # one thing that a warp did


def changed(p: Plan, name: str, change: Callable[[Step], Step | None]) -> Plan:
    """The plan with the steps of the programs that begin with `name` changed, or without those that become None."""
    programs = [
        (n, tuple(new for step in steps if (new := change(step)) is not None) if n.startswith(name) else steps)
        for n, steps in p.programs
    ]
    assert tuple(programs) != p.programs, "nothing was changed"
    return replace(p, programs=tuple(programs))


def without(p: Plan, name: str, *gone: Step) -> Plan:
    return changed(p, name, lambda step: None if step in gone else step)


def refused(broken: Plan, *parts: str) -> None:
    with pytest.raises(PlanError) as caught:
        check(broken)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
@pytest.mark.parametrize("flags", [{}, {"softcap": True}, {"split": True}], ids=str)
def test_the_plan_is_proved(dtype, flags):
    check(plan(dtype, Attention(**flags)))


def test_reading_lse_that_nobody_copies_is_refused():
    broken = without(plan(attention=Attention(softcap=True)), "load", Copy("sLSE", "load_compute_q"))
    refused(broken, "compute[0] reads sLSE of tile 0, of which nobody wrote SMEM bytes [")


def test_without_turns_a_warpgroup_stores_over_what_the_other_reads():
    turns = [kind(f"turn{owner}") for kind in (Sync, Arrive) for owner in range(2)]
    refused(without(plan(), "compute", *turns), "sdS of tile", "meet in SMEM bytes [", "with no ordering edge")


@pytest.mark.parametrize("owner", [0, 1])
def test_a_turn_that_one_does_not_wait_for_mixes_rounds(owner):
    who, other = f"compute[{owner}]", f"compute[{1 - owner}]"
    refused(without(plan(), f"{who}.next", Sync(f"turn{owner}")), who, f"while {other} has not arrived for round")


def test_a_turn_that_is_not_passed_is_counted():
    times = "barrier turn1 has no whole number of rounds in 5 tiles: compute[0] 1 times, compute[1] 5 times"
    refused(without(plan(), "compute[0].next", Arrive("turn1")), times)


@pytest.mark.parametrize("owner", [0, 1])
def test_staging_that_nobody_hands_back_is_refused(owner):
    """With nobody at dq_empty a share of dQ is stored while the one before is being read."""
    empty = f"dq_empty{owner}"
    broken = without(without(plan(), "compute", Sync(empty)), "reduce", Arrive(empty))
    who = f"compute[{owner}] may arrive at barrier dq_full{owner}"
    refused(broken, who, f"while reduce[{owner}] has not arrived for round")


def test_staging_that_nobody_announces_is_refused():
    full = "dq_full1"
    broken = without(without(plan(), "compute[1]", Arrive(full)), "reduce[1]", Sync(full))
    refused(
        broken, "reduce[1] may arrive at barrier dq_empty1 for round 1 while compute[1] has not arrived for round 0"
    )


def test_a_slot_that_half_of_the_warps_hand_back_never_gets_free():
    broken = without(plan(), "compute[1].next", Signal("load_compute_do", "empty", -1))
    refused(broken, "load waits load_compute_do.empty of tile 0, at which 4 warps arrive, but it counts 8")


def test_q_handed_back_while_dk_reads_it_is_refused():
    """The wait in front of the signal is the third of a burst that leaves one group."""
    seen = []

    def change(step: Step) -> Step | None:
        seen.append(step)
        return None if step == Finish(1) and seen.count(step) == 3 else step

    refused(
        changed(plan(), "compute[0].next", change), "dK of compute[0] reads sQ of tile 0", "load writes sQ of tile 2"
    )


def test_the_wait_for_dv_is_not_needed_as_long_as_q_is_waited_for_first():
    """What `mutate` finds to be redundant, the proof does, too; not so if the load warp takes dO first.

    Of warpgroup 0 it is not needed in any case: warpgroup 1 hands dO back behind its turn, that is behind this dV.
    """
    seen = []

    def change(step: Step) -> Step | None:
        seen.append(step)
        return None if step == Finish(1) and seen.count(step) == 2 else step

    spare = changed(plan(), "compute[1].next", change)
    check(spare)
    program = plan().program("load")
    turned = tuple(
        (n, (*program[:4], *program[7:9], *program[4:7], *program[9:]) if n == "load" else steps)
        for n, steps in spare.programs
    )
    refused(replace(spare, programs=turned), "dV of compute[1] reads sdO of tile 0", "load writes sdO of tile 2")


@pytest.mark.parametrize("side", ["full", "empty"])
def test_a_wait_of_the_load_or_the_compute_warps_is_needed(side):
    role, wait = {
        "full": ("compute[0].next", Wait("load_compute_do", "full")),
        "empty": ("load", Wait("load_compute_q", "empty", -2)),
    }[side]
    refused(without(plan(), role, wait), "of tile 2", "SMEM bytes [")


def test_dq_that_is_not_late_reads_what_the_other_warpgroup_has_not_stored():
    def change(step: Step) -> Step:
        if isinstance(step, Group) and step.what == "dQ":
            reads = tuple(replace(t, tile=-1) if t.tile == -2 else t for t in step.reads)
            return replace(step, reads=reads)
        return step

    refused(changed(plan(), "compute[0].next", change), "dQ of compute[0] reads sdS of tile", "over it in SMEM bytes [")


def test_one_stage_of_ds_is_not_enough():
    smem = tuple(replace(region, stages=1) if region.name == "sdS" else region for region in plan().smem)
    refused(replace(plan(), smem=smem), "sdS of tile")


def test_the_zeros_of_no_tile_are_read():
    zeros = Put(Touch("sdS", -1, parts=(range(16384),)))
    refused(without(plan(), "compute[0].first", zeros), "reads sdS of tile -1, of which nobody wrote SMEM bytes [")


def test_dv_and_dk_pass_through_the_stage_that_the_last_tile_does_not_use():
    def change(step: Step) -> Step:
        if isinstance(step, Put | Take) and step.touch.value:
            return replace(step, touch=replace(step.touch, tile=-1))
        return step

    refused(changed(plan(), "compute[1].epilogue", change), "dV and dK of tile", "reads sdS of tile")


def test_barriers_count_the_threads_that_arrive():
    barriers = tuple(replace(b, threads=288) if b.name == "turn0" else b for b in plan().barriers)
    counted = "barrier turn0: compute[0] 128 + compute[1] 128 = 256 threads arrive, but it counts 288"
    refused(replace(plan(), barriers=barriers), counted)


def of_items(p: Plan, name: str, *gone: Step) -> Plan:
    """The plan without steps that only the first or the last query tiles of a key/value tile have."""

    def change(step: Step) -> Step:
        if isinstance(step, IfFirst | IfLast):
            return replace(step, steps=tuple(inner for inner in step.steps if inner not in gone))
        return step

    return changed(p, name, change)


@pytest.mark.parametrize("region, stages", [("sK", 1), ("sdO", 1)])
def test_fewer_stages_are_refused(region, stages):
    smem = tuple(replace(r, stages=stages) if r.name == region else r for r in plan().smem)
    refused(replace(plan(), smem=smem), f"{region} of tile")


def test_a_new_v_that_is_not_waited_for_is_refused():
    refused(
        of_items(plan(), "compute[0].next", Wait("load_compute_v", "full")),
        "reads sV of tile 1 after load writes sV of tile 0",
    )


def test_v_that_one_warpgroup_does_not_hand_back_never_gets_free():
    broken = of_items(plan(), "compute[1].next", Signal("load_compute_v", "empty"))
    refused(broken, "load waits load_compute_v.empty of tile 1, at which 4 warps arrive, but it counts 8")


def test_k_handed_back_before_the_late_dq_is_refused():
    """Warpgroup 0 has a dQ of the key/value tile before in the burst after its first."""

    def change(step: Step) -> Step:
        early = isinstance(step, IfLast) and step.tile == -2
        return IfLast((Signal("load_compute_k", "empty", -1),), -1) if early else step

    refused(changed(plan(), "compute[0].next", change), "dQ of compute[0] reads sK of tile", "load writes sK of tile")


# The kernel that runs is the one that is proved.


class Diary:
    """An observer: for each warp, in order, what it did that the plan speaks about; stores and loads are not."""

    subscriptions: ClassVar[tuple[type, ...]] = (BarrierOperation, MbarrierOperation, WarpgroupStep)

    def __init__(self, p: Plan):
        self.labels, self.names = PlanLabels(p), {number: name for name, number in p.barrier_ids.items()}
        self.entries: dict[int, list[Done]] = {warp: [] for warp in range(p.num_warps)}
        self.open: dict[int, list[int]] = {warp: [] for warp in range(p.num_warps)}
        self.base = 0

    def start(self, program, launch) -> None:
        self.base = program.dynamic_base

    def finish(self) -> list:
        return []

    def observe(self, event) -> None:
        if isinstance(event, BarrierOperation):
            if event.barrier in self.names and event.op in ("sync", "arrive"):
                self.entries[event.warp].append((event.op, self.names[event.barrier]))
            return
        for warp in event.lanes.warps:
            if isinstance(event, WarpgroupStep):
                self._warpgroup(warp, event)
            elif event.operation is None and (event.op == "arrive" or (event.op == "wait" and event.completed)):
                what = (event.op, self.labels.smem(event.address - self.base))
                if what[1].startswith("schedule_"):
                    continue  # the plan takes what there is to do as known
                self.entries[warp].append((*what, event.phase) if event.op == "wait" else what)

    def _warpgroup(self, warp: int, event: WarpgroupStep) -> None:
        if event.op == "mma":
            shape = event.decoded.mods["shape"]
            self.open[warp].append(int(shape.partition("n")[2].partition("k")[0]))
        elif event.op == "commit":
            (columns,) = set(self.open[warp])
            self.entries[warp].append(("group", columns, len(self.open[warp])))
            self.open[warp] = []
        elif event.op == "wait":
            self.entries[warp].append(("finish", event.limit))


def told(p: Plan, step: Step, tile: int) -> Iterator[Done]:
    """What a warp does for a step, when each key/value tile has TILES query tiles."""
    if isinstance(step, IfFirst | IfLast):
        at = tile if isinstance(step, IfFirst) else tile + step.tile + 1
        if at > 0 and at % TILES == 0:
            yield from (done for inner in step.steps for done in told(p, inner, tile))
    elif isinstance(step, Wait | Signal):
        number, stages = tile + step.tile, p.pipeline(step.pipeline).stages
        number = number // TILES if p.pipeline(step.pipeline).per_item else number
        name = f"{step.pipeline}.{step.side}[{number % stages}]"
        yield ("wait", name, number // stages) if isinstance(step, Wait) else ("arrive", name)
    elif isinstance(step, Group):
        yield ("group", *GROUPS[step.what])
    elif isinstance(step, Finish):
        yield ("finish", step.pending)
    elif isinstance(step, Sync | Arrive):
        yield ("sync" if isinstance(step, Sync) else "arrive", step.barrier)


def diary(p: Plan, actor: str) -> list[Done]:
    """What a warp of an actor must do."""
    programs = dict(p.programs)
    begin = 1 if f"{actor}.last" in programs else 0
    tiles = ITEMS * TILES
    parts = [("first", 0), *(("next", tile) for tile in range(begin, tiles)), ("last", tiles), ("epilogue", tiles)]
    steps = [(step, tile) for part, tile in parts for step in programs.get(f"{actor}.{part}", ())]
    return [done for step, tile in steps for done in told(p, step, tile)]


def test_the_compiled_kernel_does_what_the_plan_says(monkeypatch):
    monkeypatch.setattr(launch, "EMULATED_MULTIPROCESSORS", 1)
    p = plan()
    case, seen = main_case(p, SHAPE, arch="sm90"), Diary(p)
    emulator.launch(case.ptx, case.launch, emulator.Options(backend="numpy", completion="late"), [seen])
    for warp in range(8):
        assert seen.entries[warp] == diary(p, f"compute[{warp // 4}]"), warp
    for owner, warp in enumerate(p.role("reduce").warps):
        assert seen.entries[warp] == diary(p, f"reduce[{owner}]"), warp
