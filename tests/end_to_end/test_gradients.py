"""The promise of the project: what the compiler made of each plan, executed, gives the right gradients.

All four schedules, every edge of the tiles, any order of events: errors within the budget, the same bits.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from undertow import emulated, emulator
from undertow.emulated import EmulatedBackward
from undertow.emulator import Options
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm100.plan import SCHEDULES
from undertow.reference import Gradients
from undertow.tolerance import Yardstick, yardstick
from undertow.verify import complaint

SHAPES = {
    "256x256": Shape(1, 256, 256, 1),
    "200x333": Shape(1, 200, 333, 1),
    "1x1": Shape(1, 1, 1, 1),
    "129x127": Shape(1, 129, 127, 1),
    "1024x512": Shape(1, 1024, 512, 1),
    "150x260-batch2-heads3": Shape(2, 150, 260, 3),
}
BARRIERS = {"aliased": 5, "slots": 3, "signals": 3, "split": 0}
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@functools.cache
def judged(shape: Shape, seed: int) -> tuple[Batch, Yardstick]:
    batch = random_batch(shape, seed)
    return batch, yardstick(batch)


@functools.cache
def plain(shape: Shape, schedule: str) -> EmulatedBackward:
    """On the NumPy back end, one warp after the other, with what is asynchronous done at once."""
    return emulated.backward(judged(shape, 0)[0], schedule=schedule)


def bits(gradients: Gradients) -> list[torch.Tensor]:
    return [x.view(torch.int16) for x in gradients]


def assert_same_bits(got: EmulatedBackward, want: EmulatedBackward, what: str) -> None:
    for name, g, w in zip(Gradients._fields, bits(got.gradients), bits(want.gradients)):
        assert torch.equal(g, w), f"{what}: {int((g != w).sum())} of {g.numel()} elements of {name} differ"


@ALL_SHAPES
@pytest.mark.parametrize("seed", range(3))
def test_all_schedules_are_right_and_agree_bit_for_bit(shape, seed):
    batch, measure = judged(shape, seed)
    runs = {name: emulated.backward(batch, schedule=name, options=Options(backend="auto")) for name in SCHEDULES}
    for name, run in runs.items():
        assert not complaint(measure, run.gradients), name
        assert run.compute_barriers_per_tile == BARRIERS[name]
        assert_same_bits(run, runs["split"], name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_back_ends_give_the_same_bits_and_counts(schedule):
    batch, _ = judged(SHAPES["200x333"], 0)
    other = emulated.backward(batch, schedule=schedule, options=Options(backend="compiled"))
    runs = [plain(SHAPES["200x333"], schedule), other]
    assert [run.backend for run in runs] == ["numpy", "compiled"]
    assert_same_bits(*runs, what="compiled")
    for kernel in emulated.KERNELS:
        numpy_result, compiled_result = (run.results[kernel] for run in runs)
        assert numpy_result.instructions == compiled_result.instructions
        assert numpy_result.barriers == compiled_result.barriers


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("completion", "numpy_order"), [("eager", 7), ("late", "fixed"), (("seeded", 0), 7), (("seeded", 1), "fixed")]
)
def test_results_do_not_depend_on_when_asynchronous_work_is_done(schedule, completion, numpy_order):
    """Late completion is as late as waits permit: a missing wait would read what is not there yet.

    On NumPy, which takes a hundred times as long, in one of the two orders of warps.
    """
    batch, _ = judged(SHAPES["200x333"], 0)
    for backend, order in (("numpy", numpy_order), ("auto", "fixed"), ("auto", 7)):
        run = emulated.backward(batch, schedule=schedule, options=Options(backend, order, completion))
        assert_same_bits(run, plain(SHAPES["200x333"], schedule), f"{backend}, warp order {order}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_do_not_depend_on_the_order_of_warps(schedule):
    batch, _ = judged(SHAPES["200x333"], 0)
    for seed in range(20):
        run = emulated.backward(batch, schedule=schedule, options=Options("auto", seed, ("seeded", seed)))
        assert_same_bits(run, plain(SHAPES["200x333"], schedule), f"seed {seed}")


def test_the_order_of_ctas_moves_only_the_rounding_of_dq():
    """dK and dV belong to one CTA each; dQ is a float32 sum over CTAs in the order in which they come."""
    batch, measure = judged(SHAPES["1024x512"], 0)
    in_order = emulated.backward(batch, options=Options("auto"))
    moved = 0
    for seed in range(4):
        order = random.Random(seed).sample(range(4), 4)
        run = _with_main_order(batch, order)
        assert not complaint(measure, run.gradients)
        got, want = bits(run.gradients), bits(in_order.gradients)
        assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
        moved += not torch.equal(got[0], want[0])
    assert moved, "no order changed dQ: this test would not notice if dQ did not depend on it"


def _with_main_order(batch: Batch, order: list[int]) -> EmulatedBackward:
    """The backward pass with the CTAs of kernels of `len(order)` CTAs in that order."""
    launch = emulator.launch

    def ordered(program, description, options):
        columns, heads, batches = description.grid
        fits = columns * heads * batches == len(order)
        return launch(program, description, Options("auto", cta_order=order) if fits else options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "launch", ordered)
        return emulated.backward(batch, options=Options("auto"))
