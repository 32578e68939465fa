"""Views are read where they lie: whatever the strides of an input, the bits are those of contiguous tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.kernels.packings import packed_batch
from tests.kernels.problems import FAST, run
from undertow import emulated, emulator
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.kernels.sm100 import launch
from undertow.reference import Gradients, Scoring

SCORING = Scoring(causal=True)
INPUTS = ("q", "k", "v", "out", "dout")


def batch_of(heads: int = 4, kv_heads: int = 2) -> Batch:
    return random_batch(Shape(2, 140, 140, heads, kv_heads), scoring=SCORING)


def heads_first(x: Tensor) -> Tensor:
    """(batch, heads, seqlen, 64) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def rows_first(x: Tensor) -> Tensor:
    """(seqlen, batch, heads, 64) in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def fused(x: Tensor) -> Tensor:
    """The middle of three projections that share a row, NaN in the others."""
    rows = torch.full((*x.shape[:2], 3, *x.shape[2:]), torch.nan, dtype=x.dtype)
    rows[:, :, 1] = x
    return rows[:, :, 1]


def every_other_head(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:2], 2 * x.shape[2], 64), torch.nan, dtype=x.dtype)
    wide[:, :, ::2] = x
    return wide[:, :, ::2]


def part_of_a_row(x: Tensor) -> Tensor:
    """The second half of rows of 128 columns, as a head dim that is split in two leaves it."""
    return torch.cat([torch.full_like(x, torch.nan), x], dim=-1)[..., 64:]


LAYOUTS = [heads_first, rows_first, fused, every_other_head, part_of_a_row]


def assert_same_bits(one: Gradients, other: Gradients) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("names", [(name,) for name in INPUTS] + [INPUTS], ids="-".join)
def test_views_give_the_bits_of_contiguous_tensors(layout, names):
    batch = batch_of()
    views = {name: layout(getattr(batch, name)) for name in names}
    assert all(not view.is_contiguous() and torch.equal(view, getattr(batch, name)) for name, view in views.items())
    assert_same_bits(run(batch).gradients, run(dataclasses.replace(batch, **views)).gradients)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_written_where_they_are_wanted(layout):
    """And nowhere else: what lies between the rows of a view stays NaN."""
    batch = batch_of()
    tensors = emulated.tensors_of(batch)
    stores = {name: layout(torch.zeros_like(getattr(tensors, name))) for name in ("dq", "dk", "dv")}
    settings, given = emulated.settings_of(SCORING), dataclasses.replace(tensors, **stores)
    untouched = {name: int(_whole(x).isnan().sum()) for name, x in stores.items()}
    for kernel, described in launch.launches(launch.compile_for("split", given, settings), given, settings):
        emulator.launch(kernel.ptx, described, FAST)
    assert_same_bits(run(batch).gradients, Gradients(**stores))
    assert untouched == {name: int(_whole(x).isnan().sum()) for name, x in stores.items()}


def _whole(view: Tensor) -> Tensor:
    """All that a view's storage holds."""
    return torch.as_strided(view, (view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seqlen", "heads"])
@pytest.mark.parametrize("names", [("k",), ("v",), ("k", "v"), ("dout",), INPUTS], ids="-".join)
def test_expanded_inputs_are_read_in_place(dim, names):
    """Stride 0: the elements of a dimension are one. Each still has a gradient of its own."""
    plain = batch_of()
    tensors = {name: getattr(plain, name) for name in ("q", "k", "v", "dout")}
    for name in set(names) & set(tensors):
        tensors[name] = tensors[name].narrow(dim, 0, 1).expand(tensors[name].shape)
    out = plain.out.narrow(dim, 0, 1).expand(plain.out.shape) if "out" in names else None
    expanded = complete(tensors if out is None else {**tensors, "out": out}, SCORING)
    assert all(getattr(expanded, name).stride(dim) == 0 for name in names)
    copied = dataclasses.replace(expanded, **{name: getattr(expanded, name).contiguous() for name in names})
    assert_same_bits(run(expanded).gradients, run(copied).gradients)


def test_packed_rows_may_have_any_strides_too():
    """Tensor maps of packed sequences step from row to row in two dimensions."""
    batch = packed_batch([0, 100, 230], [0, 140, 230], (2, 2), rows=(260, 260), causal=True)
    views = {name: getattr(batch, name).transpose(0, 1).contiguous().transpose(0, 1) for name in INPUTS}
    assert not any(view.is_contiguous() for view in views.values())
    assert_same_bits(run(batch).gradients, run(dataclasses.replace(batch, **views)).gradients)


@pytest.mark.parametrize("filling", [torch.nan, torch.inf])
def test_lse_may_be_a_view_into_garbage(filling):
    batch = batch_of()
    wide = torch.full((2, 6, 300), filling)
    wide[:, 1:5, 7:147] = batch.lse
    viewed = dataclasses.replace(batch, lse=wide[:, 1:5, 7:147])
    assert_same_bits(run(batch).gradients, run(viewed).gradients)
