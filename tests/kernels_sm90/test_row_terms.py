"""The 16-bit terms of LSE and D: as exact as they say, and loud where they cannot be."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.kernels_sm90.passes import complaints, run
from undertow import emulated, emulator
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm90.launch import compile_for, launches
from undertow.kernels.sm90.plan import MOST_OF_TERM, TERM_UNITS, row_term_index
from undertow.kernels.sm90.tensors import Workspaces, allocate_workspaces
from undertow.plan.schema import DType
from undertow.reference import Scoring

TYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}
FLOOR = {DType.BF16: 0.0, DType.F16: 2.0**-35}
ROUNDINGS = 4 * 2.0**-24  # LSE to base 2, times -1 / softmax_scale, which is rounded itself; the terms


def batch_of(dtype: DType, rows: int = 128, scale: float = 1.0) -> Batch:
    return random_batch(Shape(1, rows, 128, 1), 0, Scoring(softmax_scale=scale), TYPES[dtype])


def preprocessed(lse: torch.Tensor, dtype: DType, softcap: float | None = None) -> Workspaces:
    """What preprocess makes of 128 rows of this LSE."""
    batch = batch_of(dtype)
    scoring = dataclasses.replace(batch.scoring, softcap=softcap)
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(scoring, False)
    tensors = dataclasses.replace(tensors, lse=lse.reshape(batch.lse.shape))
    work = allocate_workspaces(tensors, softcap=softcap is not None)
    kernel, launch = launches(compile_for(None, tensors, settings), tensors, settings, work)[0]
    emulator.launch(emulated.program(kernel.ptx, kernel.entry), launch, emulator.Options("auto"))
    return work


def scores_of(lse: torch.Tensor, dtype: DType, softcap: float | None = None) -> torch.Tensor:
    """What preprocess says that has to be added to the scores of each of 128 rows of this LSE, as float64."""
    work = preprocessed(lse, dtype, softcap)
    units = torch.tensor(TERM_UNITS[dtype] * 4, dtype=torch.float64)
    starts = torch.tensor([row_term_index(row, 0) for row in range(128)])
    terms = work.terms.double().flatten()[starts[:, None] + torch.arange(8)]
    return (terms * units).sum(1)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.label)
def test_numbers_of_all_sizes_are_exact_to_the_last_bits(dtype):
    lse = torch.logspace(-9, 6.5, 128) * torch.tensor([1, -1]).repeat(64)
    found = scores_of(lse, dtype)
    errors = (found + lse.double()).abs()
    assert bool((errors <= ROUNDINGS * lse.double().abs() + FLOOR[dtype]).all())


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.label)
def test_numbers_out_of_range_are_nan(dtype):
    most = MOST_OF_TERM[dtype] * TERM_UNITS[dtype][0]
    lse = torch.zeros(128)
    lse[:6] = torch.tensor([0.99 * most, 1.01 * most, -1.01 * most, math.nan, math.inf, -math.inf])
    found = scores_of(lse, dtype)
    assert found[:6].isnan().tolist() == [False, True, True, True, False, False]
    assert bool((found[4:6] <= -most).all()), "rows that attended nothing"


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.label)
def test_under_a_softcap_lse_is_a_number_of_its_own_and_any_will_do(dtype):
    """The tensor cores still multiply what stands in the place of its terms, by zero."""
    lse = torch.logspace(-9, 38, 128) * torch.tensor([1, -1]).repeat(64)
    lse[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    found = preprocessed(lse, dtype, softcap=30.0).lse
    assert found is not None
    found = found.flatten().double()
    assert found[0].isnan() and bool((found[1:3] <= -1e30).all()), "rows that attended nothing"
    wanted = -lse.double()[3:] * math.log2(math.e)
    assert bool(((found[3:] - wanted).abs() <= 2 * 2.0**-24 * wanted.abs()).all())
    assert not scores_of(lse, dtype, softcap=30.0).any()


def test_gradients_of_f16_are_nan_where_a_score_is_out_of_range():
    batch = batch_of(DType.F16, 130, 1e-5)
    lse = batch.lse.clone()
    lse[..., 7] = 50.0  # softmax_scale makes 5e6 of it
    dq, dk, dv = run(dataclasses.replace(batch, lse=lse)).gradients
    assert dq[0, :, 0].isnan().any(1).nonzero().flatten().tolist() == [7]
    assert dk.isnan().all() and dv.isnan().all()


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.label)
def test_a_gradient_of_1e_minus_4_keeps_its_bits(dtype):
    batch = batch_of(dtype, 256, 0.125)
    batch = dataclasses.replace(batch, dout=(batch.dout.float() * 1e-4).to(TYPES[dtype]))
    assert not complaints(batch, run(batch))
