"""The tensors of one cell, as every provider gets them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undertow.bench.work import HEAD_DIM
from undertow.reference import Scoring
from undertow.sweep.matrix import Cell, Size

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """One backward problem on a device.

    q, dout: (tokens, heads, 64); k, v: (tokens, kv_heads, 64), contiguous, of all sequences one after another.
    """

    cell: Cell
    size: Size
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def scoring(self) -> Scoring:
        """The mask within one sequence."""
        return Scoring(causal=self.cell.causal, window=self.size.window)

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """Keys that a row sees to the left and to the right of its own, the causal mask included."""
        left, right = self.size.window
        return left, 0 if self.cell.causal else right

    @property
    def max_seqlen(self) -> int:
        return max(self.size.lengths)

    @cached_property
    def offsets(self) -> Tensor:
        """(sequences + 1) int32: where each sequence begins, and where the last one ends."""
        lengths = torch.tensor((0, *self.size.lengths), dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.q.device)

    def shaped(self, x: Tensor) -> Tensor:
        """(batch, seqlen, heads, 64) of sequences that are all alike; packed ones stay (tokens, heads, 64)."""
        return x if self.size.packed else x.view(len(self.size.lengths), self.size.lengths[0], *x.shape[1:])

    def heads_first(self, x: Tensor) -> Tensor:
        """(batch, heads, seqlen, 64), a view; of packed sequences (1, heads, tokens, 64)."""
        return (x[None] if self.size.packed else self.shaped(x)).transpose(1, 2)

    def rows_first(self, x: Tensor) -> Tensor:
        """The inverse of `heads_first`: (tokens, heads, 64)."""
        return x.transpose(1, 2).flatten(0, 1)


def workload(cell: Cell, size: Size, device: str, seed: int = 0) -> Workload:
    """Normal random q, k, v, dout, rounded to the dtype of `cell`."""
    generator = torch.Generator(device).manual_seed(seed)

    def rows(heads: int) -> Tensor:
        values = torch.randn(size.tokens, heads, HEAD_DIM, generator=generator, device=device)
        return values.to(TYPES[cell.dtype])

    q, k, v, dout = (rows(heads) for heads in (size.heads.q, size.heads.kv, size.heads.kv, size.heads.q))
    return Workload(cell, size, q, k, v, dout)
