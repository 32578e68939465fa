"""Negative controls: one wrong bit in the compiled kernel or its launch, and the machinery must see it.

Each edit is made in the PTX text next to one GEMM, or in the launch description of one tensor map. It must end in an
error of the emulator, a finding, or a gradient far out of its budget.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from undertow import emulator
from undertow.emulator import EmulatorError
from undertow.inputs import Shape, random_batch
from undertow.kernels.sm100.launch import BackwardTensors, compile_backward, launches
from undertow.kernels.sm100.plan import plan
from undertow.plan.description import Launch, TensorMap
from undertow.plan.schedule import mma_program
from undertow.plan.steps import Issue
from undertow.reference import Gradients
from undertow.tolerance import Errors, yardstick

SPLIT = plan("split")
BATCH = random_batch(Shape(1, 300, 200, 1))  # three trips of the loop and two CTAs, both with a tail
MEASURE = yardstick(BATCH)
MMA = re.compile(
    r"(?P<op>tcgen05\.mma\S*) \[(?P<d>%r\d+)\], (?P<a>\S+), (?P<b>%rd\d+), (?P<descriptor>%r\d+), (?P<sum>%p\d+);"
)
MMA_K = 16  # depth of one tcgen05.mma of 16-bit operands: PTX ISA, "tcgen05 matrix shapes"
A_MAJOR, B_MAJOR = 1 << 15, 1 << 16  # transpose bits of the instruction descriptor: PTX ISA, "Instruction descriptor"
VISIBLE = 0.05  # relative error, over ten times any budget here


def gemm_of_each_line() -> list[tuple[str, int]]:
    """(name of the GEMM, its K step) for every tcgen05.mma of the kernel, in program order."""
    program = mma_program(SPLIT)
    issues = [step for part in (program.prologue, program.body, program.tail) for step in part]
    names = [step.mma for step in issues if isinstance(step, Issue)]
    return [(name, step) for name in names for step in range(SPLIT.mma(name).k // MMA_K)]


def sabotaged(ptx: str, gemm: str, steps: set[int] | None, edit) -> str:
    """The kernel with `edit(match) -> text` in place of each tcgen05.mma of one GEMM (of some K steps)."""
    lines = iter(gemm_of_each_line())
    edited = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal edited
        name, step = next(lines)
        if name != gemm or (steps is not None and step not in steps):
            return match.group(0)
        edited += 1
        return edit(match)

    text = MMA.sub(replaced, ptx)
    assert edited and next(lines, None) is None, "the kernel's GEMMs are not those of the plan"
    return text


def with_descriptor_bits(bits: int):
    def edit(match: re.Match[str]) -> str:
        new = f"{{ .reg .b32 wrong; xor.b32 wrong, {match['descriptor']}, {bits}; "
        return new + match.group(0).replace(f" {match['descriptor']},", " wrong,") + " }"

    return edit


def with_flipped_accumulate(match: re.Match[str]) -> str:
    changed = match.group(0).replace(f" {match['sum']};", " wrong;")
    return f"{{ .reg .pred wrong; not.pred wrong, {match['sum']}; {changed} }}"


def with_next_column(match: re.Match[str]) -> str:
    changed = match.group(0).replace(f"[{match['d']}]", "[wrong]", 1)
    return f"{{ .reg .b32 wrong; add.s32 wrong, {match['d']}, 1; {changed} }}"


def unchanged(launch: Launch) -> Launch:
    return launch


def run(ptx_edit=lambda text: text, launch_edit=unchanged) -> tuple[Errors | None, list]:
    """Errors and findings of the backward pass with an edited main kernel; no errors if the emulator refused."""
    compiled = compile_backward(SPLIT)
    results = [torch.full_like(x, torch.nan) for x in (BATCH.q, BATCH.k, BATCH.v)]
    tensors = BackwardTensors(BATCH.q, BATCH.k, BATCH.v, BATCH.out, BATCH.dout, BATCH.lse, *results)
    findings = []
    for kernel, launch in launches(compiled, tensors):
        is_main = kernel is compiled.main
        try:
            result = emulator.launch(
                ptx_edit(kernel.ptx) if is_main else kernel.ptx,
                launch_edit(launch) if is_main else launch,
                emulator.Options("auto"),
            )
        except EmulatorError:
            return None, findings
        findings += result.findings
    return MEASURE.errors(Gradients(*results)), findings


def is_seen(outcome: tuple[Errors | None, list]) -> bool:
    errors, findings = outcome
    return errors is None or bool(findings) or not all(error <= VISIBLE for error in errors)


@pytest.mark.parametrize("gemm", [op.name for op in SPLIT.mmas])
def test_an_edit_that_changes_nothing_leaves_right_gradients(gemm):
    errors, findings = run(lambda ptx: sabotaged(ptx, gemm, None, with_descriptor_bits(0)))
    assert errors is not None and MEASURE.accepts(errors) and not findings


def operands_in_smem() -> list[tuple[str, int]]:
    """(GEMM, major bit) of every operand that a descriptor finds in shared memory; TMEM operands have no major."""
    shared = {region.name for region in SPLIT.smem}
    return [(op.name, bit) for op in SPLIT.mmas for name, bit in ((op.a, A_MAJOR), (op.b, B_MAJOR)) if name in shared]


# GEMM: the gradients that its result reaches
REACHES = {"QK": {"dq", "dk", "dv"}, "dP": {"dq", "dk"}, "PdO": {"dv"}, "dK": {"dk"}, "dQ": {"dq"}}


@pytest.mark.parametrize(("gemm", "bit"), operands_in_smem())
def test_a_flipped_major_bit_spoils_the_gradients_downstream_and_no_other(gemm, bit):
    errors, _ = run(lambda ptx: sabotaged(ptx, gemm, None, with_descriptor_bits(bit)))
    assert errors is not None
    spoilt = {name for name, error in zip(Errors._fields, errors) if not error <= VISIBLE}
    right = {name for name, error, budget in zip(Errors._fields, errors, MEASURE.budget) if error <= budget}
    assert spoilt == REACHES[gemm] and right == set(Errors._fields) - spoilt


@pytest.mark.parametrize("gemm", [op.name for op in SPLIT.mmas])
@pytest.mark.parametrize("steps", [{0}, {1}], ids=["first", "second"])
def test_a_wrong_accumulate_flag_is_seen(gemm, steps):
    assert is_seen(run(lambda ptx: sabotaged(ptx, gemm, steps, with_flipped_accumulate)))


@pytest.mark.parametrize("gemm", [op.name for op in SPLIT.mmas])
def test_a_column_off_by_one_is_seen(gemm):
    assert is_seen(run(lambda ptx: sabotaged(ptx, gemm, None, with_next_column)))


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_an_ignored_swizzle_is_seen(name):
    def without_swizzle(launch: Launch) -> Launch:
        params = [
            dataclasses.replace(p, swizzle=0) if isinstance(p, TensorMap) and p.name == name else p
            for p in launch.params
        ]
        assert params != list(launch.params)
        return dataclasses.replace(launch, params=params)

    assert is_seen(run(launch_edit=without_swizzle))
