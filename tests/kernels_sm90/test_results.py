"""The SM90 kernels compute gradients within the budget, whatever is asked for, and the same bits in any order."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.packings import packed_batch, unused
from tests.kernels.problems import is_zero
from tests.kernels.test_packed import CASES as PACKED
from tests.kernels_sm90.passes import complaints, run
from undertow.emulator import Options
from undertow.inputs import Batch, Shape, random_batch
from undertow.reference import Scoring

CAUSAL = {"causal": True}
CASES = {
    "one-tile": ((1, 128, 128, 1), {}),
    "one-element": ((1, 1, 1, 1), {}),
    "tails": ((1, 300, 200, 2), {}),
    "several-tiles": ((2, 512, 384, 2), {}),
    "one-row": ((1, 1, 500, 2), {}),
    "one-key": ((1, 500, 1, 2), {}),
    "gqa": ((1, 256, 200, 4, 2), {}),
    "mqa": ((1, 200, 256, 4, 1), {}),
    "causal": ((1, 512, 512, 2), CAUSAL),
    "causal-tails": ((2, 300, 300, 1), CAUSAL),
    "causal-more-keys": ((1, 200, 333, 2), CAUSAL),
    "causal-rows-without-keys": ((1, 333, 200, 2), CAUSAL),
    "causal-tiles-without-rows": ((1, 40, 600, 1), {"window": (None, -300)}),
    "causal-gqa": ((1, 300, 300, 6, 2), CAUSAL),
    "causal-mqa": ((2, 130, 140, 4, 1), CAUSAL),
    "window": ((1, 500, 450, 2), {"window": (100, 20)}),
    "window-of-one": ((1, 260, 260, 1), {"window": (0, 0)}),
    "window-out-of-reach": ((1, 130, 130, 1), {"window": (-500, 600)}),
    "left": ((1, 400, 300, 2), {"window": (70, None)}),
    "scale-negative": ((1, 130, 200, 1), {"softmax_scale": -0.3}),
    "scale-large": ((1, 130, 200, 1), {"softmax_scale": 3.0}),
    "scale-small": ((1, 130, 200, 1), {"softmax_scale": 1e-5}),
}
OF_F16 = ("tails", "causal", "scale-negative", "scale-small")
ORDERS = {
    "late": Options("numpy", completion="late"),
    "seeded": Options("numpy", 5, ("seeded", 5)),
    "compiled": Options("compiled", 3, "late"),
    "compiled-seeded": Options("compiled", 7, ("seeded", 11)),
}


def batch_of(case: str, dtype: torch.dtype = torch.bfloat16) -> Batch:
    shape, scoring = CASES[case]
    return random_batch(Shape(*shape), 3, Scoring(**scoring), dtype)


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_within_the_budget(case):
    batch = batch_of(case)
    assert not complaints(batch, run(batch))


@pytest.mark.parametrize("case", OF_F16)
def test_f16_is_within_the_budget(case):
    batch = batch_of(case, torch.float16)
    assert not complaints(batch, run(batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_gradients_may_be_small_or_large(size, dtype):
    """D counts in 16-bit terms, whose exponents reach only so far in f16."""
    batch = random_batch(Shape(1, 256, 256, 1), 0, Scoring(), dtype)
    batch = dataclasses.replace(batch, dout=(batch.dout.float() * size).to(dtype))
    assert not complaints(batch, run(batch))


@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences_are_each_as_if_alone(case):
    positional, named = PACKED[case]
    batch = packed_batch(*positional, **named)
    done = run(batch)
    assert not complaints(batch, done)
    unused_q, unused_k = unused(batch.scoring.sequences, len(batch.q), len(batch.k))
    dq, dk, dv = done.gradients
    assert is_zero(dq[unused_q]) and is_zero(dk[unused_k]) and is_zero(dv[unused_k])


@pytest.mark.parametrize("scoring", [{}, CAUSAL], ids=["dense", "causal"])
def test_sinks_and_gradients_of_lse(scoring):
    with_sink = Scoring(sink=torch.linspace(-6.0, 9.0, 4), **scoring)
    batch = random_batch(Shape(2, 200, 130, 4, 2), 0, with_sink)
    dlse = torch.randn(batch.lse.shape, generator=torch.Generator().manual_seed(9))
    batch = dataclasses.replace(batch, dlse=dlse)
    assert not complaints(batch, run(batch))


def test_rows_that_see_no_key_get_zeros():
    batch = batch_of("causal-rows-without-keys")
    assert is_zero(run(batch).gradients.dq[:, :133])


def test_keys_that_no_row_sees_get_zeros():
    batch = batch_of("window-out-of-reach")
    assert all(map(is_zero, run(batch).gradients))


@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.parametrize("case", ["causal-tails", "mqa"])
def test_bits_do_not_depend_on_order_or_back_end(case, how):
    """One CTA after another adds to dQ on the emulator, so that the order of sums is the same."""
    batch = batch_of(case)
    for one, other in zip(run(batch).gradients, run(batch, options=ORDERS[how]).gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", ["several-tiles", "causal", "window", "left"])
def test_deterministic_mode_has_the_same_bits_whichever_cta_comes_first(case):
    batch = batch_of(case)
    first = run(batch, deterministic=True)
    assert not complaints(batch, first)
    for options in (Options("compiled", 9, ("seeded", 4)), Options("compiled", 4, "late")):
        again = run(batch, deterministic=True, options=options)
        assert all(map(torch.equal, first.gradients, again.gradients))
