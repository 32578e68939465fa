"""Deterministic mode on SM90: dQ has the same bits whichever CTA comes first, and turns are passed on in full."""

from __future__ import annotations

import dataclasses
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


def sums(batch: Batch, seed: int | None, deterministic: bool = True) -> torch.Tensor:
    """The fp32 sums of dQ, with warps, completions and CTAs in a random order if there is a seed, backwards if it is 0.

    Rounding to 16 bits hides most of what an order changes.
    """
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring, deterministic)
    work = allocate_workspaces(tensors, deterministic)
    compiled = launch.compile_for(None, tensors, settings)
    for kernel, described in launch.launches(compiled, tensors, settings, work):
        options = emulator.Options(backend="auto")
        if seed is not None and kernel is compiled.main:
            order = list(range(described.grid[0]))[::-1]
            if seed:
                random.Random(seed).shuffle(order)
            options = emulator.Options("auto", seed, ("seeded", seed) if seed % 2 else "late", order)
        emulator.launch(emulated.program(kernel.ptx, kernel.entry), described, options)
    if seed is None:
        assert not complaints(batch, Gradients(tensors.dq, tensors.dk, tensors.dv))
    return work.dq_accumulator


@pytest.mark.parametrize("case", CASES)
def test_sums_do_not_depend_on_the_order_of_ctas_warps_and_completions(case):
    """As CTAs start, backwards, and at random."""
    batch = CASES[case]()
    first = sums(batch, None)
    assert all(torch.equal(first, sums(batch, seed)) for seed in (0, 1))


def test_without_the_mode_they_do():
    batch = CASES["dense-grouped"]()
    forwards, backwards = (sums(batch, seed, deterministic=False) for seed in (None, 0))
    assert not torch.equal(forwards, backwards)


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
