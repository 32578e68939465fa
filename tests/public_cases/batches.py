"""Inputs as the public reports describe them: seeds 0 to 3 for q, k, v, dO, fp32 normal numbers rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from undertow.inputs import Batch, complete
from undertow.reference import DENSE, Scoring, Sequences

BF16, F16 = torch.bfloat16, torch.float16


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reported(
    lengths: tuple[int, int],
    heads: tuple[int, int] = (1, 1),
    scoring: Scoring = DENSE,
    dtype: torch.dtype = BF16,
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
) -> Batch:
    """One batch element, packed if the scoring says so; `change` may overwrite the numbers before they are rounded."""
    lead = (1,) if scoring.sequences is None else ()
    (seqlen_q, seqlen_k), (query_heads, kv_heads) = lengths, heads
    rows, keys = (*lead, seqlen_q, query_heads, 64), (*lead, seqlen_k, kv_heads, 64)
    shapes = {"q": rows, "k": keys, "v": keys, "dout": rows}
    tensors = {name: randn(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    change(tensors)
    return complete({name: x.to(dtype) for name, x in tensors.items()}, scoring)


def packing(cu_q: Sequence[int], cu_k: Sequence[int], **used: Sequence[int]) -> Sequences:
    def offsets(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Sequences(offsets(cu_q), offsets(cu_k), **{name: offsets(values) for name, values in used.items()})
