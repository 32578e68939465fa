"""Identities of gradients that attention obeys whatever its options: scaling, shifting, counting, the derivative."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.option_sets import (
    OPTION_SETS,
    by_row,
    folded,
    misses,
    problems,
    results,
    seeing,
    share_of_the_sink,
    spans,
)
from tests.kernels.problems import is_zero
from undertow.inputs import Batch, complete
from undertow.reference import Scoring, attention_backward, attention_forward
from undertow.tolerance import yardstick

few = settings(max_examples=3, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
F16 = torch.float16
UNCAPPED = [chosen for chosen in OPTION_SETS if chosen.softcap is None]


@pytest.fixture(params=OPTION_SETS, ids=lambda options: options.name, scope="module")
def options(request):
    """One set after the other, so that kernels are decoded once."""
    return request.param


def remade(batch: Batch, **changes: Tensor) -> Batch:
    """The batch with other inputs, and the out and lse that belong to them."""
    tensors = {"q": batch.q, "k": batch.k, "v": batch.v, "dout": batch.dout, **changes}
    return dataclasses.replace(complete(tensors, batch.scoring), dlse=batch.dlse)


def assert_equal(one: Tensor, other: Tensor, dtype: torch.dtype, subnormal: float) -> None:
    """Bit for bit; in fp16 up to what numbers below 2^-14 lose, and the rounding of the sum that they are in."""
    if dtype == F16:
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-10, atol=subnormal)
    else:
        assert torch.equal(one.float(), other.float())


@few
@given(data=st.data(), power=st.integers(0, 6))
def test_scaling_dout_by_a_power_of_two_scales_all_gradients_bit_by_bit(options, data, power):
    batch = data.draw(problems(options))
    factor = 2.0**power
    scaled = dataclasses.replace(
        batch, dout=batch.dout * factor, dlse=None if batch.dlse is None else batch.dlse * factor
    )
    largest = max(float(x.abs().max()) for x in (batch.q, batch.k))
    sums = 1 + 0.3 * max(batch.q.shape[-3] * batch.q.shape[-2], batch.k.shape[-3]) * largest
    one, other = results(batch, options), results(scaled, options)
    for name, grad in one.items():
        assert_equal(grad.float() * factor, other[name], options.dtype, 2**-24 * (1 + factor) * sums)


@few
@given(data=st.data())
def test_a_power_of_two_moves_from_the_scale_to_q_without_a_trace(options, data):
    batch = data.draw(problems(options))
    halved = dataclasses.replace(batch.scoring, softmax_scale=batch.scoring.scale(64) / 2)
    moved = results(dataclasses.replace(batch, q=batch.q * 2, scoring=halved), options)
    moved["dq"] = moved["dq"].float() * 2
    for name, grad in results(batch, options).items():
        assert_equal(grad, moved[name], options.dtype, 2**-23)


def on_a_grid(x: Tensor) -> Tensor:
    """Multiples of 1/16 up to 4: the sum of two of them is exact in either type."""
    return (x.float() * 16).round().clamp(-64, 64).to(x.dtype) / 16


@few
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_vector_added_to_every_v_leaves_dq_and_dk(options, data, seed):
    batch = data.draw(problems(options, sinks=False))
    plain = remade(batch, v=on_a_grid(batch.v))
    vector = on_a_grid(torch.randn(64, generator=torch.Generator().manual_seed(seed))).to(options.dtype)
    moved = remade(plain, v=plain.v + vector)
    assert torch.equal(moved.v - vector, plain.v)
    true = attention_backward(plain.q, plain.k, plain.v, plain.dout, plain.dlse, plain.scoring)
    assert not misses(moved, results(moved, options), {"dq": true.dq, "dk": true.dk})


@pytest.mark.parametrize("options", UNCAPPED, ids=lambda options: options.name, scope="module")
@few
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_vector_added_to_every_k_leaves_all_gradients(options, data, seed):
    """But for a gradient of LSE, which grows by scale q . vector. A softcap or a sink would see the shift."""
    batch = data.draw(problems(options, sinks=False))
    plain = remade(batch, k=on_a_grid(batch.k))
    vector = on_a_grid(torch.randn(64, generator=torch.Generator().manual_seed(seed))).to(options.dtype)
    moved = remade(plain, k=plain.k + vector)
    true = attention_backward(plain.q, plain.k, plain.v, plain.dout, plain.dlse, plain.scoring)
    shifted = true.dq
    if plain.dlse is not None:
        shifted = shifted + seeing(plain) * plain.scoring.scale(64) * by_row(plain.dlse) * vector.double()
    assert not misses(moved, results(moved, options), {"dq": shifted, "dk": true.dk, "dv": true.dv})


@few
@given(data=st.data(), seed=st.integers(0, 99))
def test_rows_of_ds_add_up_to_nothing(options, data, seed):
    """With equal keys dQ is that sum times the key: 0, but for a gradient of LSE and what a sink takes."""
    batch = data.draw(problems(options))
    key = torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(options.dtype)
    equal = remade(batch, k=key.expand_as(batch.k).contiguous())
    scale, share = equal.scoring.scale(64), share_of_the_sink(equal)
    _, slope = equal.scoring.capped(scale * (equal.q.double() @ key.double()))
    out = attention_forward(equal.q, equal.k, equal.v, equal.scoring).out
    total = share * (equal.dout.double() * out).sum(dim=-1, keepdim=True)
    if equal.dlse is not None:
        total = total + (1 - share) * by_row(equal.dlse)
    expected = scale * (1.0 if slope is None else slope[..., None]) * total * key.double()
    assert not misses(equal, results(equal, options), {"dq": torch.where(seeing(equal), expected, 0.0)})


@few
@given(data=st.data())
def test_the_rows_of_dv_add_up_to_those_of_dout(options, data):
    """Every row of P adds up to one less the sink's share, or to nothing where a row sees no key."""
    batch = data.draw(problems(options))
    rows = torch.where(seeing(batch), batch.dout.double() * (1 - share_of_the_sink(batch)), 0.0)
    expected = folded(rows.sum(dim=-3), batch.k.shape[-2])
    dv = results(batch, options)["dv"].double().sum(dim=-3)
    assert (dv - expected).norm() <= 2**-6 * max(1.0, batch.dout.double().norm().item())


@few
@given(data=st.data())
def test_one_visible_key_gives_dv_and_nothing_else(options, data):
    """Its own key for each row of a window, the only one under other masks. dV is exact where one row makes it."""
    bounds = st.integers(1, 90)
    per_sequence = bounds.map(lambda n: (n, n)) if options.mask == "window" else st.tuples(bounds, st.just(1))
    lengths = st.lists(per_sequence, min_size=1, max_size=3 if options.packed else 1)
    batch = data.draw(problems(options, sinks=False, gradients_of_lse=False, lengths=lengths))
    if options.mask == "window":
        batch = dataclasses.replace(batch, scoring=dataclasses.replace(batch.scoring, window=(0, 0)))
    batch = remade(batch)
    expected = torch.zeros_like(batch.k, dtype=torch.float64)
    seen = torch.where(seeing(batch), batch.dout.double(), 0.0)
    for index, rows, keys in spans(batch):
        own = folded(seen[(*index, slice(rows.start, rows.stop))], batch.k.shape[-2])
        expected[(*index, slice(keys.start, keys.stop))] = own if len(keys) == len(rows) else own.sum(dim=0)
    got = results(batch, options)
    assert not misses(batch, got, {"dq": 0 * batch.q.double(), "dk": 0 * batch.k.double(), "dv": expected})
    if options.mask == "window" and batch.q.shape[-2] == batch.k.shape[-2]:
        assert torch.equal(got["dv"], batch.dout)


@few
@given(data=st.data())
def test_without_q_every_visible_key_counts_alike(options, data):
    """P = 1 / (number of kept keys, and exp(sink)); dV follows, and dK is exactly nothing."""
    batch = data.draw(problems(options))
    batch = remade(batch, q=torch.zeros_like(batch.q))
    extra = 0.0 if batch.scoring.sink is None else batch.scoring.sink.double().exp()
    expected = torch.zeros_like(batch.k, dtype=torch.float64)
    for index, rows, keys in spans(batch):
        kept = batch.scoring.kept(range(len(rows)), len(rows), len(keys))
        kept = torch.ones(len(rows), len(keys), dtype=torch.bool) if kept is None else kept
        number = kept.sum(dim=1)[:, None]
        rate = torch.where(number > 0, 1 / (number + extra).clamp(min=1e-300), 0.0)
        weighted = rate[..., None] * batch.dout[(*index, slice(rows.start, rows.stop))].double()
        sums = torch.einsum("ij,ihd->jhd", kept.double(), weighted)
        expected[(*index, slice(keys.start, keys.stop))] = folded(sums, batch.k.shape[-2])
    got = results(batch, options)
    assert is_zero(got["dk"]) and not misses(batch, got, {"dv": expected})


@few
@given(data=st.data())
def test_the_gradient_is_that_of_our_forward(options, data):
    """<grad, direction> against a central difference of the float64 forward along it, dLSE and sinks included.

    Errors within their budgets, met by a random direction of length 1 per element, are six standard deviations.
    """
    batch = data.draw(problems(options))
    generator = torch.Generator().manual_seed(11)
    at = {"q": batch.q, "k": batch.k, "v": batch.v}
    if batch.scoring.sink is not None:
        at["sink"] = batch.scoring.sink
    along = {name: torch.randn(x.shape, generator=generator, dtype=torch.float64) for name, x in at.items()}

    def loss(step: float) -> float:
        moved = {name: x.double() + step * along[name] for name, x in at.items()}
        scoring: Scoring = dataclasses.replace(batch.scoring, sink=moved.get("sink"))
        out, lse = attention_forward(moved["q"], moved["k"], moved["v"], scoring)
        total = (out * batch.dout.double()).sum()
        if batch.dlse is not None:
            total = total + torch.where(lse > -torch.inf, lse * batch.dlse.double(), 0.0).sum()
        return float(total)

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    got = results(batch, options)
    measure = yardstick(batch, batch.scoring, batch.dlse)
    errors = [budget * denominator for budget, denominator in zip(measure.budget, measure.denominators)]
    if "dsink" in got:
        errors.append(2**-8 * float(batch.dout.double().norm()) + float(got["dsink"].norm()) * 2**-8)
    found = sum(float((got[f"d{name}"].double() * along[name]).sum()) for name in at)
    assert abs(found - slope) <= 6 * sum(error**2 for error in errors) ** 0.5 + 1e-6 * abs(slope) + 1e-7
