"""Pairs are counted as brute force counts them; operations follow the published convention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.stand_ins import cell_named
from undertow.bench.work import backward_flops, counted_pairs, kept_pairs, peak_tflops, tensor_flops_per_cycle
from undertow.reference import Scoring
from undertow.sweep.matrix import CELLS, Heads, Size

BOUNDS = st.none() | st.integers(0, 40)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), BOUNDS, BOUNDS, st.booleans())
def test_kept_pairs_are_those_of_brute_force(lengths, left, right, causal):
    scoring, pairs = Scoring(causal=causal, window=(left, right)), 0
    for length in lengths:
        kept = scoring.kept(range(length), length, length)
        pairs += length * length if kept is None else int(kept.sum())
    assert kept_pairs(Size(Heads(2, 1), tuple(lengths), True, (left, right)), causal) == pairs


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_cell_at_emulated_size(cell):
    size, scoring = cell.scaled, Scoring(causal=cell.causal, window=cell.scaled.window)
    kept = [scoring.kept(range(length), length, length) for length in size.lengths]
    brute = sum(length**2 if mask is None else int(mask.sum()) for length, mask in zip(size.lengths, kept))
    halved = sum(length**2 for length in size.lengths) / 2
    published = halved if cell.kind == "plain" and cell.causal else brute
    assert counted_pairs(size, cell.causal) == published
    assert backward_flops(cell, size) == 10 * 64 * size.heads.q * published


def test_the_published_formula():
    # 2.5 x 4 batch heads seqlen^2 head_dim, half of it if causal
    dense, causal = (cell_named(f"gqa-{mask}-8k-bf16") for mask in ("dense", "causal"))
    assert backward_flops(dense, dense.full) == 2.5 * 4 * 8 * 32 * 8192**2 * 64
    assert backward_flops(causal, causal.full) == backward_flops(dense, dense.full) / 2


def test_windows_count_what_they_keep():
    cell = cell_named("gqa-local-1k-fp16")  # 512 keys to each side of sequences of 1024
    kept = Scoring(window=cell.full.window).kept(range(1024), 1024, 1024)
    assert kept is not None
    assert counted_pairs(cell.full, cell.causal) == 64 * int(torch.count_nonzero(kept))


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989.4), ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA B200", 2250.0)]
    + [(name, None) for name in ("NVIDIA H100 PCIe", "NVIDIA B2000", "NVIDIA A100-SXM4-80GB")],
)
def test_the_published_peak_of_a_gpu(name, peak):
    assert peak_tflops(name) == peak


def test_what_tensor_cores_do_in_a_cycle():
    assert tensor_flops_per_cycle((9, 0), 132) == 4096 * 132
    assert tensor_flops_per_cycle((10, 0), 148) == 8192 * 148
    assert tensor_flops_per_cycle((8, 0), 108) is None
