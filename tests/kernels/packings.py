"""Packed batches for tests: random where a sequence uses the row, NaN everywhere else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from undertow.inputs import Batch, complete
from undertow.reference import Scoring, Sequences


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed_batch(
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    heads: tuple[int, int] = (1, 1),
    used: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
    rows: tuple[int, int] | None = None,
    **scoring,
) -> Batch:
    """Rows of nobody hold NaN in every tensor. heads: of q and of k. rows: of the tensors, if there are others."""
    total_q, total_k = rows or (cu_q[-1], cu_k[-1])
    lengths = [None if lengths is None else offsets(*lengths) for lengths in used]
    described = Scoring(sequences=Sequences(offsets(*cu_q), offsets(*cu_k), *lengths), **scoring)
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (total_q, heads[0]), "k": (total_k, heads[1]), "v": (total_k, heads[1]), "dout": (total_q, heads[0])}
    tensors = {name: torch.randn(*shape, 64, generator=generator).bfloat16() for name, shape in shapes.items()}
    unused_q, unused_k = unused(described.sequences, total_q, total_k)
    for name, tensor in tensors.items():
        tensor[unused_k if name in ("k", "v") else unused_q] = torch.nan
    batch = complete(tensors, described)
    batch.out[unused_q] = torch.nan
    batch.lse[:, unused_q] = torch.nan
    return batch


def unused(sequences: Sequences | None, total_q: int, total_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which query rows and keys no sequence uses."""
    assert sequences is not None
    masks = torch.ones(total_q, dtype=torch.bool), torch.ones(total_k, dtype=torch.bool)
    for spans in sequences.used():
        for mask, span in zip(masks, spans):
            mask[span.start : span.stop] = False
    return masks
