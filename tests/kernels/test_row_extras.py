"""What meets single query rows: a gradient of LSE, a learnable sink, the scale; and problems without rows or keys."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.kernels.packings import packed_batch
from tests.kernels.problems import FAST, is_zero, run
from undertow import emulated, emulator
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.kernels.sm100.tensors import Sequences
from undertow.reference import Scoring
from undertow.tolerance import sink_error, yardstick

GPT_OSS = {"causal": True, "window": (127, None)}


def complaints(batch: Batch, done: emulated.EmulatedBackward) -> list[str]:
    """Gradients out of their budget, that of the sink included."""
    measure = yardstick(batch, batch.scoring, batch.dlse)
    errors = list(zip(measure.errors(done.gradients), measure.budget))
    if done.dsink is not None:
        errors.append(sink_error(batch, done.dsink, batch.scoring, batch.dlse))
    named = zip(("dq", "dk", "dv", "dsink"), errors)
    return [f"{name}: {error:.3e} > {budget:.3e}" for name, (error, budget) in named if not error <= budget]


def with_dlse(batch: Batch, seed: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return dataclasses.replace(batch, dlse=torch.randn(batch.lse.shape, generator=generator))


def sinks(heads: int) -> torch.Tensor:
    """Sinks of all sizes: one that takes nearly every row whole, one that takes next to nothing."""
    return torch.linspace(-6.0, 9.0, heads)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(causal=True)], ids=["dense", "causal"])
def test_a_gradient_that_flows_into_lse_reaches_q_and_k(schedule, scoring):
    batch = with_dlse(random_batch(Shape(1, 200, 130, 2, 1), scoring=scoring))
    assert not complaints(batch, run(batch, schedule))


def test_a_gradient_of_lse_alone():
    """Without dO, dS = P dLSE: dQ and dK follow from it, and dV is nothing."""
    batch = with_dlse(random_batch(Shape(1, 32, 32, 1)))
    batch.dout.zero_()
    done = run(batch)
    assert not complaints(batch, done) and is_zero(done.gradients.dv)


def test_a_gradient_of_an_empty_rows_lse_goes_nowhere():
    """LSE = -inf is no function of anything; NaN in its gradient is as good as any number."""
    batch = random_batch(Shape(1, 128, 3, 1), scoring=Scoring(causal=True))
    dlse = torch.full_like(batch.lse, 0.5)
    given = dataclasses.replace(batch, dlse=dlse)
    dlse[..., :125] = torch.nan
    done = run(given)
    assert all(torch.isfinite(grad).all() for grad in done.gradients) and is_zero(done.gradients.dq[:, :125])


@pytest.mark.parametrize("lse", [torch.inf, -torch.inf])
def test_an_infinite_lse_of_either_sign_is_a_row_without_keys(lse):
    """Some forwards store the logarithm of an empty sum with the wrong sign."""
    batch = random_batch(Shape(1, 150, 40, 1))
    batch.lse.fill_(lse)
    assert all(map(is_zero, run(batch).gradients))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{}, GPT_OSS], ids=["dense", "sliding"])
def test_learnable_sinks_take_part_and_learn(schedule, options):
    scoring = Scoring(sink=sinks(4), **options)
    batch = random_batch(Shape(2, 150, 150, 4, 2), scoring=scoring)
    assert not complaints(batch, run(batch, schedule))


def test_a_sink_and_a_gradient_of_lse_together():
    """A row that sees no key has LSE = sink and nothing else: its dLSE is all that reaches the sink."""
    batch = with_dlse(random_batch(Shape(1, 200, 130, 2), scoring=Scoring(causal=True, sink=sinks(2))))
    assert (batch.lse[0, :, 0] == batch.scoring.sink).all(), "the first of 70 rows without keys"
    assert not complaints(batch, run(batch))


def test_sinks_of_packed_sequences_are_those_of_the_sequences():
    batch = packed_batch([0, 0, 130, 300], [0, 20, 150, 350], (4, 2), sink=sinks(4), rows=(400, 350), **GPT_OSS)
    assert not complaints(batch, run(batch))


def test_dsink_has_the_same_bits_in_every_order():
    batch = random_batch(Shape(2, 300, 64, 2), scoring=Scoring(sink=sinks(2)))
    results = [run(batch, options=dataclasses.replace(FAST, schedule=seed)).dsink for seed in (0, 1, 2)]
    assert len({tuple(dsink.tolist()) for dsink in results if dsink is not None}) == 1


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-30, 1e4])
def test_the_scale_may_be_any_number(scale):
    """out(q, -s) = out(-q, s): dQ turns its sign, dK and dV are the same; with 0 every key is as good as another."""
    batch = random_batch(Shape(1, 64, 64, 1), scoring=Scoring(softmax_scale=scale))
    done = run(batch)
    assert not complaints(batch, done)
    if scale == 0:
        assert is_zero(done.gradients.dq) and is_zero(done.gradients.dk)
    turned = dataclasses.replace(batch, q=-batch.q, scoring=Scoring(softmax_scale=-scale))
    other = run(turned).gradients
    assert torch.equal(other.dq, -done.gradients.dq)
    assert torch.equal(other.dk, done.gradients.dk) and torch.equal(other.dv, done.gradients.dv)


def empty_tensors(batch: int, seqlen_q: int, seqlen_k: int) -> launch.BackwardTensors:
    """Results that hold NaN, and inputs that may have no element."""
    rows, keys = (batch, seqlen_q, 2, 64), (batch, seqlen_k, 1, 64)
    q, out, dout, k, v = (torch.ones(size, dtype=torch.bfloat16) for size in (rows, rows, rows, keys, keys))
    lse = torch.full((batch, 2, seqlen_q), -torch.inf)
    dq, dk, dv = (torch.full(size, torch.nan, dtype=torch.bfloat16) for size in (rows, keys, keys))
    return launch.BackwardTensors(q, k, v, out, dout, lse, dq, dk, dv)


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 8, 8), (2, 0, 8), (2, 8, 0), (2, 0, 0)])
def test_problems_without_rows_or_keys_have_zero_gradients(batch, seqlen_q, seqlen_k):
    tensors = empty_tensors(batch, seqlen_q, seqlen_k)
    described = launch.launches(launch.compile_backward(plan("split")), tensors)
    assert all(all(extent > 0 for extent in launch_.grid) for _, launch_ in described)
    for kernel, launch_ in described:
        emulator.launch(kernel.ptx, launch_)
    assert all(map(is_zero, (tensors.dq, tensors.dk, tensors.dv)))


def test_packed_tensors_without_a_row_or_without_a_sequence():
    for cu_q, cu_k in (([0, 0], [0, 5]), ([0, 5], [0, 0]), ([0], [0])):
        rows, keys = (cu_q[-1] + 2, 1, 64), (cu_k[-1], 1, 64)
        q, out, dout, k, v = (torch.full(size, torch.nan).bfloat16() for size in (rows, rows, rows, keys, keys))
        for tensor in (q, out, dout):
            tensor[: cu_q[-1]] = 1.0
        for tensor in (k, v):
            tensor[: cu_k[-1]] = 1.0
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": torch.full((1, rows[0]), -torch.inf)}
        results = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        sequences = Sequences(*(torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)))
        tensors = launch.BackwardTensors(**given, **dict(zip(("dq", "dk", "dv"), results)), sequences=sequences)
        for kernel, described in launch.launches(launch.compile_for("split", tensors), tensors):
            emulator.launch(kernel.ptx, described)
        assert all(map(is_zero, results))


@pytest.mark.parametrize(("batch", "heads"), [(65536 + 3, 1), (1, 65536 + 3)])
def test_more_batch_elements_and_heads_than_a_grid_is_high(batch, heads):
    """One key: dV = dO exactly, on both sides of where a CTA's number would have wrapped at 65536, and nothing else."""
    rows = (batch, 1, heads, 64)
    k = torch.zeros(rows, dtype=torch.bfloat16)
    dout = torch.arange(batch * heads * 64, dtype=torch.float32).remainder(251).reshape(rows).bfloat16()
    lse = torch.zeros(batch, heads, 1)
    tensors = emulated.tensors_of(Batch(k, k, k, dout, torch.zeros_like(k), lse))
    ends = [*range(4), *range(batch * heads - 7, batch * heads)]
    for kernel, described in launch.launches(launch.compile_for("split", tensors), tensors):
        assert math.prod(described.grid) == batch * heads
        emulator.launch(kernel.ptx, described, dataclasses.replace(FAST, cta_order=ends))
    dq, dk, dv = (x.view(-1, 64) for x in (tensors.dq, tensors.dk, tensors.dv))
    assert torch.equal(dv[ends], dout.view(-1, 64)[ends]) and is_zero(dq[ends]) and is_zero(dk[ends])
    assert all(x[4:-7].isnan().all() for x in (dq, dk, dv))


def test_one_key_is_exact_but_for_float32_noise():
    """1 x 1 attention: P = 1, so dV = dO; dP - D cancels to what two orders of a sum of 64 products differ by."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = ((3 * torch.randn(1, 1, 1, 64, generator=generator)).half() for _ in range(3))
        batch = complete({"q": q, "k": k, "v": v, "dout": torch.ones(1, 1, 1, 64).half()})
        done = run(batch)
        assert torch.equal(done.gradients.dv, batch.dout)
        assert not complaints(batch, done)
        assert done.gradients.dq.abs().max() < 1e-4 and done.gradients.dk.abs().max() < 1e-4
