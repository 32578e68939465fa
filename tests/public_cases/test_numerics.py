"""Reports about numbers: NaN where a value exists, garbage from padding, cancellation, caps, signs of scales.

Each test names the public thread it comes from. Right answers follow from the formulas in `undertow.reference`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.problems import complaints, is_zero, run
from tests.public_cases.batches import BF16, F16, randn, reported
from undertow import emulated, emulator
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.tensors import allocate_workspaces
from undertow.reference import Gradients, Scoring, attention_backward
from undertow.tolerance import yardstick

CAUSAL = Scoring(causal=True)
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])


@DTYPES
def test_one_key_has_dv_exact_and_dq_and_dk_zero_up_to_float32(dtype):
    """Dao-AILab/flash-attention#334. P = 1 and dP = D; the two are summed in different orders, hence not bit by bit."""

    def change(tensors):
        for name in "qkv":
            tensors[name] *= 3
        tensors["dout"].fill_(1)

    batch = reported((1, 1), dtype=dtype, change=change)
    gradients = run(batch).gradients
    assert torch.equal(gradients.dv, batch.dout) and not complaints(batch, gradients)
    assert gradients.dq.abs().max() < 1e-4 and gradients.dk.abs().max() < 1e-4


@DTYPES
@pytest.mark.parametrize("score", [-120, 120])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [64, 192, 704, 128, 640])
def test_scores_far_from_zero_at_every_tail_length(dtype, score, causal, seqlen):
    """pytorch/pytorch#196678: keys beyond the end must not get exp(0 - LSE), which overflows here."""

    def change(tensors):
        for name in "qk":
            tensors[name] *= 0.1
        tensors["q"][..., 0] = 1
        tensors["k"][..., 0] = 8 * score

    batch = reported((seqlen, seqlen), scoring=Scoring(causal=causal), dtype=dtype, change=change)
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)


def test_the_published_values_of_the_case_above():
    """All but dQ in channel 0, where equal keys of -960 are to cancel: any rounding of dS to 16 bits shows there."""

    def change(tensors):
        for name in "qk":
            tensors[name] *= 0.1
        tensors["q"][..., 0] = 1
        tensors["k"][..., 0] = -960

    batch = reported((64, 64), scoring=CAUSAL, change=change)
    assert batch.lse.min() > -120.01 and batch.lse.max() < -115.83
    dq, dk, dv = run(batch).gradients
    largest = [grad.abs().max().item() for grad in (dq[..., 1:], dk, dv)]
    assert largest == pytest.approx([0.164, 0.677, 3.13], rel=0.01)


def test_valid_scores_of_minus_a_hundred_thousand_are_not_masked_ones():
    """flashinfer-ai/flashinfer#4267. An fp32 score of that size is good to 2^-7, so P to one percent.

    In channel 0 of dQ keys of -1880 are to cancel, as in the case above.
    """

    def change(tensors):
        for name in "qk":
            tensors[name] *= 0.1
        tensors["q"][..., 0] = 448
        tensors["k"][..., 0] = -1880

    batch = reported((4, 64), change=change)
    assert batch.lse.min().item() == pytest.approx(-105275.84, rel=1e-6)
    true = attention_backward(batch.q, batch.k, batch.v, batch.dout)
    dq, dk, dv = run(batch).gradients
    for got, want in ((dq[..., 1:], true.dq[..., 1:]), (dk, true.dk), (dv, true.dv)):
        assert (got.double() - want).norm() <= 0.02 * want.norm()
    assert true.dk.abs().max().item() == pytest.approx(38.4, abs=0.1)


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.6])
def test_a_common_part_of_v_and_peaked_rows(beta):
    """Dao-AILab/flash-attention#1046: D from the stored O cancels against dP; no kernel that reads O can do better."""

    def change(tensors):
        tensors["v"] += 0 if beta else 100
        tensors["q"] += beta * tensors["k"]

    batch = reported((64, 64), scoring=CAUSAL, change=change)
    assert not complaints(batch, run(batch).gradients)


def test_softcap_has_its_slope():
    """Dao-AILab/flash-attention PR 2402, with its published values."""

    def change(tensors):
        for name in "qk":
            tensors[name] *= 4

    batch = reported((64, 64), scoring=Scoring(causal=True, softcap=15.0), change=change)
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    assert [grad.abs().max().item() for grad in gradients] == pytest.approx([2.521, 2.938, 4.704], rel=0.01)


def test_softcap_ends():
    """Dao-AILab/flash-attention#2466, smaller."""
    batch = reported((260, 260), (2, 2), Scoring(causal=True, softcap=10.0))
    assert all(torch.isfinite(grad).all() for grad in run(batch).gradients)


@pytest.mark.parametrize("dout", [1.0, 1e30])
def test_rows_without_keys_poison_nothing(dout):
    """pytorch/pytorch#41508: 125 of 128 rows see nothing."""

    def change(tensors):
        tensors["dout"][:, :125] = dout

    batch = reported((128, 3), scoring=CAUSAL, change=change)
    gradients = run(batch).gradients
    assert is_zero(gradients.dq[:, :125])
    last = {name: getattr(batch, name)[:, 125:] for name in ("q", "dout", "out")}
    alone = dataclasses.replace(batch, **last, lse=batch.lse[..., 125:])
    assert not complaints(alone, gradients._replace(dq=gradients.dq[:, 125:]))


@pytest.mark.parametrize("lse", [torch.inf, -torch.inf])
def test_the_logarithm_of_nothing_of_either_sign(lse):
    """Dao-AILab/flash-attention PR 978."""
    batch = reported((70, 40))
    batch.lse.fill_(lse)
    assert all(map(is_zero, run(batch).gradients))


@DTYPES
@pytest.mark.parametrize("factor", [1, 3, 10, 30])
def test_inputs_of_any_size(dtype, factor):
    """Dao-AILab/flash-attention#1052."""

    def change(tensors):
        for name in "qkv":
            tensors[name] *= factor

    batch = reported((400, 400), scoring=CAUSAL, dtype=dtype, change=change)
    assert not complaints(batch, run(batch).gradients)


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-30, 1e4])
def test_scales_of_either_sign_and_zero(scale):
    """pytorch/pytorch PR 105202: out(q, -s) = out(-q, s)."""
    batch = reported((64, 64), scoring=Scoring(softmax_scale=scale, causal=True))
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    turned = dataclasses.replace(batch, q=-batch.q, scoring=Scoring(softmax_scale=-scale, causal=True))
    dq, dk, dv = run(turned).gradients
    assert torch.equal(-dq, gradients.dq) and torch.equal(dk, gradients.dk) and torch.equal(dv, gradients.dv)


@pytest.mark.parametrize("filling", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("seqlen", [65, 127])
def test_what_a_workspace_held_before_does_not_matter(filling, seqlen):
    """facebookresearch/xformers PR 391: the padded tail of LSE and of D."""
    batch = reported((seqlen, 100))
    tensors = emulated.tensors_of(batch)
    work = allocate_workspaces(tensors)
    for buffer in (work.lse_log2, work.d, work.dq_accumulator):
        buffer.fill_(filling)
    for kernel, described in launch.launches(launch.compile_for("split", tensors), tensors, workspaces=work):
        emulator.launch(kernel.ptx, described)
    expected = run(batch).gradients
    assert all(torch.equal(a, b) for a, b in zip(expected, Gradients(tensors.dq, tensors.dk, tensors.dv)))


@pytest.mark.parametrize("seqlen", [256, 257, 384, 385])
def test_a_large_linear_bias(seqlen):
    """pytorch/pytorch#153799: scores i - j, by two channels of q and k."""

    def change(tensors):
        place = torch.arange(seqlen, dtype=torch.float32)[None, :, None]
        tensors["q"][..., 0], tensors["q"][..., 1] = 8 * place, 8
        tensors["k"][..., 0], tensors["k"][..., 1] = 1, -place

    batch = reported((seqlen, seqlen), scoring=CAUSAL, change=change)
    measure = yardstick(batch, CAUSAL)
    errors = measure.errors(run(batch).gradients)
    assert measure.accepts(errors)


def test_a_seed_is_a_seed():
    """The inputs above are those of the published values only if the generator is the same."""
    assert randn(0, 2).tolist() == pytest.approx([1.540996, -0.293429], abs=1e-6)
