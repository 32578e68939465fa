"""torch's flash attention operators for CPU tensors, which no build of torch has: what a GPU build has on CUDA.

They compute by the float64 reference whatever head_dim and dtype they are given, so they serve as the forward, and as
the kernels that were there before; `calls` counts how often each ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from undertow.reference import Gradients, Scoring, Sequences, attention_forward, ideal_backward, round_to, row_stats

calls: Counter[str] = Counter()


@contextmanager
def cpu_flash_attention() -> Iterator[Counter[str]]:
    """The operators exist on CPU inside, and the counts are those of inside."""
    library: Any = torch.library.Library("aten", "IMPL")
    calls.clear()
    try:
        for kernel, operator in OPERATORS.items():
            library.impl(operator, kernel, "CPU", allow_override=True)
        yield calls
    finally:
        library._destroy()


def flash_forward(query, key, value, *rest, **options):
    calls["flash_forward"] += 1
    cum_seq_q, cum_seq_k, _, _, _, is_causal, _ = rest
    scoring = _scoring((cum_seq_q, cum_seq_k), is_causal, options)
    out, lse = _forward((query, key, value), scoring)
    return torch.empty_like(query).copy_(out), lse, *_random_state(), query.new_empty(0)


def flash_backward(grad_out, *rest, **options):
    calls["flash_backward"] += 1
    query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, _, _, _, is_causal = rest[:11]
    scoring = _scoring((cum_seq_q, cum_seq_k), is_causal, options)
    grads = _gradients((query, key, value), grad_out, (out, logsumexp), scoring)
    return tuple(torch.empty_like(x).copy_(grad) for x, grad in zip((query, key, value), grads))


def sdpa_forward(query, key, value, *rest, scale=None):
    calls["sdpa_forward"] += 1
    is_causal = rest[1] if len(rest) > 1 else False
    out, lse = _forward(_swapped(query, key, value), Scoring(scale, is_causal))
    lengths = query.shape[2], key.shape[2]
    stored = torch.empty_like(query).copy_(out.transpose(1, 2))
    return stored, lse, None, None, *lengths, *_random_state(), query.new_empty(0)


def sdpa_backward(grad_out, *rest, scale=None):
    calls["sdpa_backward"] += 1
    query, key, value, out, logsumexp, _, _, _, _, _, is_causal = rest[:11]
    (dout, out), qkv = _swapped(grad_out, out), _swapped(query, key, value)
    grads = _gradients(qkv, dout, (out, logsumexp), Scoring(scale, is_causal))
    return tuple(torch.empty_like(x).copy_(grad.transpose(1, 2)) for x, grad in zip((query, key, value), grads))


OPERATORS = {
    flash_forward: "_flash_attention_forward",
    flash_backward: "_flash_attention_backward",
    sdpa_forward: "_scaled_dot_product_flash_attention",
    sdpa_backward: "_scaled_dot_product_flash_attention_backward",
}


def _forward(qkv: tuple[Tensor, ...], scoring: Scoring) -> tuple[Tensor, Tensor]:
    q, k, v = qkv
    forward = attention_forward(q, k, v, scoring)
    return round_to(forward.out, q.dtype), forward.lse.float()


def _gradients(qkv: tuple[Tensor, ...], dout: Tensor, saved: tuple[Tensor, Tensor], scoring: Scoring) -> Gradients:
    q, k, v = qkv
    out, lse = saved
    return ideal_backward(q, k, v, dout, row_stats(out, dout, lse), scoring)


def _swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Heads and rows in the other order."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _scoring(offsets: tuple, is_causal: bool, options: dict[str, Any]) -> Scoring:
    left, right = (options.get(f"window_size_{side}") for side in ("left", "right"))
    left, right = (None if bound is None or bound < 0 else bound for bound in (left, right))
    sequences = None if offsets[0] is None else Sequences(*offsets)
    return Scoring(options.get("scale"), is_causal, (left, right), sequences=sequences)


def _random_state() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
