"""The matrix: 124 cells, no two alike at any size, and every value of every axis in company of the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from undertow.plan.tiles import Tiling, band
from undertow.sweep.matrix import CELLS, DTYPES, KINDS, LAYOUTS, SEQLENS, Cell

HALF = [cell for cell in CELLS if not cell.deterministic]


def axes(cell: Cell) -> tuple:
    return (cell.layout, cell.kind, cell.causal, cell.seqlen, cell.dtype)


def test_there_are_124_and_all_have_names_of_their_own():
    assert len(CELLS) == 124
    assert len({cell.name for cell in CELLS}) == len(set(CELLS)) == 124


def test_names_say_what_a_cell_is():
    assert {
        "mha-dense-512-bf16",
        "mqa-causal-32k-bf16-deterministic",
        "gqa-causal-8k-fp16",
        "gqa-local-1k-fp16",
        "mqa-local-causal-2k-bf16",
        "mha-varlen-causal-32k-bf16-deterministic",
    } <= {cell.name for cell in CELLS}


def test_the_deterministic_half_is_the_other_half():
    assert sorted(map(axes, HALF)) == sorted(axes(cell) for cell in CELLS if cell.deterministic)


def test_the_core_is_every_length_of_every_layout_dense_and_causal():
    core = {(c.layout, c.causal, c.seqlen) for c in HALF if c.kind == "plain" and c.dtype == "bf16"}
    assert core == set(product(LAYOUTS, (False, True), SEQLENS))
    assert SEQLENS == (512, 1024, 2048, 4096, 8192, 16384, 32768)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_in_every_length_layout_with_dtype_and_dtype_with_mask(kind):
    cells = [cell for cell in HALF if cell.kind == kind]
    assert {cell.seqlen for cell in cells} == set(SEQLENS)
    assert {(cell.layout, cell.dtype) for cell in cells} == set(product(LAYOUTS, DTYPES))
    assert {(cell.dtype, cell.causal) for cell in cells} == set(product(DTYPES, (False, True)))


@pytest.mark.parametrize("cell", HALF, ids=lambda cell: cell.name)
def test_the_full_size_is_the_published_one(cell):
    assert cell.full.tokens == 65536
    assert cell.full.heads == {"mha": (32, 32), "gqa": (32, 8), "mqa": (32, 1)}[cell.layout]
    assert max(cell.full.lengths) == cell.seqlen


@pytest.mark.parametrize("cell", HALF, ids=lambda cell: cell.name)
def test_scaling_keeps_the_ratio_of_heads_and_the_kind(cell):
    full, scaled = cell.full, cell.scaled
    assert full.heads.q * scaled.heads.kv == full.heads.kv * scaled.heads.q
    assert full.packed == scaled.packed == (cell.kind == "varlen")
    assert (full.window == (None, None)) == (scaled.window == (None, None)) == (cell.kind != "local")
    assert (full.window[1] == 0) == (scaled.window[1] == 0)
    assert replace(scaled, heads=None) == replace(cell.watched, heads=None)
    assert cell.watched.heads.q // cell.watched.heads.kv == min(4, full.heads.q // full.heads.kv)
    assert len(set(scaled.lengths)) == (4 if scaled.packed else 1)
    assert 1 <= -(-max(scaled.lengths) // 128) <= 4


def test_no_two_cells_are_the_same_problem_in_emulation():
    problems = Counter((c.scaled, c.causal, c.dtype, c.deterministic) for c in CELLS)
    assert set(problems.values()) == {1}


def test_longer_cells_stay_longer_and_have_last_tiles_of_both_kinds():
    lengths = [Cell("mha", "plain", False, seqlen, "bf16", False).scaled.lengths[0] for seqlen in SEQLENS]
    assert lengths == sorted(set(lengths))
    assert {length % 128 == 0 for length in lengths} == {False, True}
    assert {-(-length // 128) for length in lengths} == {1, 2, 3, 4}


@pytest.mark.parametrize("causal", [False, True])
def test_windows_are_wider_than_some_sequences_and_leave_out_tiles_of_others(causal):
    shares = []
    for cell in HALF:
        if cell.kind == "local" and cell.causal == causal:
            (length, *_), window = cell.scaled.lengths, cell.scaled.window
            tiling, tiles = Tiling(length, length, band(causal, window)), -(-length // 128)
            dense = tiles * (tiles + 1) // 2 if causal else tiles**2
            shares.append(sum(tiling.query_tiles(n).count for n in range(tiles)) / dense)
    assert min(shares) < max(shares) == 1


def test_packed_sequences_include_an_empty_one():
    packed = [cell for cell in HALF if cell.kind == "varlen"]
    assert all(0 in size.lengths for cell in packed for size in (cell.full, cell.scaled))
