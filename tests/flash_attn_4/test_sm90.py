"""A Hopper kernel that we did not write runs on the emulator: flash-attn-4's SM90 backward, dense and causal."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tests.flash_attn_4 import launches_sm90
from tests.flash_attn_4.launches import HEAD_DIM, Buffers, Problem
from undertow import emulator, ptx
from undertow.check import check
from undertow.reference import Gradients, Scoring, attention_forward
from undertow.tolerance import yardstick

MASKS = ("dense", "causal")
SHAPES = {"256x256": (1, 256, 256, 1), "tails-200x333": (1, 200, 333, 1), "batch-2-heads-2": (2, 130, 128, 2)}
ROLES = ("preprocess", "main", "postprocess")
HOW = {
    "eager": emulator.Options(),
    "late": emulator.Options(completion="late"),
    "seeded": emulator.Options(schedule=5, completion=("seeded", 5)),
    "compiled": emulator.Options(backend="compiled"),
    "compiled-late": emulator.Options(backend="compiled", completion="late"),
    "compiled-seeded": emulator.Options(backend="compiled", schedule=7, completion=("seeded", 11)),
}
WAITS = 5
"""wgmma.wait_group instructions of the dense main kernel."""


def problem(mask: str, batch: int, seqlen_q: int, seqlen_k: int, heads: int) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def randn(seqlen: int) -> torch.Tensor:
        return torch.randn(batch, seqlen, heads, HEAD_DIM, generator=generator).bfloat16()

    q, k, v, dout = randn(seqlen_q), randn(seqlen_k), randn(seqlen_k), randn(seqlen_q)
    forward = attention_forward(q, k, v, scoring(mask))
    results = (torch.full_like(x, math.nan) for x in (q, k, v))
    return Problem(q, k, v, forward.out.bfloat16(), dout, forward.lse.float(), *results)


def scoring(mask: str) -> Scoring:
    return Scoring(causal=mask == "causal")


def run(kernels: dict[str, str], given: Problem, options: emulator.Options | None = None) -> Gradients:
    buffers = Buffers.for_problem(given)
    for role in ROLES:
        emulator.launch(kernels[role], getattr(launches_sm90, role)(given, buffers), options)
    return Gradients(given.dq, given.dk, given.dv)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("mask", MASKS)
def test_sm90_parameters_are_those_of_the_description(flash_attn_4_sm90_ptx, mask, role):
    given = problem(mask, 1, 200, 333, 2)
    described = getattr(launches_sm90, role)(given, Buffers.for_problem(given)).params
    parameters = ptx.parse_module(flash_attn_4_sm90_ptx[mask][role]).entry(None).parameters
    assert [getattr(value, "num_bytes", 4) for value in described] == [parameter.size for parameter in parameters]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_sm90_gradients_are_within_the_ideal_budget(flash_attn_4_sm90_ptx, mask, shape):
    given = problem(mask, *SHAPES[shape])
    measure = yardstick(given, scoring(mask))
    errors = measure.errors(run(flash_attn_4_sm90_ptx[mask], given))
    assert measure.accepts(errors), f"errors {errors}, budget {measure.budget}"


@pytest.mark.parametrize("mask", MASKS)
def test_sm90_gradients_are_the_same_bits_in_any_order_on_both_back_ends(flash_attn_4_sm90_ptx, mask):
    shape = SHAPES["tails-200x333"]
    outcomes = {how: run(flash_attn_4_sm90_ptx[mask], problem(mask, *shape), options) for how, options in HOW.items()}
    for how, gradients in outcomes.items():
        assert all(torch.equal(x, y) for x, y in zip(gradients, outcomes["eager"], strict=True)), how


@pytest.mark.parametrize("how", ["eager", "seeded"])
@pytest.mark.parametrize("mask", MASKS)
def test_sm90_is_clean(flash_attn_4_sm90_ptx, mask, how):
    """Its one advice: two CTAs of the first kernel write the same rows, with equal values."""
    given = problem(mask, 1, 384, 256, 1)
    buffers = Buffers.for_problem(given)
    advice = {}
    for role in ROLES:
        launch = getattr(launches_sm90, role)(given, buffers)
        found = check(flash_attn_4_sm90_ptx[mask][role], launch, HOW[how])
        assert found.errors == (), [str(finding) for finding in found.errors]
        advice[role] = {finding.rule for finding in found.findings}
    assert advice == {"preprocess": {"global-order"}, "main": set(), "postprocess": set()}


@pytest.mark.parametrize("which", range(WAITS))
def test_sm90_waits_for_mmas_are_needed(flash_attn_4_sm90_ptx, which):
    """Without one, observers find registers in flight, or an operand that is still read when it is copied over.

    The third is needed by its own protocol only: the stage that it hands back is copied into by a warp that also waits
    for the last one.
    """
    text = flash_attn_4_sm90_ptx["dense"]["main"]
    waits = [match.span() for match in re.finditer(r"wgmma\.wait_group\.sync\.aligned\s+\d;", text)]
    assert len(waits) == WAITS
    start, end = waits[which]
    given = problem("dense", 1, 512, 128, 1)
    buffers = Buffers.for_problem(given)
    emulator.launch(flash_attn_4_sm90_ptx["dense"]["preprocess"], launches_sm90.preprocess(given, buffers))
    found = check(text[:start] + text[end:], launches_sm90.main(given, buffers))
    rules = {finding.rule for finding in found.errors}
    if which == 2:
        assert rules == set()
    else:
        assert rules and rules <= {"wgmma-register-in-flight", "race"}
