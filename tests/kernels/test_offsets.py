"""Offsets beyond 32 bits, on files that are sparse: gigabytes of addresses, a few pages of memory.

A batch is spread out so that one dimension of every tensor steps so far that its last element lies beyond 2^31
elements; the results must be the bits of the batch as it was.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.problems import FAST, run
from tests.kernels.sparse import sparse
from undertow import emulated, emulator
from undertow.inputs import Shape, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE
from undertow.kernels.sm100.tensors import BackwardTensors, Workspaces, allocate_workspaces
from undertow.reference import Gradients, Scoring

BEYOND = 2**31
ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


def spread(x: Tensor, dim: int, folder: Path) -> Tensor:
    """A copy of x whose last element in `dim` lies BEYOND elements behind the first; strides are multiples of 8."""
    others = [extent if d != dim else 1 for d, extent in enumerate(x.shape)]
    strides = [0] * x.ndim
    step = 1
    for d in reversed(range(x.ndim)):
        strides[d] = step
        step *= others[d]
    strides[dim] = -(-BEYOND // (x.shape[dim] - 1) // 8) * 8 + -(-step // 8) * 8
    wide = sparse(folder, ((x.shape[dim] - 1) * strides[dim] + step,), x.dtype)
    view = wide.as_strided(x.shape, strides)
    view.copy_(x)
    assert view[(-1,) * x.ndim].data_ptr() - view.data_ptr() > BEYOND * x.element_size()
    return view


def execute(tensors: BackwardTensors, scoring: Scoring, deterministic: bool, work: Workspaces | None = None) -> None:
    settings = emulated.settings_of(scoring, deterministic)
    compiled = launch.compile_for("split", tensors, settings)
    for kernel, described in launch.launches(compiled, tensors, settings, work):
        emulator.launch(kernel.ptx, described, FAST)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_every_tensor_may_reach_beyond_32_bits(tmp_path, dim):
    """LSE and its gradient have no stride along rows to spread: along seqlen they stay as they are."""
    batch = random_batch(Shape(2, 30, 40, 2, 2), scoring=Scoring(causal=True))
    batch = dataclasses.replace(batch, dlse=torch.randn(batch.lse.shape, generator=torch.Generator().manual_seed(1)))
    tensors = emulated.tensors_of(batch)
    views = {name: spread(getattr(tensors, name), dim, tmp_path) for name in ROWS}
    if dim != 1:
        views |= {name: spread(getattr(tensors, name), dim // 2, tmp_path) for name in ("lse", "dlse")}
    far = dataclasses.replace(tensors, **views)
    execute(far, batch.scoring, deterministic=False)
    assert all(torch.equal(a, b) for a, b in zip(run(batch).gradients, Gradients(far.dq, far.dk, far.dv)))


@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "heads"])
def test_every_workspace_may_reach_beyond_32_bits(tmp_path, dim):
    """The accumulator, LSE, D, the turns of deterministic mode and the parts of dsink."""
    scoring = Scoring(causal=True, sink=torch.tensor([0.5, -1.0]))
    batch = random_batch(Shape(2, 260, 260, 2, 1), scoring=scoring)
    near, far = emulated.tensors_of(batch), emulated.tensors_of(batch)
    execute(near, scoring, deterministic=True)
    work = vars(allocate_workspaces(far, deterministic=True))
    execute(far, scoring, True, Workspaces(**{name: spread(x, dim, tmp_path) for name, x in work.items()}))
    assert near.dsink is not None and far.dsink is not None
    for name in ("dq", "dk", "dv", "dsink"):
        assert torch.equal(getattr(near, name), getattr(far, name)), name


def test_a_sequence_of_more_than_2_to_the_31_elements(tmp_path):
    """33.6 million rows: row offsets, and query tiles of the accumulator, beyond 2^31 without any far stride.

    A window lets the keys be seen by the last rows only, and only the CTAs of those rows run before and after.
    """
    rows, used, keys = BEYOND // 64 + 300, 150, 70
    scoring = Scoring(causal=True)
    batch = random_batch(Shape(1, used, keys, 1), scoring=scoring)
    small = emulated.tensors_of(batch)
    execute(small, scoring, deterministic=True)

    long = {name: sparse(tmp_path, (1, rows, 1, 64), torch.bfloat16) for name in ("q", "out", "dout", "dq")}
    for name in ("q", "out", "dout", "dq"):
        long[name][:, -used:] = getattr(small, name)
    lse = torch.full((1, 1, rows), -torch.inf)
    lse[..., -used:] = small.lse
    dk, dv = torch.full_like(small.k, torch.nan), torch.full_like(small.k, torch.nan)
    tensors = dataclasses.replace(small, **long, lse=lse, dk=dk, dv=dv)
    tiles = -(-rows // 128)
    scalars = torch.zeros(1, 1, tiles * 128)
    accumulator = sparse(tmp_path, (1, 1, tiles, DQ_ACCUMULATOR_TILE), torch.float32)
    turns = torch.zeros(1, 1, tiles, dtype=torch.int32)
    work = Workspaces(scalars, torch.zeros_like(scalars), accumulator, turns)
    assert (tiles - 3) * DQ_ACCUMULATOR_TILE >= BEYOND and rows * 64 > BEYOND

    settings = emulated.settings_of(scoring, deterministic=True)
    compiled = launch.compile_for("split", tensors, settings)
    for kernel, described in launch.launches(compiled, tensors, settings, work):
        some = None if kernel is compiled.main else range(tiles - 3, tiles)
        emulator.launch(kernel.ptx, described, emulator.Options("auto", cta_order=some))
    errors = [(x.double() - y.double()).norm() / y.double().norm() for x, y in ((dk, small.dk), (dv, small.dv))]
    assert max(errors) < 2e-3, "rows lie at other places of their tiles, so that sums are made in another order"
    dq = tensors.dq[:, -used:]
    assert (dq.double() - small.dq.double()).norm() < 2e-3 * small.dq.double().norm()
