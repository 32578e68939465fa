"""A whole cell on the CPU: everybody is judged, only who is right is timed, and the records say so."""

from __future__ import annotations

import pytest
import torch

from tests.bench.stand_ins import Ideal, Unable, bench_of, cell_named
from undertow.bench.providers import UNDERTOW, Undertow
from undertow.bench.records import BROKEN, MEASURED, UNABLE, WRONG
from undertow.bench.work import backward_flops

CAUSAL = cell_named("gqa-causal-512-bf16")
DETERMINISTIC = cell_named("mha-dense-512-bf16-deterministic")


def zero(gradients, calls):
    gradients.dv[:5] = 0


def break_late(gradients, calls):
    if calls > 1:
        zero(gradients, calls)


def change_a_bit(gradients, calls):
    gradients.dq.view(torch.int16)[0, 0, 0] ^= calls & 1


def explode(gradients, calls):
    raise RuntimeError("illegal memory access")


def test_who_is_right_is_timed_and_who_is_not_is_told():
    providers = [Ideal(UNDERTOW), Ideal("other"), Ideal("wrong", zero), Unable("unable"), Ideal("broken", explode)]
    found = {record.provider: record for record in bench_of(*providers, seconds=0.002).times(CAUSAL)}
    assert {name: record.status for name, record in found.items()} == {
        UNDERTOW: MEASURED,
        "other": MEASURED,
        "wrong": WRONG,
        "unable": UNABLE,
        "broken": BROKEN,
    }
    assert str(found["wrong"].complaint).startswith("dv errs by ")
    assert found["unable"].complaint == "no plain here"
    assert found["broken"].complaint == "RuntimeError: illegal memory access"
    for name in ("wrong", "unable", "broken"):
        assert (found[name].median_ms, found[name].tflops, found[name].calls) == (None, None, None)
    ours = found[UNDERTOW]
    flops = backward_flops(CAUSAL, CAUSAL.scaled)
    assert (ours.median_ms, ours.calls, ours.flops) == (2.0, 2 * 125, flops)
    assert ours.tflops == pytest.approx(flops / 0.002 / 1e12)
    assert ours.share_of_peak == pytest.approx(flops / 0.002 / 989.4e12)
    assert ours.ceiling_tflops == pytest.approx(2 * 64**3 / 0.002 / 1e12)
    assert ours.share_of_ceiling == pytest.approx(flops / (2 * 64**3))
    assert ours.errors is not None and ours.ideal_budget is not None and ours.shape["lengths"] == [128, 128]
    assert (ours.compared_with, found["other"].compared_with) == ("other", None)  # a library is trusted first


def test_a_provider_that_is_wrong_is_not_called_again():
    wrong = Ideal("wrong", zero)
    bench_of(Ideal(), wrong).times(CAUSAL)
    assert wrong.calls == 1


def test_who_is_wrong_after_the_timed_calls_has_no_time():
    (found,) = bench_of(Ideal("late", break_late)).times(CAUSAL)
    assert (found.status, found.tflops) == (WRONG, None)
    assert str(found.complaint).startswith("after the timed calls: dv errs by ")


def test_a_deterministic_cell_wants_equal_bits():
    found = {r.provider: r for r in bench_of(Ideal("same"), Ideal("other bits", change_a_bit)).times(DETERMINISTIC)}
    assert found["same"].status == MEASURED
    assert (found["other bits"].status, found["other bits"].complaint) == (WRONG, "two calls gave other bits of dq")


def test_a_head_outside_the_slices_is_compared_with_a_library():
    def other_head(gradients, calls):
        gradients.dk[:, 1] = 0

    cell = cell_named("gqa-dense-8k-bf16")  # one sequence, two key/value heads: only the first is in slices
    found = {r.provider: r for r in bench_of(Ideal(UNDERTOW, other_head), Ideal("library")).times(cell)}
    assert (found["library"].status, found[UNDERTOW].status) == (MEASURED, WRONG)
    assert str(found[UNDERTOW].complaint).startswith("against library: dk differs by ")


def test_no_time_counts_unless_our_kernels_ran():
    # on the CPU the dispatcher takes the float64 reference: right numbers, and not what is to be measured
    (found,) = bench_of(Undertow()).times(CAUSAL)
    assert found.status == WRONG
    assert "the dispatcher counted {'reference': 1}: all must be of ('sm100', 'sm90')" in str(found.complaint)


def test_every_kind_of_cell_runs():
    for name in ("mqa-local-causal-2k-bf16", "mha-varlen-causal-4k-fp16", "gqa-varlen-1k-fp16-deterministic"):
        (found,) = bench_of(Ideal()).times(cell_named(name))
        assert (found.status, found.cell) == (MEASURED, name)
