"""Reports about launches that are large: grids beyond 65535, offsets beyond 32 bits. Each test names its public thread.

Tensors lie on sparse files or are zeros that nobody has touched, and only the CTAs around the place in question run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.problems import is_zero, run
from tests.kernels.sparse import sparse
from tests.public_cases.batches import BF16, packing, randn, reported
from undertow import emulator
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE
from undertow.kernels.sm100.tensors import BackwardTensors, Sequences, Workspaces, query_tiles
from undertow.reference import Scoring

ROWS = ("q", "k", "v", "out", "dout")


def run_some(tensors: BackwardTensors, folder: Path, ctas: Sequence[int], main: Sequence[int] | None = None) -> None:
    """Those CTAs of each kernel (of the main one perhaps others), with an accumulator of a sparse file."""
    batch, _, heads, _ = tensors.batched.q.shape
    tiles = query_tiles(tensors)
    scalars = torch.zeros(batch, heads, tiles * 128)
    accumulator = sparse(folder, (batch, heads, tiles, DQ_ACCUMULATOR_TILE), torch.float32)
    work = Workspaces(scalars, torch.zeros_like(scalars), accumulator)
    compiled = launch.compile_for("split", tensors)
    for kernel, described in launch.launches(compiled, tensors, workspaces=work):
        order = main if kernel is compiled.main and main is not None else ctas
        emulator.launch(kernel.ptx, described, emulator.Options("auto", cta_order=order))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


@pytest.mark.parametrize("batches", [65535, 65536, 80000])
def test_batches_around_and_beyond_65535(tmp_path, batches):
    """pytorch/pytorch#146704: 8 heads of 4 rows. The elements around the limit equal a batch of these elements."""
    places = torch.tensor([0, 65533, 65534, min(65535, batches - 1), min(65536, batches - 1), batches - 1]).unique()
    small = random_batch(Shape(len(places), 4, 4, 8))
    given: dict[str, Any] = {name: zeros(batches, 4, 8, 64) for name in (*ROWS, "dq", "dk", "dv")}
    for name in ROWS:
        given[name][places] = getattr(small, name)
    lse = torch.zeros(batches, 8, 4)
    lse[places] = small.lse
    ctas = [8 * int(place) + head for place in places for head in range(8)]
    run_some(BackwardTensors(**given, lse=lse), tmp_path, ctas)
    for name, expected in zip(("dq", "dk", "dv"), run(small).gradients):
        assert torch.equal(given[name][places], expected), name


def test_eighty_thousand_packed_sequences(tmp_path):
    """pytorch/pytorch#142228: entries of 16 rows, each of which has tiles of its own."""
    entries, places = 80000, [0, 65534, 65535, 65536, 79999]
    cu = torch.arange(0, 16 * entries + 1, 16, dtype=torch.int32)
    few = [16 * i for i in range(len(places) + 1)]
    small = reported((few[-1], few[-1]), (2, 1), Scoring(sequences=packing(few, few)))
    rows = torch.cat([torch.arange(16 * place, 16 * place + 16) for place in places])
    given = {
        name: zeros(16 * entries, 1 if name in ("k", "v", "dk", "dv") else 2, 64) for name in (*ROWS, "dq", "dk", "dv")
    }
    for name in ROWS:
        given[name][rows] = getattr(small, name)
    lse = torch.zeros(2, 16 * entries)
    lse[:, rows] = small.lse
    tensors = BackwardTensors(**given, lse=lse, sequences=Sequences(cu, cu))
    tiles = [16 * place // 128 + place for place in places]
    run_some(tensors, tmp_path, [tile + head * query_tiles(tensors) for tile in tiles for head in range(2)], tiles)
    for name, expected in zip(("dq", "dk", "dv"), run(small).gradients):
        assert torch.equal(given[name][rows], expected), name


@pytest.mark.parametrize("heads", [65534, 65535, 65536, 196606])
def test_heads_around_and_beyond_65535_that_are_slices(tmp_path, heads):
    """pytorch/pytorch PR 177985: 10 rows; O and dO are slices of the heads of larger tensors."""
    places = torch.tensor([0, 65533, min(65534, heads - 1), min(65535, heads - 1), heads - 2, heads - 1]).unique()
    small = random_batch(Shape(1, 10, 10, len(places)))
    given: dict[str, Any] = {name: zeros(1, 10, heads, 64) for name in ("q", "k", "v", "dq", "dk", "dv")}
    given |= {name: zeros(1, 10, heads + 5, 64)[:, :, 3:-2] for name in ("out", "dout")}
    for name in ROWS:
        given[name][:, :, places] = getattr(small, name)
    lse = torch.zeros(1, heads, 10)
    lse[:, places] = small.lse
    run_some(BackwardTensors(**given, lse=lse), tmp_path, places.tolist())
    for name, expected in zip(("dq", "dk", "dv"), run(small).gradients):
        assert torch.equal(given[name][:, :, places], expected), name


@pytest.mark.parametrize("boundary", [220752, 220753, 220754])
def test_a_row_stride_beyond_32_bits_in_all(tmp_path: Path, boundary: int):
    """Dao-AILab/flash-attention#2611: rows of dO 9728 elements apart; row 220753 is the first beyond 2^31 elements.

    A sequence begins with that row, with the one before or the one behind it.
    """
    stride, total, used = 9728, 220800, 60
    storage = sparse(tmp_path, (stride * total,), BF16)
    far = storage.as_strided((total, 2, 64), (stride, 64, 1))
    cut = boundary - (total - used)
    cu = [0, total - used, boundary, total]
    sequences = packing(cu, [0, 0, 30, 60])
    small = reported((used, 60), (2, 1), Scoring(sequences=packing([0, 0, cut, used], [0, 0, 30, 60])))
    assert 220752 * stride < 2**31 < 220753 * stride

    def spread(x: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(total, *x.shape[1:], dtype=x.dtype)
        wide[-used:] = x
        return wide

    far[-used:] = small.dout
    lse = torch.full((2, total), -torch.inf)
    lse[:, -used:] = small.lse
    scoring = Scoring(sequences=sequences)
    batch = Batch(spread(small.q), small.k, small.v, far, spread(small.out), lse, scoring=scoring)
    got, expected = run(batch).gradients, run(small).gradients
    assert torch.equal(got.dq[-used:], expected.dq) and is_zero(got.dq[:-used])
    assert torch.equal(got.dk, expected.dk) and torch.equal(got.dv, expected.dv)


def test_offsets_of_the_dq_accumulator_beyond_32_bits(tmp_path: Path):
    """Dao-AILab/flash-attention PR 2260: batch 16400, one row, 16 heads make 2.15e9 floats of dQ accumulator.

    Only the CTAs of the last batch element run, on a sparse file: 8.6 GB of addresses, a few pages of memory. One key,
    so dV = dO exactly, and dQ = 0 but for float32 noise.
    """
    batches, heads = 16400, 16
    assert batches * heads * 8192 > 2**31
    dout = torch.zeros(batches, 1, heads, 64, dtype=BF16)
    dout[-1] = randn(0, 1, heads, 64).bfloat16()
    ones = torch.ones(64, dtype=BF16).expand(batches, 1, heads, 64)
    lse = torch.full((batches, heads, 1), 8.0)
    results = [torch.full((batches, 1, heads, 64), torch.nan, dtype=BF16) for _ in range(3)]
    tensors = launch.BackwardTensors(ones, ones, ones, ones, dout, lse, *results)
    flat = sparse(tmp_path, (batches, heads, 1, 8192), torch.float32)
    rows = torch.zeros(batches, heads, 128)
    work = Workspaces(rows, torch.zeros_like(rows), flat)
    last = list(range((batches - 1) * heads, batches * heads))
    for kernel, described in launch.launches(launch.compile_for("split", tensors), tensors, workspaces=work):
        emulator.launch(kernel.ptx, described, emulator.Options("auto", cta_order=last))
    dq, dk, dv = (result[-1] for result in results)
    assert torch.equal(dv, dout[-1]) and dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4
    assert all(result[:-1].isnan().all() for result in results)
