"""Reports about numbers: NaN where a value exists, garbage from padding, cancellation, caps, signs of scales.

Each test names the public thread it comes from. Right answers follow from the formulas in `undertow.reference`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.problems import FAST, complaints, is_zero, run
from tests.public_cases.batches import BF16, F16, packing, randn, reported
from undertow import emulated, emulator
from undertow.inputs import Batch, complete
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import plan
from undertow.kernels.sm100.tensors import allocate_workspaces
from undertow.reference import Gradients, Scoring, attention_backward
from undertow.tolerance import yardstick

CAUSAL = Scoring(causal=True)
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])


def one_key(dtype: torch.dtype, grid: float | None = None) -> Batch:
    """A hundred 1 x 1 attentions, each its own batch element; v a multiple of `grid`, if there is one."""
    tensors = {name: 3 * randn(seed, 100, 1, 1, 64) for seed, name in enumerate("qkv")}
    if grid is not None:
        tensors["v"] = (tensors["v"] / grid).round() * grid
    tensors["dout"] = torch.ones(100, 1, 1, 64)
    return complete({name: x.to(dtype) for name, x in tensors.items()})


@DTYPES
def test_one_key_gives_dv_exactly_and_dq_and_dk_to_the_roundings_of_two_sums(dtype):
    """Dao-AILab/flash-attention#334. P = 1, and dP = D but for the order in which 64 products are added.

    Each sum is off by at most 64 roundings of its magnitude, and dS, rounded once more, by both.
    """
    batch = one_key(dtype)
    gradients = run(batch).gradients
    assert torch.equal(gradients.dv, batch.dout) and not complaints(batch, gradients)
    ds = 2 * 64 * 2**-24 * (batch.dout.double() * batch.v.double()).abs().sum(dim=-1, keepdim=True) * (1 + 2**-8)
    assert (gradients.dq.double().abs() <= 0.125 * ds * batch.k.double().abs() * (1 + 2**-8) + 2**-24).all()
    assert (gradients.dk.double().abs() <= 0.125 * ds * batch.q.double().abs() * (1 + 2**-8) + 2**-24).all()


@DTYPES
def test_one_key_gives_exact_zeros_where_no_sum_rounds(dtype):
    """The same with v on a grid of 1/8: both sums are exact, so that dP - D is 0, bit for bit."""
    batch = one_key(dtype, grid=1 / 8)
    gradients = run(batch).gradients
    assert torch.equal(batch.v, batch.out) and torch.equal(gradients.dv, batch.dout)
    assert is_zero(gradients.dq) and is_zero(gradients.dk)


def far_from_zero(seqlen: int, score: int, scoring: Scoring, dtype: torch.dtype = BF16) -> Batch:
    """All scores near `score`, by channel 0 of q and k."""

    def change(tensors):
        for name in "qk":
            tensors[name] *= 0.1
        tensors["q"][..., 0] = 1
        tensors["k"][..., 0] = 8 * score

    return reported((seqlen, seqlen), scoring=scoring, dtype=dtype, change=change)


@DTYPES
@pytest.mark.parametrize("score", [-120, 120])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [64, 192, 128, 640])
def test_scores_far_from_zero(dtype, score, causal, seqlen):
    """pytorch/pytorch#196678: keys beyond the end must not get exp(0 - LSE), which overflows here."""
    batch = far_from_zero(seqlen, score, Scoring(causal=causal), dtype)
    assert not complaints(batch, run(batch).gradients)


@DTYPES
@pytest.mark.parametrize("seqlen", [704, 1216, 1000, 1280])
def test_scores_far_from_zero_at_the_longer_reported_lengths(dtype, seqlen):
    """pytorch/pytorch#196678: causal, as in the report."""
    batch = far_from_zero(seqlen, -120, CAUSAL, dtype)
    assert not complaints(batch, run(batch).gradients)


def test_scores_far_from_zero_at_every_tail_length():
    """pytorch/pytorch#196678: every length of a tile; mask and sign change from one to the next."""
    wrong = {}
    for tail in range(1, 129):
        batch = far_from_zero(tail, 120 if tail % 4 > 1 else -120, Scoring(causal=bool(tail % 2)))
        wrong[tail] = complaints(batch, run(batch).gradients)
    assert not {tail: said for tail, said in wrong.items() if said}


@pytest.mark.parametrize(("seqlen", "published"), [(64, [0.164, 0.677, 3.13]), (704, [0.164, 0.722, 3.37])])
def test_the_published_values_of_the_case_above(seqlen, published):
    """All but dQ in channel 0, where equal keys of -960 are to cancel: any rounding of dS to 16 bits shows there."""
    batch = far_from_zero(seqlen, -120, CAUSAL)
    if seqlen == 64:
        assert batch.lse.min() > -120.01 and batch.lse.max() < -115.83
    dq, dk, dv = run(batch).gradients
    largest = [grad.abs().max().item() for grad in (dq[..., 1:], dk, dv)]
    assert largest == pytest.approx(published, rel=0.01)


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
    assert dk.abs().max().item() == pytest.approx(38.4, rel=0.02)
    assert dq[..., 1:].abs().max().item() == pytest.approx(0.039, rel=0.05)


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.3, 0.4, 0.5, 0.6])
def test_a_common_part_of_v_and_peaked_rows(beta):
    """Dao-AILab/flash-attention#1046: D from the stored O cancels against dP; no kernel that reads O can do better."""

    def change(tensors):
        tensors["v"] += 0 if beta else 100
        tensors["q"] += beta * tensors["k"]

    batch = reported((64, 64), scoring=CAUSAL, change=change)
    assert not complaints(batch, run(batch).gradients)


@pytest.mark.parametrize("offset", [1.0, 100.0])
def test_one_vector_added_to_every_v_leaves_dq_and_dk_within_the_errors_of_both(offset):
    """Dao-AILab/flash-attention#1046. v on a grid that keeps every sum exact, so that nothing but O is rounded anew.

    The true dQ and dK are the same; what the kernel makes of the two may differ by what each may err.
    """

    def on_a_grid(tensors):
        tensors["v"] = tensors["v"].clamp(-3, 3).round()

    plain = reported((64, 64), scoring=CAUSAL, change=on_a_grid)
    common = offset * torch.arange(1, 65).remainder(3).bfloat16()
    moved = complete({"q": plain.q, "k": plain.k, "v": plain.v + common, "dout": plain.dout}, CAUSAL)
    assert torch.equal(moved.v - common, plain.v)
    measures, results = zip(*((yardstick(batch, CAUSAL), run(batch).gradients) for batch in (plain, moved)))
    for name in ("dq", "dk"):
        truths = [getattr(measure.reference, name) for measure in measures]
        assert (truths[0] - truths[1]).norm() < 1e-12 * truths[0].norm()
        allowed = sum(getattr(measure.budget, name) for measure in measures)
        difference = getattr(results[0], name).double() - getattr(results[1], name).double()
        assert difference.norm() <= allowed * truths[0].norm()


def test_softcap_has_its_slope():
    """Dao-AILab/flash-attention PR 2402, with its published values; a cap that no score reaches is no cap."""

    def change(tensors):
        for name in "qk":
            tensors[name] *= 4

    batch = reported((64, 64), scoring=Scoring(causal=True, softcap=15.0), change=change)
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    assert [grad.abs().max().item() for grad in gradients] == pytest.approx([2.521, 2.938, 4.704], rel=0.01)
    free = reported((64, 64), scoring=CAUSAL, change=change)
    capped = dataclasses.replace(free, scoring=Scoring(causal=True, softcap=1e6))
    assert not complaints(free, run(capped).gradients)


def test_softcap_ends():
    """Dao-AILab/flash-attention#2466, with fewer heads. A hang would be a `Deadlock`, which names who waits."""
    batch = reported((1024, 1024), (2, 2), Scoring(causal=True, softcap=10.0))
    assert not complaints(batch, run(batch).gradients)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dout", [1.0, 1e30])
def test_rows_without_keys_poison_nothing(dout, packed, deterministic):
    """pytorch/pytorch#41508: 125 of 128 rows see nothing. The last three have the bits of a run of their own."""

    def change(tensors):
        tensors["dout"][..., :125, :, :] = dout

    sequences = packing([0, 128], [0, 3]) if packed else None
    batch = reported((128, 3), scoring=Scoring(causal=True, sequences=sequences), change=change)
    gradients = emulated.backward(batch, deterministic=deterministic, options=FAST).gradients
    assert is_zero(gradients.dq[..., :125, :, :])
    last = {name: getattr(batch, name)[..., 125:, :, :] for name in ("q", "dout", "out")}
    scoring = Scoring(causal=True, sequences=packing([0, 3], [0, 3]) if packed else None)
    alone = dataclasses.replace(batch, **last, lse=batch.lse[..., 125:], scoring=scoring)
    expected = emulated.backward(alone, deterministic=deterministic, options=FAST).gradients
    assert torch.equal(gradients.dq[..., 125:, :, :], expected.dq) and not complaints(alone, expected)
    assert not complaints(alone, gradients._replace(dq=expected.dq))


@pytest.mark.parametrize("lse", [torch.inf, -torch.inf])
def test_the_logarithm_of_nothing_of_either_sign(lse):
    """Dao-AILab/flash-attention PR 978."""
    batch = reported((70, 40))
    batch.lse.fill_(lse)
    assert all(map(is_zero, run(batch).gradients))


def test_rows_above_a_causal_mask_may_have_an_lse_of_either_sign():
    """flashinfer-ai/flashinfer#4484: with more rows than keys O is 0 and LSE -inf; a forward that says +inf is fine."""
    batch = reported((200, 70), scoring=CAUSAL)
    empty = batch.lse == -torch.inf
    assert int(empty.sum()) == 130 and is_zero(batch.out[:, :130])
    other = dataclasses.replace(batch, lse=batch.lse.clone())
    expected = run(batch).gradients
    other.lse[empty] = torch.inf
    assert all(torch.equal(a, b) for a, b in zip(expected, run(other).gradients))


@DTYPES
@pytest.mark.parametrize("factor", [1, 3, 10, 30])
def test_inputs_of_any_size(dtype, factor):
    """Dao-AILab/flash-attention#1052."""

    def change(tensors):
        for name in "qkv":
            tensors[name] *= factor

    batch = reported((1024, 1024), scoring=CAUSAL, dtype=dtype, change=change)
    assert not complaints(batch, run(batch).gradients)


def test_ds_that_fp16_cannot_hold_is_infinite_and_never_a_wrong_number():
    """HKUSTDial/flash-sparse-attention#180: dS = 9.6e5 is an operand of 16 bits, although dQ = 240.1 would fit.

    The documented limit of fp16; dV does not meet dS and is right, and bf16 has the range.
    """
    k = torch.tensor([1e-3, -1e-3]).view(1, 2, 1, 1).expand(1, 2, 1, 64)
    tensors = {"q": torch.zeros(1, 1, 1, 64), "k": k, "v": k.sign(), "dout": torch.full((1, 1, 1, 64), 3e4)}
    half, brain = (complete({name: x.to(dtype) for name, x in tensors.items()}) for dtype in (F16, BF16))
    gradients = run(half).gradients
    assert torch.isinf(gradients.dq).all() or torch.isnan(gradients.dq).all()
    assert torch.equal(gradients.dv, torch.full_like(gradients.dv, 15000))
    right = run(brain).gradients
    assert not complaints(brain, right) and is_zero(right.dk)
    assert right.dq.double().mean().item() == pytest.approx(240.1, rel=0.01)


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-30, 1e4])
def test_scales_of_either_sign_and_zero(scale):
    """pytorch/pytorch PR 105202: out(q, -s) = out(-q, s)."""
    batch = reported((64, 64), scoring=Scoring(softmax_scale=scale, causal=True))
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    if scale == 0:
        assert is_zero(gradients.dq) and is_zero(gradients.dk), "P is uniform over the kept keys"
    turned = dataclasses.replace(batch, q=-batch.q, scoring=Scoring(softmax_scale=-scale, causal=True))
    dq, dk, dv = run(turned).gradients
    assert torch.equal(-dq, gradients.dq) and torch.equal(dk, gradients.dk) and torch.equal(dv, gradients.dv)


@pytest.mark.parametrize(
    ("filling", "lengths"), [(torch.nan, range(65, 128)), (torch.inf, (65, 127)), (-torch.inf, (65, 127))], ids=str
)
def test_what_a_workspace_held_before_does_not_matter(filling, lengths):
    """facebookresearch/xformers PR 391: the padded tail of LSE and of D, at every length that leaves one."""
    compiled = launch.compile_backward(plan("split"))
    kernels = compiled.preprocess, compiled.main, compiled.postprocess
    programs = {kernel: emulator.load_program(kernel.ptx, kernel.entry) for kernel in kernels}
    for seqlen in lengths:
        batch = reported((seqlen, 100))
        padded = torch.full((1, 2, 128), filling)
        padded[:, :1, :seqlen] = batch.lse
        tensors = dataclasses.replace(emulated.tensors_of(batch), lse=padded[:, :1, :seqlen])
        work = allocate_workspaces(tensors)
        for buffer in (work.lse_log2, work.d, work.dq_accumulator):
            buffer.fill_(filling)
        for kernel, described in launch.launches(compiled, tensors, workspaces=work):
            emulator.launch(programs[kernel], described, FAST)
        expected = run(batch).gradients
        assert all(torch.equal(a, b) for a, b in zip(expected, Gradients(tensors.dq, tensors.dk, tensors.dv))), seqlen


@pytest.mark.parametrize("seqlen", [256, 257, 384, 385])
def test_a_large_linear_bias(seqlen):
    """pytorch/pytorch#153799: scores i - j, by two channels of q and k."""

    def change(tensors):
        place = torch.arange(seqlen, dtype=torch.float32)[None, :, None]
        tensors["q"][..., 0], tensors["q"][..., 1] = 8 * place, 8
        tensors["k"][..., 0], tensors["k"][..., 1] = 1, -place

    batch = reported((seqlen, seqlen), scoring=CAUSAL, change=change)
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    if seqlen == 257:
        assert [batch.lse.min().item(), batch.lse.max().item()] == pytest.approx([-0.21, 257.36], abs=0.01)
        assert [grad.abs().max().item() for grad in gradients] == pytest.approx([3.76, 3838, 22.4], rel=0.01)


def test_a_seed_is_a_seed():
    """The inputs above are those of the published values only if the generator is the same."""
    assert randn(0, 2).tolist() == pytest.approx([1.540996, -0.293429], abs=1e-6)
