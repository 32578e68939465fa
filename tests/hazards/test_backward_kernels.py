"""The backward kernels under all observers: the four schedules and flash-attn-4 are clean, removed guards are found."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from tests.flash_attn_4 import launches as peer
from tests.flash_attn_4.launches import Buffers
from tests.flash_attn_4.test_flash_attn_4 import problem
from undertow import emulator
from undertow.check import Check, check
from undertow.emulator import Options
from undertow.emulator.observers import all_observers
from undertow.inputs import Shape, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.schema import Plan

QUICK = (Options(), Options(completion="late"), Options(schedule=1, completion=("seeded", 1)))
SHAPE = (1, 256, 256, 1)  # two CTAs, which meet in dQ, of two trips each


def orders(shift: int) -> list[Options]:
    """Ten orders of warps, each with one of the three completions; `shift` gives each order another one."""
    return [
        Options(schedule=seed, completion=("eager", "late", ("seeded", seed))[(seed + shift) % 3]) for seed in range(10)
    ]


@cache
def programs(subject: Plan) -> dict[str, emulator.Program]:
    compiled = launch.compile_backward(subject)
    return {role: emulator.load_program(getattr(compiled, role).ptx) for role in ("preprocess", "main", "postprocess")}


def backward(subject: Plan, shape: tuple[int, int, int, int], options: Options, strict: bool = False) -> list[Check]:
    """Run the three kernels of a plan on random operands, watched."""
    batch = random_batch(Shape(*shape))
    results = [torch.full_like(x, torch.nan) for x in (batch.q, batch.k, batch.v)]
    tensors = launch.BackwardTensors(batch.q, batch.k, batch.v, batch.out, batch.dout, batch.lse, *results)
    described = launch.launches(launch.compile_backward(subject), tensors)
    checks = []
    for (role, program), (_, what) in zip(programs(subject).items(), described, strict=True):
        checks.append(check(program, what, options, plan=subject if role == "main" else None, strict=strict))
    return checks


def complaints(checks: list[Check]) -> list[str]:
    return [str(finding) for one in checks for finding in one.findings]


@pytest.mark.parametrize("options", QUICK, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_clean(schedule, options):
    assert complaints(backward(plan(schedule), SHAPE, options)) == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 384, 130, 1), (1, 130, 250, 2)], ids=str)
@pytest.mark.parametrize(("shift", "schedule"), list(enumerate(SCHEDULES)))
def test_a_schedule_is_clean_in_every_order(shift, schedule, shape):
    """Ten orders, as what the observers say does not hang on who happens to come first."""
    for options in orders(shift):
        assert complaints(backward(plan(schedule), shape, options)) == [], options


def found_aliases(schedule: str, guard: str, options: Options) -> list[emulator.Finding]:
    """What the main kernel's check says without one alias guard."""
    return list(backward(plan(schedule).without_guard(guard), SHAPE, options)[1].errors)


def assert_names_the_hazard(findings: list[emulator.Finding], guard: str, over: str) -> None:
    """Every finding is P over S (or dS over dP) by two warps of the same lanes, with columns and the barrier."""
    assert findings
    for finding in findings:
        assert finding.rule == "alias-lifetime"
        assert finding.message.startswith(f"{guard} over {over}: ")
        one, other = finding.accesses
        assert abs(one.warp - other.warp) == 4 and {one.role, other.role} == {"compute"}
        assert {one.verb, other.verb} == {"reads", "writes"}
        for access in finding.accesses:
            region = guard if access.verb == "writes" else over
            assert re.fullmatch(rf"TMEM columns \d+\.\.\d+ \({region}\)", access.buffer)
            assert "roles/compute.py" in access.source
        assert "named barrier compute" in finding.missing


@pytest.mark.parametrize("options", QUICK, ids=str)
@pytest.mark.parametrize(("guard", "over"), [("P", "S"), ("dS", "dP")])
@pytest.mark.parametrize("schedule", ["aliased", "signals"])
def test_a_missing_alias_guard_is_found_and_named(schedule, guard, over, options):
    assert_names_the_hazard(found_aliases(schedule, guard, options), guard, over)


@pytest.mark.slow
@pytest.mark.parametrize(("guard", "over"), [("P", "S"), ("dS", "dP")])
@pytest.mark.parametrize(("shift", "schedule"), list(enumerate(["aliased", "signals"])))
def test_a_missing_alias_guard_is_found_in_every_order(shift, schedule, guard, over):
    for options in orders(shift):
        assert_names_the_hazard(found_aliases(schedule, guard, options), guard, over)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_which_schedules_rely_on_the_order_of_the_tensor_pipe(schedule):
    """Strict mode grants only the order that the ISA promises: same accumulator, shape and thread.

    With P over S the next QK overwrites what PdO reads, with dS over dP dQ overwrites what dK reads; slots of their own
    need no such order.
    """
    found = {
        finding.message.partition(":")[0] for finding in backward(plan(schedule), SHAPE, Options(), True)[1].errors
    }
    assert found == ({"S over P", "dQ over dS"} if schedule in ("aliased", "signals") else set())


def test_removing_the_join_before_an_elected_arrival_is_found():
    """`split` signals by warp syncs alone: each of them carries weight, but for the one before the teardown barrier."""
    subject = plan("split")
    text = launch.compile_backward(subject).main.ptx
    joins = [match.start() for match in re.finditer(r"bar\.warp\.sync", text)]
    rules = []
    for start in joins:
        program = emulator.load_program(text[:start] + "//" + text[start:])
        rules.append(sorted({finding.rule for finding in main_of(subject, program).errors}))
    assert rules == [["warp-sync"]] * (len(joins) - 1) + [[]]


def main_of(subject: Plan, program: emulator.Program) -> Check:
    """Run another main kernel in place of the plan's."""
    batch = random_batch(Shape(*SHAPE))
    results = [torch.full_like(x, torch.nan) for x in (batch.q, batch.k, batch.v)]
    tensors = launch.BackwardTensors(batch.q, batch.k, batch.v, batch.out, batch.dout, batch.lse, *results)
    (_, before), (_, what), _ = launch.launches(launch.compile_backward(subject), tensors)
    emulator.launch(programs(subject)["preprocess"], before)
    return check(program, what, plan=subject)


@pytest.mark.parametrize("options", QUICK, ids=str)
def test_flash_attn_4_is_clean(flash_attn_4_ptx, options):
    """What it may do and the ISA does not allow is advice.

    Two CTAs of its first kernel write the same rows, with equal values; its dK and dV stores are still running when a
    CTA ends; warps of one warpgroup ask for different numbers of registers.
    """
    given = problem(*SHAPE)
    buffers = Buffers.for_problem(given)
    advice = {}
    for role, text in flash_attn_4_ptx.items():
        found = check(text, getattr(peer, role)(given, buffers), options)
        assert found.errors == (), [str(finding) for finding in found.errors]
        advice[role] = {finding.rule: finding.message for finding in found.findings}
    assert {role: set(rules) for role, rules in advice.items()} == {
        "preprocess": {"global-order"},
        "main": {"global-order", "register-pool"},
        "postprocess": set(),
    }
    assert "both write the same value" in advice["preprocess"]["global-order"]
    assert "the CTA ends while a copy may still read" in advice["main"]["global-order"]


def test_watching_changes_no_result():
    """T24: the same bits with and without observers."""
    subject, batch = plan("split"), random_batch(Shape(*SHAPE))
    outcomes = []
    for watched in (False, True):
        results = [torch.full_like(x, torch.nan) for x in (batch.q, batch.k, batch.v)]
        tensors = launch.BackwardTensors(batch.q, batch.k, batch.v, batch.out, batch.dout, batch.lse, *results)
        for program, (_, what) in zip(
            programs(subject).values(), launch.launches(launch.compile_backward(subject), tensors), strict=True
        ):
            emulator.launch(program, what, observers=all_observers(strict=True) if watched else ())
        outcomes.append(results)
    assert all(torch.equal(plain, seen) for plain, seen in zip(*outcomes, strict=True))
