"""Spans in the kernels: no instruction where nobody asks for them, the plan's names where somebody does."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

import pytest

from undertow.kernels import events
from undertow.kernels.backward import compile_backward, plan_named
from undertow.kernels.compile import OBJECT_PTX, compile_kernel
from undertow.plan.schema import DType
from undertow.runtime import objects
from undertow.runtime.architectures import ARCHITECTURES

KERNELS = [("sm90", "sm_90a", "pingpong"), ("sm100", "sm_100a", "split")]


def code(ptx: str) -> str:
    """PTX without source lines and debug sections."""
    ptx = re.sub(r"\n\s*\.section\s+\.debug.*", "", ptx, flags=re.DOTALL)
    return "\n".join(line for line in ptx.splitlines() if not re.match(r"\s*(\.loc|\.file|//)", line))


@pytest.mark.parametrize(("arch", "target", "schedule"), KERNELS)
def test_spans_that_nobody_traces_leave_no_instruction(arch, target, schedule):
    plan = plan_named(arch, schedule)
    with_spans = replace(plan, events=True)

    def build():
        return importlib.import_module(f"undertow.kernels.{arch}.kernel").build(with_spans)

    without = code(compile_backward(arch, plan).main.ptx)
    assert "globaltimer" not in without and "pmevent" not in without
    assert code(compile_kernel(f"untraced-{arch}", with_spans, build, target).ptx) == without


@pytest.mark.parametrize(("arch", "target", "schedule"), KERNELS)
def test_every_span_that_begins_ends(arch, target, schedule):
    del target
    ptx = compile_backward(arch, replace(plan_named(arch, schedule), events=True)).main.ptx
    marks = [int(number) for number in re.findall(r"pmevent\.mask\s+(\d+)", ptx)]
    ends = marks.count(31)
    assert ends == len(marks) - ends > 10
    assert len(set(marks)) - 1 <= events.MOST_NAMES


@pytest.mark.parametrize("arch", [arch for arch, _, _ in KERNELS])
def test_what_a_tracer_runs_passes_the_check_of_its_machine_code(arch):
    """`precompile` raises otherwise: a mark is an instruction like others behind a fence."""
    architecture = ARCHITECTURES[arch]
    variant = replace(architecture.call.variant_named("dense", DType.BF16), events=True)
    assert b"pmevent" in objects.precompile(architecture, variant).files[OBJECT_PTX]


def test_names_are_those_of_the_plan():
    plan = plan_named("sm100", "split")
    names = events.names(plan)
    assert {"QK", "dQ", "softmax", "load_mma_q.full", "reduce"} <= set(names)
    with pytest.raises(AssertionError, match="'lunch' is no span of split"):
        events.span(plan, "lunch")
    assert "turn" in events.names(plan_named("sm90", "pingpong"))
