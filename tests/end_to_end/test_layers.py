"""Attention layers as published models have them, a thousand tokens long: fewer heads, the same heads to a group.

gpt-oss has 64 query heads on 8, learnable sinks, and layers that alternate between a window of 128 tokens and full
causal attention (openai/gpt-oss, config.json: sliding_window 128). Llama 3.2 1B has 32 on 8 and full causal attention.
Scores of a trained layer spread wider than those of random numbers; q is doubled for that.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from tests.kernels.problems import FAST
from undertow import emulated
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.kernels.sm100.plan import SCHEDULES
from undertow.reference import Scoring
from undertow.tolerance import Yardstick, sink_error, yardstick
from undertow.verify import complaint

TOKENS = 1024
WINDOW = (127, 0)  # 128 tokens, the row's own included
SINKS = torch.linspace(-2.0, 3.0, 16)  # from a sink that hardly counts to one that takes most of a row
LAYERS = {  # heads, key/value heads, scoring
    "gpt-oss-sliding": (16, 2, Scoring(causal=True, window=WINDOW, sink=SINKS)),
    "gpt-oss-full": (8, 1, Scoring(causal=True, sink=SINKS[::2].contiguous())),
    "llama-3.2-1b": (8, 2, Scoring(causal=True)),
}


@functools.cache
def layer(name: str) -> tuple[Batch, Yardstick]:
    heads, kv_heads, scoring = LAYERS[name]
    plain = random_batch(Shape(1, TOKENS, TOKENS, heads, kv_heads), seed=5)
    batch = complete({"q": plain.q * 2, "k": plain.k, "v": plain.v, "dout": plain.dout}, scoring)
    return batch, yardstick(batch, scoring)


def assert_right(name: str, done: emulated.EmulatedBackward) -> None:
    batch, measure = layer(name)
    assert not complaint(measure, done.gradients)
    if done.dsink is not None:
        error, budget = sink_error(batch, done.dsink, batch.scoring)
        assert error <= budget, f"dsink: {error:.3e} > {budget:.3e}"


def assert_equal(one: emulated.EmulatedBackward, other: emulated.EmulatedBackward, names: tuple[str, ...]) -> None:
    for name in names:
        assert torch.equal(getattr(one.gradients, name), getattr(other.gradients, name)), name
    assert (one.dsink is None and other.dsink is None) or torch.equal(one.dsink, other.dsink)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYERS)
def test_all_schedules_are_right_on_a_layer(name):
    batch, _ = layer(name)
    first, *others = (emulated.backward(batch, schedule=schedule, options=FAST) for schedule in SCHEDULES)
    assert_right(name, first)
    for other in others:
        assert not complaint(layer(name)[1], other.gradients)
        assert_equal(first, other, ("dk", "dv"))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_same_bits_on_all_schedules_in_deterministic_mode(name):
    batch, _ = layer(name)
    first, *others = (
        emulated.backward(batch, schedule=schedule, deterministic=True, options=FAST) for schedule in SCHEDULES
    )
    assert_right(name, first)
    shuffled = dataclasses.replace(FAST, schedule=3, completion=("seeded", 3))
    others.append(emulated.backward(batch, deterministic=True, options=shuffled))
    for other in others:
        assert_equal(first, other, ("dq", "dk", "dv"))


def test_the_window_of_a_layer_saves_its_share_of_the_work():
    """Of 8 x 8 tiles a row of tiles keeps 36 in all under the causal mask, 15 under the window, per query head."""
    trips = {name: emulated.backward(layer(name)[0], options=FAST).tile_iterations for name in LAYERS}
    assert trips == {"gpt-oss-sliding": 15 * 16, "gpt-oss-full": 36 * 8, "llama-3.2-1b": 36 * 8}
