"""Deterministic mode on SM90: dQ has the same bits whatever comes first, and turns are passed on in full."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random

import pytest
import torch

from tests.kernels.packings import packed_batch
from tests.kernels.problems import complaints
from undertow import emulated, emulator, ptx
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm90 import launch
from undertow.kernels.sm90.plan import plan
from undertow.kernels.sm90.tensors import allocate_workspaces
from undertow.kernels.sm100.tensors import BackwardTensors
from undertow.plan.attention import Attention
from undertow.reference import Gradients, Scoring

CASES = {
    "dense-grouped": lambda: random_batch(Shape(1, 200, 500, 2, 1)),
    "causal": lambda: random_batch(Shape(1, 400, 400, 2), scoring=Scoring(causal=True)),
    "packed-window": lambda: packed_batch([0, 200, 500], [0, 300, 520], (1, 1), window=(150, 40)),
}


def sums(batch: Batch, seed: int | None) -> torch.Tensor:
    """The fp32 sums of dQ, with warps, completions and CTAs in a random order if there is a seed.

    Rounding to 16 bits hides most of what an order changes. Nothing clears the sums before: what nobody adds to is not
    used, and zero here.
    """
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring, True)
    work = allocate_workspaces(tensors, True)
    work.dq_accumulator.fill_(math.nan)
    compiled = launch.compile_for(None, tensors, settings)
    for kernel, described in launch.launches(compiled, tensors, settings, work):
        options = emulator.Options(backend="auto")
        if seed is not None and kernel is compiled.main:
            order = list(range(described.grid[0]))
            random.Random(seed).shuffle(order)
            options = emulator.Options("auto", seed, ("seeded", seed), order)
        emulator.launch(emulated.program(kernel.ptx, kernel.entry), described, options)
    if seed is None:
        assert not complaints(batch, Gradients(tensors.dq, tensors.dk, tensors.dv))
    return work.dq_accumulator.nan_to_num()


@pytest.mark.parametrize("case", CASES)
def test_sums_do_not_depend_on_the_order_of_ctas_warps_and_completions(case):
    """CTAs claim tiles in order, whichever comes first; what is left of the order is the others' to change."""
    batch = CASES[case]()
    assert torch.equal(sums(batch, None), sums(batch, 1))


@pytest.mark.parametrize("deterministic", [True, False])
def test_nobody_adds_before_the_tile_that_comes_first(deterministic):
    """Negative control: CTAs that claim from the second tile on wait for the first for ever, if they take turns."""
    batch = random_batch(Shape(1, 128, 256, 1))
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring, deterministic)
    work = allocate_workspaces(tensors, deterministic)
    (rows, first), (main, second), _ = launch.launches(
        launch.compile_for(None, tensors, settings), tensors, settings, work
    )
    emulator.launch(emulated.program(rows.ptx, rows.entry), first)
    work.claims.fill_(1)
    with pytest.raises(emulator.Deadlock) if deterministic else contextlib.nullcontext():
        emulator.launch(emulated.program(main.ptx, main.entry), second)


@pytest.mark.parametrize("flags", [{}, {"right": True}])
def test_a_turn_is_acquired_and_released_in_full(flags):
    """The release waits for complete sums, not for shares that have been read; the next turn is asked for before that.

    Between an add and the wait for its reading there is an acquire, so that its latency costs nothing.
    """
    main = launch.compile_backward(plan(attention=Attention(deterministic=True, **flags))).main
    names = [i.mnemonic for i in ptx.parse_module(main.ptx).entry(main.entry).instructions]
    (add,) = (index for index, name in enumerate(names) if name.startswith("cp.reduce.async.bulk"))
    (release,) = (index for index, name in enumerate(names) if name.startswith("red.release.gpu"))
    waits = [name for name in names[add:release] if name.startswith("cp.async.bulk.wait_group")]
    assert waits == ["cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group"]
    read = names.index("cp.async.bulk.wait_group.read", add)
    assert any(name.startswith("ld.acquire.gpu") for name in names[add:read])


def of_shape(seqlen: int, heads: int, kv_heads: int) -> BackwardTensors:
    q, k = (torch.empty(1, seqlen, n, 64, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads))
    lse = torch.empty(1, heads, seqlen, device="meta")
    return BackwardTensors(q, k, k, q, q, lse, q, k, k)


@pytest.mark.parametrize("attention", [Attention(), Attention(right=True)])
@pytest.mark.parametrize(
    "shape, bundles",
    [((2048, 32, 32), (17, 17)), ((8192, 32, 32), (4, 4)), ((32768, 32, 32), (1, 1)), ((8192, 32, 8), (1, 2))],
)
def test_bundles_fit_in_l2_and_without_turns_fill_the_machine(attention, shape, bundles):
    """What was measured to be best at 64 K tokens (docs/hopper.md): with turns, and without."""
    tensors = of_shape(*shape)
    in_turn = dataclasses.replace(attention, deterministic=True)
    assert (launch.bundle_of(in_turn, tensors), launch.bundle_of(attention, tensors)) == bundles
