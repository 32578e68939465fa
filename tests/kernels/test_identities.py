"""Identities that attention obeys whatever its options, asked of the kernels; most need no reference at all."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.problems import complaints, run
from undertow import emulated, emulator
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.reference import Scoring, attention_forward

SCORINGS = {
    "dense": Scoring(),
    "causal": Scoring(causal=True),
    "window": Scoring(window=(60, 25)),
    "left": Scoring(window=(70, None)),
    "softcap": Scoring(softcap=2.0),
    "causal-softcap": Scoring(causal=True, softcap=2.0, softmax_scale=-0.3),
}
LENGTHS = st.tuples(st.integers(1, 200), st.integers(1, 200))
HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 2)])
PROBLEMS = st.tuples(LENGTHS, HEADS, st.sampled_from(sorted(SCORINGS)), st.integers(0, 99))
few = settings(max_examples=12)


def batch_of(problem) -> Batch:
    (seqlen_q, seqlen_k), (heads, kv_heads), name, seed = problem
    return random_batch(Shape(1, seqlen_q, seqlen_k, heads, kv_heads), seed, SCORINGS[name])


def gradients(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Deterministic ones, so that bits mean something."""
    done = emulated.backward(batch, deterministic=True, options=emulator.Options(backend="auto"))
    return done.gradients


@few
@given(PROBLEMS, st.integers(-6, 6))
def test_scaling_dout_by_a_power_of_two_scales_all_gradients_bit_by_bit(problem, power):
    batch = batch_of(problem)
    scaled = dataclasses.replace(batch, dout=batch.dout * 2.0**power)
    for one, other in zip(gradients(batch), gradients(scaled)):
        assert torch.equal(one.float() * 2.0**power, other.float())


@few
@given(PROBLEMS)
def test_a_power_of_two_moves_from_the_scale_to_q_without_a_trace(problem):
    batch = batch_of(problem)
    halved = dataclasses.replace(batch.scoring, softmax_scale=batch.scoring.scale(64) / 2)
    dq, dk, dv = gradients(dataclasses.replace(batch, q=batch.q * 2, scoring=halved))
    expected = gradients(batch)
    assert torch.equal(dq * 2, expected[0]) and torch.equal(dk, expected[1]) and torch.equal(dv, expected[2])


@few
@given(PROBLEMS)
def test_a_common_part_of_v_changes_no_gradient_of_q_and_k(problem):
    """As far as D allows, which is formed from the stored O: both are within their budgets."""
    batch = batch_of(problem)
    v = batch.v + torch.linspace(-2, 2, 64).bfloat16()
    moved = complete({"q": batch.q, "k": batch.k, "v": v, "dout": batch.dout}, batch.scoring)
    assert not complaints(batch, run(batch).gradients) and not complaints(moved, run(moved).gradients)


@few
@given(PROBLEMS)
def test_the_rows_of_dv_add_up_to_those_of_dout(problem):
    """Every row of P adds up to one, or to nothing where a row sees no key."""
    batch = batch_of(problem)
    dv = gradients(batch)[2].double()
    seeing = (batch.lse > -torch.inf).transpose(1, 2)[..., None]
    by_head = torch.where(seeing, batch.dout.double(), 0.0).sum(dim=1)
    expected = by_head.unflatten(1, (dv.shape[2], -1)).sum(dim=2)
    assert (dv.sum(dim=1) - expected).norm() <= 2**-6 * max(1.0, batch.dout.double().norm().item())


@few
@given(PROBLEMS, st.randoms(use_true_random=False))
def test_a_permutation_of_heads_permutes_the_results(problem, random):
    batch = batch_of(problem)
    groups = list(range(batch.k.shape[2]))
    random.shuffle(groups)
    group = batch.q.shape[2] // batch.k.shape[2]
    heads = [group * kv + i for kv in groups for i in range(group)]
    permuted = dataclasses.replace(
        batch,
        **{name: getattr(batch, name)[:, :, heads] for name in ("q", "dout", "out")},
        **{name: getattr(batch, name)[:, :, groups] for name in ("k", "v")},
        lse=batch.lse[:, heads],
    )
    (dq, dk, dv), (pq, pk, pv) = gradients(batch), gradients(permuted)
    assert torch.equal(pq, dq[:, :, heads]) and torch.equal(pk, dk[:, :, groups]) and torch.equal(pv, dv[:, :, groups])


@few
@given(LENGTHS, st.integers(1, 199), st.integers(0, 99))
def test_chunks_of_keys_with_the_final_lse_and_out_add_up(lengths, cut, seed):
    """What a ring does: every chunk reads the O and LSE of all keys; dQ is a sum, dK and dV are side by side."""
    seqlen_q, seqlen_k = lengths
    batch = random_batch(Shape(1, seqlen_q, seqlen_k + 1, 1), seed)
    cut = 1 + cut % seqlen_k
    whole = run(batch).gradients
    parts = [
        run(dataclasses.replace(batch, k=batch.k[:, keys], v=batch.v[:, keys])).gradients
        for keys in (slice(0, cut), slice(cut, None))
    ]
    for name in ("dk", "dv"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(whole, name))
    summed = parts[0].dq.double() + parts[1].dq.double()
    scale = sum(part.dq.double().norm() for part in parts)
    assert (summed - whole.dq.double()).norm() <= 2**-7 * scale


@pytest.mark.parametrize("name", SCORINGS)
def test_the_gradient_is_that_of_our_forward(name):
    """<grad, direction> against a central difference of the float64 forward along it, dLSE included."""
    batch = random_batch(Shape(1, 70, 90, 2, 1), 3, SCORINGS[name])
    generator = torch.Generator().manual_seed(11)
    dlse = torch.randn(batch.lse.shape, generator=generator)
    seeing = batch.lse > -torch.inf
    directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (batch.q, batch.k, batch.v)]

    def loss(step: float) -> Tensor:
        q, k, v = (x.double() + step * d for x, d in zip((batch.q, batch.k, batch.v), directions))
        forward = attention_forward(q, k, v, batch.scoring)
        return (forward.out * batch.dout.double()).sum() + (forward.lse * dlse)[seeing].sum()

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    grads = run(dataclasses.replace(batch, dlse=dlse)).gradients
    along = sum((grad.double() * d).sum() for grad, d in zip(grads, directions))
    size = sum(grad.double().norm() * d.norm() for grad, d in zip(grads, directions))
    assert abs(along - slope) <= 4e-3 * size / 10, "a random direction meets a tenth of the error, and less"
