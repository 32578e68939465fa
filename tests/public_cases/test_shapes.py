"""Reports about lengths: tails of tiles, empty sequences, rows of nobody, head dims. Each names its public thread."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.packings import packed_batch
from tests.kernels.problems import FAST, complaints, is_zero, run
from tests.public_cases.batches import BF16, F16, packing, reported
from undertow import emulator
from undertow.inputs import complete
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import HEAD_DIM, plan
from undertow.reference import Scoring, round_to

CAUSAL = Scoring(causal=True)


def test_packed_causal_with_one_key_a_sequence():
    """Dao-AILab/flash-attention#443: only the last row of each sequence sees a key; dV is one there, exactly."""

    def change(tensors):
        for name in "qkv":
            tensors[name] *= 3
        tensors["dout"].fill_(1)

    sequences = packing([0, 76, 110, 256], [0, 1, 2, 3])
    batch = reported((256, 3), scoring=Scoring(causal=True, sequences=sequences), dtype=F16, change=change)
    assert (batch.lse == -torch.inf).sum() == 253
    gradients = run(batch).gradients
    assert torch.equal(gradients.dv, torch.ones_like(gradients.dv)) and not complaints(batch, gradients)
    last = torch.tensor([75, 109, 255])
    others = torch.ones(256, dtype=torch.bool).index_fill(0, last, False)
    assert is_zero(gradients.dq[others])


def test_half_of_the_rows_without_keys_is_right_where_there_are_twice_as_many_rows():
    """Dao-AILab/flash-attention#1778. q = 0 and dO = 1 count: row i, with i - 1023 keys, gives each 1 / (i - 1023)."""

    def change(tensors):
        tensors["q"].zero_()
        tensors["dout"].fill_(1)

    batch = reported((2048, 1024), scoring=CAUSAL, change=change)
    dv = run(batch).gradients.dv[0, :, 0, 0].double()
    keys_of_row = torch.arange(1, 1025, dtype=torch.float64)
    assert keys_of_row.sum() == 524800
    by_key = keys_of_row.reciprocal().flip(0).cumsum(0).flip(0)  # key j is seen by the rows of more than j keys
    assert torch.allclose(dv, by_key, rtol=2**-7, atol=0)
    assert dv[1023].item() == pytest.approx(1 / 1024), "seen by the last row only"
    assert (batch.lse == -torch.inf).sum() == 1024


LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193)


@pytest.mark.parametrize("causal", [False, True])
def test_every_pair_of_lengths_around_tiles(causal):
    """NVIDIA/cutlass#2428: lengths that are no multiple of a tile, and the tile of 64 by 64 of the report."""
    wrong = {}
    for lengths in itertools.product(LENGTHS, LENGTHS):
        batch = reported(lengths, scoring=Scoring(causal=causal))
        wrong[lengths] = complaints(batch, run(batch).gradients)
    assert not {lengths: said for lengths, said in wrong.items() if said}


def test_keys_of_sequences_without_a_query_have_zero_gradients():
    """Dao-AILab/flash-attention#2562, results full of NaN before."""
    cu_q, cu_k = [0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]
    batch = reported((2048, 8192), (4, 1), Scoring(sequences=packing(cu_q, cu_k)))
    gradients = run(batch).gradients
    for grad in (gradients.dk, gradients.dv):
        assert is_zero(grad[:2538]) and is_zero(grad[5120:]) and not is_zero(grad[2538:5120])
    assert not complaints(batch, gradients)


def test_more_sequences_than_tokens_with_grouped_heads():
    """Dao-AILab/flash-attention#1619: one key, so dV is the sum of its three dO."""
    cu = [0, 0, 0, 0, 1]
    batch = reported((1, 1), (21, 7), Scoring(sequences=packing(cu, cu)))
    gradients = run(batch).gradients
    summed = round_to(batch.dout.double().unflatten(1, (7, 3)).sum(dim=2), BF16)
    assert torch.equal(gradients.dv.double(), summed) and not complaints(batch, gradients)


@pytest.mark.parametrize(("cu", "rows"), [([0, 144, 432, 944], 946), ([0, 137, 486], 698)])
def test_rows_behind_the_last_sequence_do_not_touch_the_loss(cu, rows):
    """pytorch/pytorch PR 188933."""
    batch = packed_batch(cu, cu, rows=(rows, rows))
    gradients = run(batch).gradients
    assert all(is_zero(grad[cu[-1] :]) for grad in gradients) and not complaints(batch, gradients)


def test_rows_that_a_sequence_does_not_use_hold_nan():
    """Dao-AILab/flash-attention#2163."""
    batch = packed_batch([0, 3, 7, 9], [0, 3, 7, 9], used=([2, 3, 1], [2, 3, 1]))
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    assert all(is_zero(grad[[2, 6, 8]]) for grad in gradients)


def test_nobody_has_to_know_the_longest_sequence():
    """Dao-AILab/flash-attention#1773: there is no maximum to get wrong."""
    batch = reported((300, 300), scoring=Scoring(causal=True, sequences=packing([0, 300], [0, 300])))
    assert not complaints(batch, run(batch).gradients)


def test_padding_for_context_parallel_gives_nothing():
    """NVIDIA/TransformerEngine#2186: sequences of 8 or 9 tokens padded to a multiple of 4, one half all padding."""
    lengths, padded = [9, 8, 8, 12, 8, 12], [0, 12, 20, 28, 40, 48, 60]
    batch = packed_batch(padded, padded, used=(lengths, lengths), causal=True)
    assert not complaints(batch, run(batch).gradients)


def test_every_head_equals_its_own_run():
    """flagos-ai/FlagGems PR 898: S not a multiple of 64, the tail of head h in head h + 1."""
    batch = reported((100, 100), (4, 2), CAUSAL)
    together = run(batch).gradients
    for head in range(2):
        of_q, of_k = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        parts = {name: getattr(batch, name)[:, :, of_q] for name in ("q", "dout", "out")}
        parts |= {name: getattr(batch, name)[:, :, of_k] for name in ("k", "v")}
        alone = run(complete({**parts, "lse": batch.lse[:, of_q]}, CAUSAL)).gradients
        assert torch.equal(alone.dq, together.dq[:, :, of_q])
        assert torch.equal(alone.dk, together.dk[:, :, of_k]) and torch.equal(alone.dv, together.dv[:, :, of_k])


@pytest.mark.parametrize("head_dim", [48, 56, 128])
def test_other_head_dims_are_refused_by_name(head_dim):
    """tile-ai/tilelang-ascend#1669: padding would change the default scale."""
    tensors = [torch.zeros(1, 8, 1, head_dim, dtype=BF16)] * 5 + [torch.zeros(1, 1, 8)]
    given = launch.BackwardTensors(*tensors, *tensors[:3])
    with pytest.raises(launch.LaunchInputError, match=rf"q has shape \(1, 8, 1, {head_dim}\): must be .*{HEAD_DIM}\)"):
        launch.check_tensors(plan("split"), given)


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 8, 8), (2, 0, 8), (2, 8, 0)])
def test_dense_problems_without_work(batch, seqlen_q, seqlen_k):
    """Dao-AILab/flash-attention PR 2776 and pytorch/pytorch#133780: gradient buffers of the caller, full of NaN."""
    q, out, dout = (torch.ones(batch, seqlen_q, 2, 64, dtype=BF16) for _ in range(3))
    k, v = (torch.ones(batch, seqlen_k, 1, 64, dtype=BF16) for _ in range(2))
    results = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    lse = torch.full((batch, 2, seqlen_q), -torch.inf)
    tensors = launch.BackwardTensors(q, k, v, out, dout, lse, *results)
    for kernel, described in launch.launches(launch.compile_backward(plan("split")), tensors):
        emulator.launch(kernel.ptx, described, FAST)
    assert all(map(is_zero, results))
