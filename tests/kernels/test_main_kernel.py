"""The compiled main kernel, read as PTX: its barriers, counts, instructions and resources are those of the plan."""

from __future__ import annotations

from collections import Counter

import pytest

from undertow import ptx
from undertow.kernels.compile import CompiledKernel
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.descriptors import K_STEP
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.schedule import mma_program
from undertow.plan.schema import REGISTERS_PER_SM, Plan
from undertow.plan.steps import Issue, Signal

BARRIERS_PER_TILE = {"aliased": 5, "slots": 3, "signals": 3, "split": 0}
BARRIER_SITES = {"aliased": 4, "slots": 3, "signals": 2, "split": 0}


@pytest.fixture(scope="module", params=SCHEDULES)
def kernel(request) -> tuple[Plan, CompiledKernel, list[ptx.Instruction]]:
    described = plan(request.param)
    made = launch.compile_backward(described).main
    return described, made, ptx.parse_module(made.ptx).entry(made.entry).instructions


def immediates(instructions, mnemonic: str) -> list[tuple]:
    """Operands of every instruction of one mnemonic, with integers in place of immediates."""
    found = [i for i in instructions if i.mnemonic == mnemonic]
    return [tuple(getattr(operand, "value", operand) for operand in i.operands) for i in found]


def test_no_register_is_spilled(kernel):
    _, made, _ = kernel
    resources = made.resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)


def test_registers_leave_room_for_every_thread_of_the_cta(kernel):
    described, made, _ = kernel
    assert made.resources.registers * described.num_threads <= REGISTERS_PER_SM


def test_compute_wide_barriers_are_those_of_the_plan(kernel):
    """One tile is straight-line code, so the barriers in the text are those that a tile executes."""
    described, _, instructions = kernel
    by_id = Counter(operands[0] for operands in immediates(instructions, "bar.sync") if len(operands) == 2)
    expected = BARRIERS_PER_TILE[described.name]
    assert by_id[described.barrier_ids["compute"]] == expected == described.compute_barriers_per_tile
    assert described.compute_barrier_sites == BARRIER_SITES[described.name]


def test_every_named_barrier_counts_the_threads_of_its_roles(kernel):
    described, _, instructions = kernel
    threads = {described.barrier_ids[b.name]: described.barrier_threads(b.name) for b in described.barriers}
    named = [operands for operands in immediates(instructions, "bar.sync") if len(operands) == 2]
    assert named and all(threads[identifier] == count for identifier, count in named)


def test_warpgroups_change_their_registers_once(kernel):
    """setmaxnreg must be one instruction for all warps of a warpgroup."""
    described, _, instructions = kernel
    changes = Counter(i.mnemonic.split(".")[1] for i in instructions if i.opcode == "setmaxnreg")
    values = sorted(i.operands[0].value for i in instructions if i.opcode == "setmaxnreg")
    assert changes == {"inc": 2, "dec": 1}
    assert values == sorted({role.registers for role in described.roles})


def test_every_mbarrier_is_initialised_once_with_its_arrival_count(kernel):
    described, _, instructions = kernel
    counts, constants = {}, {}
    for instruction in instructions:
        if instruction.mnemonic == "mov.b32" and isinstance(instruction.operands[1], ptx.Immediate):
            constants[instruction.operands[0]] = instruction.operands[1].value
        elif instruction.mnemonic.startswith("mbarrier.init"):
            address, count = instruction.operands
            assert address.offset not in counts
            counts[address.offset] = constants[count]
    expected = {}
    for name, offset in described.mbarriers.items():
        pipeline, side = name.partition("[")[0].rsplit(".", 1)
        expected[offset] = described.arrivals(described.pipeline(pipeline), side)
    assert counts == expected


def test_mmas_and_commits_are_those_of_the_derived_program(kernel):
    described, _, instructions = kernel
    program = mma_program(described)
    steps = [*program.prologue, *program.body, *program.tail]
    issued = [described.mma(step.mma) for step in steps if isinstance(step, Issue)]
    mnemonics = Counter(".".join(i.mnemonic.split(".")[:2]) for i in instructions)
    assert mnemonics["tcgen05.mma"] == sum(op.k // K_STEP for op in issued)
    assert mnemonics["tcgen05.commit"] == sum(isinstance(step, Signal) for step in steps)


def test_the_kernel_has_no_local_memory_and_no_call(kernel):
    _, _, instructions = kernel
    forbidden = [i.mnemonic for i in instructions if i.opcode == "call" or ".local" in i.mnemonic]
    assert not forbidden


def test_a_left_out_guard_leaves_out_its_barriers():
    """The detectors' negative control: the kernel really is without the guard."""
    described = plan("aliased").without_guard("dS")
    made = launch.compile_backward(described).main
    instructions = ptx.parse_module(made.ptx).entry(made.entry).instructions
    identifiers = [operands[0] for operands in immediates(instructions, "bar.sync") if len(operands) == 2]
    assert identifiers.count(described.barrier_ids["compute"]) == BARRIERS_PER_TILE["aliased"] - 2


def test_the_entry_is_named_after_the_plan(kernel):
    described, made, _ = kernel
    assert made.entry.startswith(f"undertow_backward_{described.name}")
