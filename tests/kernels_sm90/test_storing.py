"""Turns that nobody asked for: where they are taken, and that everything that follows from a variant follows them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from undertow.kernels.sm90 import call
from undertow.kernels.sm90.parts import WAVE
from undertow.kernels.sm90.storing import ITEMS_PER_CTA, MOST_ADDERS, MOST_ALONE, MOST_DIVIDED, takes_turns
from undertow.kernels.sm100 import call as sm100
from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.tensors import BackwardTensors, Sequences
from undertow.plan.attention import Attention
from undertow.plan.schema import DType
from undertow.plan.tiles import Band

ENOUGH = ITEMS_PER_CTA * WAVE


def of_shape(batch: int, seqlen: int, heads: int, kv_heads: int, sequences: Sequences | None = None) -> BackwardTensors:
    lead = (seqlen,) if sequences else (batch, seqlen)
    q, k = (torch.empty(*lead, n, 64, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads))
    lse = torch.empty(*lead[:-1], heads, seqlen, device="meta")
    return BackwardTensors(q, k, k, q, q, lse, q, k, k, sequences=sequences)


@pytest.mark.parametrize(
    ("shape", "settings", "expected"),
    [
        ((128, 512, 32, 32), Settings(), True),
        ((32, 2048, 32, 8), Settings(causal=True), True),
        ((16, 4096, 32, 32), Settings(causal=True), True),
        ((16, 4096, 32, 8), Settings(causal=True), False),
        ((8, 8192, 32, 32), Settings(causal=True), False),
        ((64, 1024, 32, 1), Settings(causal=True), True),
        ((32, 2048, 32, 1), Settings(causal=True), False),
        ((2, 32768, 32, 32), Settings(window=(256, 0)), True),
        ((2, 32768, 32, 32), Settings(window=(256, None)), False),
        ((1, 512, 32, 32), Settings(), False),
        ((128, 512, 32, 32), Settings(softcap=30.0), False),
        ((1, 512, 32, 32), Settings(deterministic=True), True),
    ],
)
def test_short_sequences_that_fill_the_machine_take_turns(shape, settings, expected):
    """What was measured to be as fast or faster, docs/hopper.md; buffers and order are those of the mode."""
    tensors = of_shape(*shape)
    variant = call.variant_of(None, tensors, settings)
    assert (variant.attention.deterministic, variant.rows.deterministic) == (expected, expected)
    asked = call.variant_of(None, tensors, dataclasses.replace(settings, deterministic=True))
    same = [asked == variant, call.workspace_floats(asked, tensors) == call.workspace_floats(variant, tensors)]
    assert same == [expected, expected]
    if expected:
        assert call.numbers_of(asked, tensors, settings, 132) == call.numbers_of(variant, tensors, settings, 132)


def test_packed_sequences_are_as_long_as_their_mean():
    offsets = torch.empty(129, dtype=torch.int32, device="meta")
    packed = of_shape(1, 65536, 32, 32, Sequences(offsets, offsets))
    assert call.variant_of(None, packed, Settings()).attention.deterministic
    few = Sequences(offsets[:3], offsets[:3])
    assert not call.variant_of(None, of_shape(1, 65536, 32, 32, few), Settings()).attention.deterministic


def test_the_bounds_are_those_that_are_said():
    divided = Attention(right=True, split=True)
    for attention, group, most in [
        (Attention(), 1, MOST_ALONE),
        (Attention(), 2, MOST_ADDERS),
        (divided, 8, MOST_DIVIDED),
    ]:
        keys = most * 128
        for seqlen_k, items, expected in [(keys, ENOUGH, True), (keys + 1, ENOUGH, False), (keys, ENOUGH - 1, False)]:
            assert takes_turns(attention, group, seqlen_k, Band(), items) is expected
    assert takes_turns(Attention(), 8, 10**6, Band(100, -100), ENOUGH)  # one key for each row


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("causal", ["causal", "causal-deterministic", "causal-split", "causal-deterministic-split"]),
        ("dense-deterministic", ["dense-deterministic", "dense-deterministic-split"]),
        ("window-softcap", ["window-softcap", "window-softcap-split"]),
    ],
)
def test_all_that_sizes_may_choose_is_known_ahead(name, expected):
    used = call.used_for(call.variant_named(name, DType.BF16))
    assert [variant.attention.name for variant in used] == expected
    assert all(variant.attention.deterministic == variant.rows.deterministic for variant in used)
    blackwell = sm100.variant_named(name, DType.BF16)
    assert sm100.used_for(blackwell) == (blackwell,)
