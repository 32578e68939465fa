"""A kernel that we did not write runs on the emulator: flash-attn-4's SM100 backward, launched from a description."""

from __future__ import annotations

import math

import pytest
import torch

from tests.flash_attn_4 import launches
from tests.flash_attn_4.launches import Buffers, Problem
from undertow import emulator, ptx
from undertow.reference import Gradients, attention_forward
from undertow.tolerance import yardstick

SHAPES = {"256x256": (1, 256, 256, 1), "tails-200x333": (1, 200, 333, 1), "batch-2-heads-2": (2, 130, 128, 2)}

ORDERS = {
    "late": emulator.Options(completion="late"),
    "seeded": emulator.Options(schedule=5, completion=("seeded", 5)),
}


def problem(batch: int, seqlen_q: int, seqlen_k: int, heads: int, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def randn(seqlen: int) -> torch.Tensor:
        return torch.randn(batch, seqlen, heads, launches.HEAD_DIM, generator=generator).bfloat16()

    q, k, v, dout = randn(seqlen_q), randn(seqlen_k), randn(seqlen_k), randn(seqlen_q)
    forward = attention_forward(q, k, v)
    results = (torch.full_like(x, math.nan) for x in (q, k, v))
    return Problem(q, k, v, forward.out.bfloat16(), dout, forward.lse.float(), *results)


def run(kernels: dict[str, str], given: Problem, options: emulator.Options | None = None) -> Gradients:
    buffers = Buffers.for_problem(given)
    for role in ("preprocess", "main", "postprocess"):
        emulator.launch(kernels[role], getattr(launches, role)(given, buffers), options)
    return Gradients(given.dq, given.dk, given.dv)


@pytest.mark.parametrize("role", ["preprocess", "main", "postprocess"])
def test_flash_attn_4_parameters_are_those_of_the_description(flash_attn_4_ptx, role):
    """Size by size, in order: a parameter more or less in a new release shows here and not as a wrong gradient."""
    given = problem(1, 200, 333, 2)
    described = getattr(launches, role)(given, Buffers.for_problem(given)).params
    parameters = ptx.parse_module(flash_attn_4_ptx[role]).entry(None).parameters
    assert [getattr(value, "num_bytes", 4) for value in described] == [parameter.size for parameter in parameters]


@pytest.mark.parametrize("shape", SHAPES)
def test_flash_attn_4_gradients_are_within_the_ideal_budget(flash_attn_4_ptx, shape):
    given = problem(*SHAPES[shape])
    measure = yardstick(given)
    errors = measure.errors(run(flash_attn_4_ptx, given))
    assert measure.accepts(errors), f"errors {errors}, budget {measure.budget}"


@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_flash_attn_4_gradients_do_not_depend_on_the_order_of_events(flash_attn_4_ptx, options):
    """CTAs run one after the other, so even dQ, a sum over CTAs, is the same bits."""
    shape = SHAPES["tails-200x333"]
    expected, got = (run(flash_attn_4_ptx, problem(*shape), chosen) for chosen in (emulator.Options(), options))
    assert all(torch.equal(x, y) for x, y in zip(got, expected))
