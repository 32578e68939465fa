"""Packed sequences of any lengths: every sequence as if it were alone, and zeros in every row that nobody uses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.packings import packed_batch, unused
from tests.kernels.problems import complaints, is_zero, run
from undertow import emulator
from undertow.inputs import Batch, complete
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.kernels.sm100.tensors import Sequences
from undertow.plan.attention import Attention
from undertow.reference import Gradients, Scoring

CASES = {
    "one-key-each": (([0, 76, 110, 256], [0, 1, 2, 3]), {}),
    "one-key-each-causal": (([0, 76, 110, 256], [0, 1, 2, 3]), {"causal": True}),
    "no-queries-here-no-keys-there": (([0, 0, 130, 130, 300], [0, 150, 150, 290, 600]), {"causal": True}),
    "more-sequences-than-tokens": (([0, 0, 0, 0, 1], [0, 0, 0, 0, 1], (6, 2)), {}),
    "whole-tiles": (([0, 128, 384], [0, 256, 384], (2, 2)), {"causal": True}),
    "rows-behind-the-last": (([0, 144, 200], [0, 144, 432], (2, 1)), {"rows": (335, 600)}),
    "seqused": (([0, 3, 7, 9], [0, 3, 7, 9], (2, 2), ([2, 3, 1], [2, 3, 1])), {"rows": (9, 9)}),
    "seqused-tiles": (([0, 300, 700], [0, 300, 700], (1, 1), ([129, 0], [128, 257])), {"window": (150, 60)}),
    "window": (([0, 300, 450], [0, 200, 520], (2, 1)), {"window": (100, 20), "rows": (500, 520)}),
}


def check(batch: Batch, gradients: Gradients) -> None:
    """Right where a row is used, zero elsewhere: NaN in rows of nobody has no influence."""
    assert not complaints(batch, gradients)
    unused_q, unused_k = unused(batch.scoring.sequences, len(batch.q), len(batch.k))
    assert is_zero(gradients.dq[unused_q]) and is_zero(gradients.dk[unused_k]) and is_zero(gradients.dv[unused_k])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_rows_of_nobody_have_no_influence_and_get_zeros(schedule, case):
    positional, named = CASES[case]
    batch = packed_batch(*positional, **named)
    check(batch, run(batch, schedule).gradients)


LENGTHS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=5)


@settings(max_examples=25)
@given(LENGTHS, st.integers(0, 150), st.booleans(), st.sampled_from([(None, None), (70, 10), (0, 0)]), st.data())
def test_any_lengths(lengths, behind, causal, window, data):
    """Lengths from zero to two tiles, rows behind the last sequence, some rows of a sequence not used."""
    cu_q, cu_k = [0], [0]
    for q, k in lengths:
        cu_q.append(cu_q[-1] + q)
        cu_k.append(cu_k[-1] + k)
    used_q, used_k = ([data.draw(st.integers(0, pair[side])) for pair in lengths] for side in (0, 1))
    rows = (cu_q[-1] + behind + 1, cu_k[-1] + behind + 1)
    batch = packed_batch(cu_q, cu_k, (2, 1), (used_q, used_k), rows, causal=causal, window=window)
    check(batch, run(batch).gradients)


def test_packed_sequences_give_the_bits_of_dense_ones():
    cu_q, cu_k = [0, 100, 230, 300], [0, 180, 200, 330]
    batch = packed_batch(cu_q, cu_k, (2, 1), causal=True)
    together = run(batch).gradients
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        tensors = {name: getattr(batch, name)[None, rows].clone() for name in ("q", "dout", "out")}
        tensors |= {name: getattr(batch, name)[None, keys].clone() for name in ("k", "v")}
        alone = complete({**tensors, "lse": batch.lse[None, :, rows].clone()}, Scoring(causal=True))
        gradients = run(alone).gradients
        assert torch.equal(gradients.dq[0], together.dq[rows])
        assert torch.equal(gradients.dk[0], together.dk[keys]) and torch.equal(gradients.dv[0], together.dv[keys])


def test_packed_views_of_a_fused_projection_are_read_in_place():
    """q, k and v as slices of one (rows, 3, heads, 64) buffer, whose own rows 230 and more are nobody's."""
    batch = packed_batch([0, 100, 230], [0, 100, 230], (2, 2), rows=(260, 260), causal=True)
    fused = torch.stack([batch.q, batch.k, batch.v], dim=1)
    q, k, v = fused.unbind(1)
    viewed = Batch(q, k, v, batch.dout, batch.out, batch.lse, scoring=batch.scoring)
    for seen, copied in zip(run(viewed).gradients, run(batch).gradients):
        assert torch.equal(seen, copied)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_packing_spills_no_register(schedule):
    main = launch.compile_backward(plan(schedule, attention=Attention(left=True, right=True, packed=True))).main
    resources = main.resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)


def test_lengths_beyond_the_tensor_reach_no_memory():
    """Offsets are device memory that nobody checks: rows that do not exist are cut off, and the rest is right."""
    batch = packed_batch([0, 100, 150], [0, 100, 150])
    tensors = launch.BackwardTensors(
        *(getattr(batch, name) for name in ("q", "k", "v", "out", "dout", "lse")),
        *(torch.full_like(x, torch.nan) for x in (batch.q, batch.k, batch.v)),
        sequences=Sequences(
            *(torch.tensor([0, 100, 150 + beyond], dtype=torch.int32) for beyond in (70, 1000)),
            seqused_k=torch.tensor([100, 2**31 - 1], dtype=torch.int32),
        ),
    )
    for kernel, described in launch.launches(launch.compile_for("split", tensors), tensors):
        emulator.launch(kernel.ptx, described)
    assert not complaints(batch, Gradients(tensors.dq, tensors.dk, tensors.dv))
