"""Softcap: scores bent by tanh before the softmax, and the slope of tanh in dS."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.packings import packed_batch
from tests.kernels.problems import complaints, run
from undertow.inputs import Shape, complete, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.attention import Attention
from undertow.reference import Scoring

MASKS = {"dense": {}, "causal": {"causal": True}, "window": {"window": (100, 40)}, "left": {"window": (90, None)}}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_are_right_under_a_softcap(schedule, mask):
    batch = random_batch(Shape(1, 200, 260, 2, 1), scoring=Scoring(softcap=1.5, **MASKS[mask]))
    assert not complaints(batch, run(batch, schedule).gradients)


def steep(softcap: float | None, factor: float, dtype: torch.dtype = torch.bfloat16):
    """q and k so large that scores reach the cap: the published case has factor 4 and a cap of 15."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 64, 1, 64, generator=generator) for _ in range(4))
    tensors = {"q": (factor * q).to(dtype), "k": (factor * k).to(dtype), "v": v.to(dtype), "dout": dout.to(dtype)}
    return complete(tensors, Scoring(causal=True, softcap=softcap))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("softcap", "factor"), [(15.0, 4.0), (50.0, 10.0), (0.01, 1.0), (2.0, 30.0), (1e3, 4.0)])
def test_scores_at_and_beyond_the_cap(softcap, factor, dtype):
    batch = steep(softcap, factor, dtype)
    assert not complaints(batch, run(batch).gradients)


@pytest.mark.parametrize("softcap", [1e5, 1e6, 1e30])
def test_a_cap_out_of_reach_is_no_cap(softcap):
    """tanh of a tiny number must keep its relative precision, or the cap would multiply its error."""
    capped, free = steep(softcap, 4.0), steep(None, 4.0)
    for with_cap, without in zip(run(capped).gradients, run(free).gradients):
        assert (with_cap.double() - without.double()).norm() < 1e-3 * without.double().norm()
    assert not complaints(free, run(capped).gradients)


def test_a_softcap_meets_packed_sequences_sinks_and_a_negative_scale():
    options = {"causal": True, "softcap": 2.0, "softmax_scale": -0.3, "sink": torch.tensor([0.5, -1.0])}
    batch = packed_batch([0, 0, 130, 200], [0, 20, 180, 270], (2, 1), rows=(230, 270), **options)
    assert not complaints(batch, run(batch).gradients)


def test_masked_pairs_stay_out_whatever_the_scale():
    for scale in (0.0, -5.0, 40.0):
        batch = random_batch(Shape(1, 150, 150, 1), scoring=Scoring(scale, causal=True, softcap=3.0))
        assert not complaints(batch, run(batch).gradients)


FLAGS = [{}, {"right": True}, {"left": True}, {"left": True, "right": True}]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "dense")
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "packed"])
def test_a_softcap_spills_no_register(schedule, flags, packed):
    """tanh, P and its weight are all alive for a while; dS needs only the weight."""
    attention = Attention(softcap=True, packed=packed, **flags)
    resources = launch.compile_backward(plan(schedule, attention=attention)).main.resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)


@pytest.mark.parametrize("softcap", [1e-16, 1e30])
def test_pairs_that_are_not_seen_stay_out_of_the_smallest_and_the_largest_cap(softcap):
    batch = random_batch(Shape(1, 150, 150, 1), scoring=Scoring(causal=True, softcap=softcap))
    assert not complaints(batch, run(batch).gradients)


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan"), float("inf"), 1e-17, 1e31])
def test_a_cap_that_is_no_cap_is_refused(softcap):
    batch = random_batch(Shape(1, 8, 8, 1))
    with pytest.raises(launch.LaunchInputError, match=r"softcap=.*: must be in \[1e-16, 1e\+30\], or None"):
        run(dataclasses.replace(batch, scoring=dataclasses.replace(batch.scoring, softcap=softcap)))
