"""Problems that the tests of the reference share: random operands by seed, and every kind of mask."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from undertow.reference import DENSE, Scoring

CAUSAL = Scoring(causal=True)

SCORINGS = {
    "dense": DENSE,
    "scale": Scoring(softmax_scale=-0.3),
    "causal": CAUSAL,
    "left-window": Scoring(window=(5, None)),
    "right-window": Scoring(window=(None, 3)),
    "band": Scoring(window=(4, 2)),
    "band-off-centre": Scoring(window=(9, -2)),
    "causal-window": Scoring(causal=True, window=(6, 4)),
    "diagonal": Scoring(window=(0, 0)),
    "empty-band": Scoring(window=(2, -3)),
}

SHAPES = {  # (batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim)
    "square": (1, 16, 16, 2, 2, 8),
    "one-key": (2, 5, 1, 1, 1, 8),
    "one-query": (1, 1, 9, 2, 2, 8),
    "more-queries": (1, 19, 11, 2, 1, 8),
    "more-keys": (2, 11, 23, 6, 3, 4),
}


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(shape: tuple[int, int, int, int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout in float64."""
    batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim = shape
    rows, keys = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, kv_heads, head_dim)
    return randn(0, *rows), randn(1, *keys), randn(2, *keys), randn(3, *rows)


def bf16_operands(seqlen: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operands of the cases file: one head of dimension 64, float32 normal numbers rounded to bf16."""
    shape = (1, seqlen, 1, 64)
    numbers = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    q, k, v, dout = (x.bfloat16() for x in numbers)
    return q, k, v, dout


def kept_pairs(scoring: Scoring, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The mask pair by pair, from its definition: independent of the reference's vectorised one."""
    left, right = scoring.window
    kept = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
        centre = i + seqlen_k - seqlen_q
        kept[i, j] = (
            (not scoring.causal or j <= centre)
            and (left is None or j >= centre - left)
            and (right is None or j <= centre + right)
        )
    return kept
