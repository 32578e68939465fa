"""The gate lets the ideal pipeline pass and nobody who is wrong, wherever the error is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.bench.stand_ins import cell_named, ideal_gradients, whole_scoring
from undertow.bench.gate import Gate, Gates, forward_of, places, within
from undertow.bench.workload import workload
from undertow.reference import Gradients, Scoring, attention_backward, attention_forward
from undertow.sweep.matrix import Heads, Size
from undertow.tolerance import relative_error

NAMES = ["gqa-causal-8k-bf16", "mha-dense-32k-bf16", "mqa-local-causal-2k-bf16", "mha-varlen-causal-4k-fp16"]


def loaded(name: str):
    cell = cell_named(name)
    return workload(cell, cell.scaled, "cpu")


@pytest.fixture(scope="module")
def gqa():
    found = loaded("gqa-causal-8k-bf16")
    return found, Gate(found), ideal_gradients(found)


@pytest.mark.parametrize("name", NAMES)
def test_slices_are_exact_and_the_ideal_pipeline_passes(name):
    found = loaded(name)
    gate, scoring = Gate(found), whole_scoring(found)
    q, k, v, dout = (found.shaped(x) for x in (found.q, found.k, found.v, found.dout))
    true = attention_backward(q, k, v, dout, None, scoring)
    group = found.size.heads.q // found.size.heads.kv
    for slices in gate.slices:
        rows, head = slices.place
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        for whole, like, heads, exact in zip(true, (found.q, found.k, found.v), (queries, keys, keys), slices.exact):
            held = whole.reshape(like.shape)[rows, heads]
            assert relative_error(torch.cat([held[part] for part in slices.parts]), exact) < 1e-12
    verdict = gate.verdict(ideal_gradients(found))
    assert verdict.complaint is None
    assert all(0.79 < error / budget < 0.85 for error, budget in zip(verdict.errors, verdict.budget))  # 1 / 1.25


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(causal=True), Scoring(window=(40, 0))])
def test_the_forward_pass_is_that_of_the_reference(scoring):
    q, k, v = (torch.randn(2, 1100, heads, 64, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    for made, want in zip(forward_of(q, k, v, scoring), attention_forward(q, k, v, scoring)):
        assert made.shape == want.shape and relative_error(made, want) < 1e-14


def test_cells_that_differ_in_the_mode_alone_share_what_is_exact(gqa):
    gates = Gates()
    plain, twin, other = (
        gates.of(loaded(name)) for name in (NAMES[0], f"{NAMES[0]}-deterministic", "gqa-dense-8k-bf16")
    )
    assert twin.slices is plain.slices and other.slices is not plain.slices
    assert twin.verdict(gqa[2]) == plain.verdict(gqa[2]) == gqa[1].verdict(gqa[2])


def test_both_ends_of_a_workload_are_looked_at():
    found = loaded("mha-varlen-causal-4k-fp16")
    lengths, chosen = found.size.lengths, list(places(found))
    assert lengths == (256, 96, 0, 160)
    assert [(place.rows, place.kv_head) for place in chosen] == [(slice(0, 256), 1), (slice(256, 352), 0)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_noise_as_large_as_the_budget_is_seen_in_each_gradient(gqa, which):
    _, gate, right = gqa
    wrong = list(right)
    noise = torch.randn(right[which].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    budget = gate.verdict(right).budget[which]
    scaled = noise * (budget * right[which].double().norm() / noise.norm())
    wrong[which] = (right[which].double() + scaled).to(right[which].dtype)
    verdict = gate.verdict(Gradients(*wrong))
    assert verdict.complaint is not None and verdict.complaint.startswith(Gradients._fields[which])
    assert "in slices of the sequence at rows 0 to 300, key/value head 0" in verdict.complaint


@pytest.mark.parametrize(
    "wrong",
    [Scoring(), Scoring(causal=True, window=(200, None)), Scoring(causal=True, softmax_scale=0.126)],
    ids=["no mask", "a window", "another scale"],
)
def test_another_mask_or_scale_is_seen(gqa, wrong):
    found, gate, _ = gqa
    assert gate.verdict(ideal_gradients(found, wrong)).complaint


def test_one_wrong_row_at_the_end_is_seen(gqa):
    _, gate, right = gqa
    wrong = right._replace(dq=right.dq.clone())
    wrong.dq[-1, :4] = 0  # of 300 rows
    assert gate.verdict(wrong).complaint


def test_what_is_not_finite_or_of_another_shape_is_seen_anywhere(gqa):
    _, gate, right = gqa
    hidden = right._replace(dv=right.dv.clone())
    hidden.dv[7, 1, 3] = torch.nan  # of a key/value head without a slice
    assert gate.verdict(hidden).complaint == "dv is not finite everywhere"
    shape = gate.verdict(right._replace(dk=right.dk[:-1])).complaint
    assert shape == "dk is torch.bfloat16 of (299, 2, 64): must be torch.bfloat16 of (300, 2, 64)"
    assert "must be torch.bfloat16" in str(gate.verdict(right._replace(dq=right.dq.float())).complaint)


def test_a_wrong_head_outside_the_slices_disagrees(gqa):
    _, gate, right = gqa
    wrong = right._replace(dk=right.dk.clone())
    wrong.dk[100:200, 1] = 0
    assert gate.verdict(wrong).complaint is None
    assert gate.disagreement(right, right) is None
    assert str(gate.disagreement(wrong, right)).startswith("dk differs by")


@pytest.mark.parametrize("scoring", [Scoring(causal=True), Scoring(window=(3, 2)), Scoring(causal=True, window=(4, 1))])
@pytest.mark.parametrize(("rows", "keys"), [((2, 5), (0, 9)), ((0, 9), (6, 9)), ((0, 1), (0, 9)), ((4, 8), (1, 3))])
def test_a_cut_of_the_mask_is_the_mask_of_the_cut(scoring, rows, keys):
    rows, keys = slice(*rows), slice(*keys)
    whole = scoring.kept(range(9), 9, 9)
    assert whole is not None
    count, width = rows.stop - rows.start, keys.stop - keys.start
    cut = within(scoring, rows, keys).kept(range(count), count, width)
    assert cut is not None and torch.equal(cut, whole[rows, keys])


def test_workloads_are_repeated_by_their_seed():
    cell = cell_named("mha-dense-512-bf16")
    size = Size(Heads(2, 2), (8, 8))
    once, again, other = (workload(cell, size, "cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(once.q, again.q) and not torch.equal(once.q, other.q)
    assert not torch.equal(once.q, once.k)
    assert replace(once, q=once.k).shaped(once.k).shape == (2, 8, 2, 64)
