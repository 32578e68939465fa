"""What docs/contract.md promises and no other test holds; and that the tests that it names exist."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch

from tests.kernels.problems import complaints, is_zero, run
from tests.public_cases.batches import BF16, F16, reported
from undertow.inputs import Shape, complete, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import plan
from undertow.reference import Scoring

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")


def named_tests() -> list[tuple[str, str]]:
    return sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", CONTRACT)))


def test_every_question_is_answered():
    assert re.findall(r"^## (\d+)\. ", CONTRACT, re.MULTILINE) == [str(number) for number in range(1, 15)]
    for answer in re.split(r"^## \d+\. ", CONTRACT, flags=re.MULTILINE)[1:]:
        assert "`tests/" in answer, f"no test: {answer.splitlines()[0]}"


@pytest.mark.parametrize(("path", "name"), named_tests(), ids=lambda word: word.split("/")[-1])
def test_a_test_that_the_contract_names_exists(path, name):
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_what_the_forward_stored_for_a_row_without_keys_is_not_read():
    """64 of 128 rows see nothing: NaN in their out and dlse, and any finite dO, change no bit."""
    batch = random_batch(Shape(1, 128, 64, 2, 1), scoring=Scoring(causal=True))
    batch = dataclasses.replace(batch, dlse=torch.ones_like(batch.lse))
    expected = run(batch).gradients
    assert batch.dlse is not None and (batch.lse[..., :64] == -torch.inf).all()
    batch.out[:, :64], batch.dlse[..., :64], batch.dout[:, :64] = torch.nan, torch.nan, 1e30
    got = run(batch).gradients
    assert is_zero(got.dq[:, :64]) and all(torch.equal(a, b) for a, b in zip(expected, got))


@pytest.mark.parametrize("dout", [2.0**-10, 2.0**-20])
def test_ds_below_the_normal_numbers_of_fp16_loses_what_one_rounding_loses(dout):
    def change(tensors):
        tensors["dout"] *= dout

    batch = reported((150, 150), dtype=F16, change=change)
    assert not complaints(batch, run(batch).gradients)


def test_v_has_the_head_dim_of_q():
    q, k, out, dout, dq, dk, dv = (torch.zeros(1, 8, 1, 64, dtype=BF16) for _ in range(7))
    v = torch.zeros(1, 8, 1, 128, dtype=BF16)
    given = launch.BackwardTensors(q, k, v, out, dout, torch.zeros(1, 1, 8), dq, dk, dv)
    with pytest.raises(launch.LaunchInputError, match=r"v has shape \(1, 8, 1, 128\): must be \(1, 8, 1, 64\)"):
        launch.check_tensors(plan("split"), given)


@pytest.mark.parametrize("factor", [1e2, 1e3])
def test_a_score_costs_its_own_size_in_units_of_float32(factor):
    """Scores of either sign up to 64 000: their error grows with them, and with nothing else."""

    def change(tensors):
        for name in "qk":
            tensors[name] *= factor**0.5

    batch = reported((100, 100), scoring=Scoring(causal=True), change=change)
    assert batch.lse.max() > factor
    assert not complaints(batch, run(batch).gradients)


@pytest.mark.parametrize("lse_in_base_2", [False, True])
def test_lse_is_in_natural_logarithm(lse_in_base_2):
    """With LSE in base 2 the rows of P do not add up to one, and no gradient is right."""
    batch = random_batch(Shape(1, 100, 100, 1))
    tensors = {name: getattr(batch, name) for name in ("q", "k", "v", "dout", "out")}
    lse = batch.lse * torch.tensor(2.0).log().reciprocal() if lse_in_base_2 else batch.lse
    given = complete({**tensors, "lse": lse})
    ones = run(dataclasses.replace(given, dout=torch.ones_like(given.dout))).gradients.dv[0, :, 0, 0].sum().item()
    assert (ones == pytest.approx(100, rel=1e-2)) is not lse_in_base_2
