"""Deterministic mode: dQ has the same bits whichever CTA comes first, on every schedule, and nobody waits for ever."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.kernels.packings import packed_batch
from tests.kernels.problems import complaints
from undertow import emulated, emulator, ptx
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.kernels.sm100.tensors import allocate_workspaces
from undertow.plan.attention import Attention
from undertow.reference import Gradients, Scoring

SLIDING = {"causal": True, "window": (200, None)}
CASES = {
    "dense": lambda: random_batch(Shape(1, 260, 700, 2, 1)),
    "causal": lambda: random_batch(Shape(1, 500, 500, 2, 2), scoring=Scoring(causal=True)),
    "causal-grouped": lambda: random_batch(Shape(1, 300, 300, 4, 1), scoring=Scoring(causal=True)),
    "sliding": lambda: random_batch(Shape(1, 700, 700, 2, 1), scoring=Scoring(**SLIDING)),
    "local": lambda: random_batch(Shape(1, 400, 400, 2), scoring=Scoring(window=(150, 60)), dtype=torch.float16),
    "right-only": lambda: random_batch(Shape(1, 300, 600, 1), scoring=Scoring(window=(None, 60))),
    "left-only": lambda: random_batch(Shape(1, 400, 500, 1), scoring=Scoring(window=(130, None))),
    "packed-dense": lambda: packed_batch([0, 300, 700], [0, 500, 700], (2, 1)),
    "packed-sliding": lambda: packed_batch([0, 300, 1000], [0, 300, 1000], (2, 1), **SLIDING),
    "packed-causal-used": lambda: packed_batch(
        [0, 300, 600], [0, 400, 900], (1, 1), ([250, 300], [131, 500]), causal=True
    ),
}


def in_order(batch: Batch, schedule: str, seed: int | None, deterministic: bool = True) -> Gradients:
    """The gradients, with warps, completions and CTAs in a random order if there is a seed, backwards if it is 0.

    In the place of dQ stand its fp32 sums: rounding to 16 bits hides most of what an order changes.
    """
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring, deterministic)
    work = allocate_workspaces(tensors, deterministic)
    compiled = launch.compile_for(schedule, tensors, settings)
    for kernel, described in launch.launches(compiled, tensors, settings, work):
        options = emulator.Options(backend="auto")
        if seed is not None and kernel is compiled.main:
            order = list(range(described.grid[0]))[::-1]
            if seed:
                random.Random(seed).shuffle(order)
            options = emulator.Options("auto", seed, ("seeded", seed) if seed % 2 else "late", order)
        emulator.launch(kernel.ptx, described, options)
    if seed is None:
        assert not complaints(batch, Gradients(tensors.dq, tensors.dk, tensors.dv))
    return Gradients(work.dq_accumulator, tensors.dk, tensors.dv)


def have_equal_bits(one: Gradients, other: Gradients) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("schedule", ["aliased", "split"])
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_order_of_ctas_warps_and_completions(schedule, case):
    """Five orders of CTAs: as they start, backwards, and three at random."""
    batch = CASES[case]()
    first = in_order(batch, schedule, None)
    for seed in range(4):
        assert have_equal_bits(first, in_order(batch, schedule, seed)), f"seed {seed}"


@pytest.mark.parametrize(("case", "third"), list(zip(CASES, itertools.cycle(["slots", "signals"]))))
def test_all_schedules_have_the_same_bits(case, third):
    """Slots and signals, of which the others are made, take turns: each meets every mask, grouped heads and packing."""
    batch = CASES[case]()
    first, *others = (in_order(batch, schedule, None) for schedule in ("aliased", "split", third))
    assert all(have_equal_bits(first, other) for other in others)


@pytest.mark.parametrize("case", ["dense", "sliding"])
def test_without_the_mode_bits_of_dq_depend_on_the_order(case):
    """Negative control: the flag has an effect, and the orders above are different enough to show it."""
    batch = CASES[case]()
    forwards, backwards = (in_order(batch, "split", seed, deterministic=False) for seed in (None, 0))
    assert not torch.equal(forwards.dq, backwards.dq)
    assert torch.equal(forwards.dk, backwards.dk) and torch.equal(forwards.dv, backwards.dv)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("flags", [{}, {"right": True}, {"left": True, "right": True, "packed": True}])
def test_a_turn_is_acquired_and_released_in_full(schedule, flags):
    """The wait before a release is for complete sums, not for staging that has been read; and nothing is spilled."""
    main = launch.compile_backward(plan(schedule, attention=Attention(deterministic=True, **flags))).main
    names = [i.mnemonic for i in ptx.parse_module(main.ptx).entry(main.entry).instructions]
    release = next(index for index, name in enumerate(names) if name.startswith("red.release.gpu"))
    waits = [name for name in names[:release] if name.startswith("cp.async.bulk.wait_group")]
    assert waits[-1] == "cp.async.bulk.wait_group", "the last one before the release has no .read"
    acquires = [index for index, name in enumerate(names) if name.startswith("ld.acquire.gpu")]
    sums = [index for index, name in enumerate(names) if name.startswith("cp.reduce.async.bulk")]
    assert acquires and max(acquires) < min(sums) and max(sums) < release
    resources = main.resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)


def test_a_kernel_that_does_not_need_turns_has_none():
    main = launch.compile_backward(plan("split")).main
    assert not [i for i in ptx.parse_module(main.ptx).entry(main.entry).instructions if i.opcode in ("red", "atom")]
