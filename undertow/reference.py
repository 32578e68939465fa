"""Attention forward and backward in float64, by explicit formulas: the mathematical specification.

Every kernel is judged by this file, so it imports only torch and uses no automatic differentiation. The formulas, for
query row i and key j that the row may see (S = softmax_scale * q.k, everything else is P = 0):

    LSE_i = ln sum_j exp S_ij        P_ij = exp(S_ij - LSE_i)        O_i = sum_j P_ij v_j
    dP_ij = dO_i . v_j               D_i = sum_j P_ij dP_ij = dO_i . O_i
    dS_ij = P_ij (dP_ij - D_i + dLSE_i)
    dV_j = sum_i P_ij dO_i           dQ_i = softmax_scale sum_j dS_ij k_j       dK_j = softmax_scale sum_i dS_ij q_i

With a softcap, T = cap tanh(S / cap) takes the place of S in LSE and P, and dS gains the factor 1 - tanh^2(S / cap).
With a sink, a learnable number b per head, LSE_i = ln(exp b + sum_j exp S_ij) and db = sum_i exp(b - LSE_i) (dLSE_i -
D_i). A row that sees no key has O = 0, LSE = -inf (or b) and dQ = 0, and takes no part in dK and dV.
Shapes: q, dO, O (batch, seqlen_q, heads, head_dim); k, v (batch, seqlen_k, kv_heads, head_dim), kv_heads divides heads
and head h reads kv head h // (heads / kv_heads); LSE, D, dLSE (batch, heads, seqlen_q), LSE in natural logarithm.
Packed sequences have no batch dimension: their rows follow one another.
Memory: one (sequence, head) and at most BLOCK_ROWS query rows at a time. Results lie where q does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ROWS = 1024  # query rows whose scores are held at once: 64 MiB per matrix at 8192 keys


class ProblemError(ValueError):
    """Arguments that describe no attention; the message names the argument, its value and what is allowed."""


@dataclass(frozen=True)
class Sequences:
    """Packed sequences: sequence b has the rows [cu[b], cu[b + 1]), of which only the first `seqused[b]` are used.

    cu_seqlens_q, cu_seqlens_k: (sequences + 1) int32, ascending from 0. seqused_q, seqused_k: (sequences) or None.
    Rows that are not used, those behind the last sequence included, see nothing and are seen by nobody.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None

    def used(self) -> Iterator[tuple[range, range]]:
        """The used query rows and keys of every sequence."""
        yield from zip(_used(self.cu_seqlens_q, self.seqused_q), _used(self.cu_seqlens_k, self.seqused_k))


def _used(offsets: Tensor, lengths: Tensor | None) -> Iterator[range]:
    for index, (first, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist())):
        used = end if lengths is None else min(end, first + int(lengths[index]))
        yield range(first, max(first, used))


@dataclass(frozen=True)
class Scoring:
    """How q.k becomes a score, and which pairs have one.

    softmax_scale: any finite number; None is 1 / sqrt(head_dim).
    causal: row i sees keys j <= c with c = i + seqlen_k - seqlen_q (the last row sees every key).
    window: (left, right), row i sees c - left <= j <= c + right, both inclusive; None is no bound; 0 and negative
    numbers are bounds like any other. With `causal`, the tighter of the two bounds holds.
    softcap: a positive number that scores are kept below by tanh, or None.
    sink: (heads), a score that every row of a head has besides those of the keys, or None.
    sequences: rows see keys of their own sequence only, if sequences are packed.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    sink: Tensor | None = None
    sequences: Sequences | None = None

    @property
    def leaves_rows_empty(self) -> bool:
        """Whether a row may see no key, though there are keys."""
        return self.causal or self.window != (None, None) or self.sequences is not None

    def scale(self, head_dim: int) -> float:
        if self.softmax_scale is None:
            return 1.0 / math.sqrt(head_dim)
        if not math.isfinite(self.softmax_scale):
            raise ProblemError(f"softmax_scale={self.softmax_scale}: must be finite")
        return float(self.softmax_scale)

    def capped(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores below the cap, and their derivative by the scores given (None where it is 1)."""
        if self.softcap is None:
            return scores, None
        if not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ProblemError(f"softcap={self.softcap}: must be positive and finite")
        t = torch.tanh(scores / self.softcap)
        return self.softcap * t, 1 - t**2

    def kept(self, rows: range, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu") -> Tensor | None:
        """Which pairs of `rows` by all keys are seen, (len(rows), seqlen_k) bool on `device`; None if all are."""
        left, right = self.window
        if self.causal:
            right = 0 if right is None else min(right, 0)
        if left is None and right is None:
            return None
        centre = torch.arange(rows.start, rows.stop, device=device)[:, None] + (seqlen_k - seqlen_q)
        key = torch.arange(seqlen_k, device=device)[None, :]
        kept = torch.ones(len(rows), seqlen_k, dtype=torch.bool, device=device)
        if left is not None:
            kept &= key >= centre - left
        if right is not None:
            kept &= key <= centre + right
        return kept


DENSE = Scoring()


class Forward(NamedTuple):
    """out: (batch, seqlen_q, heads, head_dim); lse: (batch, heads, seqlen_q), natural logarithm."""

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """dq, dk, dv in the shapes of q, k, v."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class RowStats(NamedTuple):
    """What a backward pass needs of each query row, (batch, heads, seqlen_q): LSE, and D (less dLSE, if any)."""

    lse: Tensor
    d: Tensor


class Block(NamedTuple):
    """One (sequence, head) at some query rows: float64 operands and their scores, -inf where a pair is not seen.

    slope: derivative of the scores by softmax_scale * q.k, or None where it is 1. sink: the head's extra score or None.
    """

    where: tuple  # (batch,) query rows, head: indexes q, dO, O, dQ
    kv: tuple  # (batch,) keys, kv head: indexes k, v, dK, dV
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    slope: Tensor | None
    sink: Tensor | None

    @property
    def row_index(self) -> tuple:
        """Where this block's rows lie in LSE and D."""
        *batch, rows, head = self.where
        return (*batch, head, rows)

    @property
    def lse(self) -> Tensor:
        """LSE of the block's rows."""
        scores = self.scores if self.sink is None else torch.cat([self.scores, self.sink.expand(len(self.q), 1)], dim=1)
        return torch.logsumexp(scores, dim=1)

    def sloped(self, dt: Tensor) -> Tensor:
        """The gradient of softmax_scale * q.k from that of the scores."""
        return dt if self.slope is None else dt * self.slope


def attention_forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = DENSE) -> Forward:
    """O and LSE in float64.

    Raises: ProblemError if the shapes do not fit together.
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -math.inf, dtype=torch.float64, device=q.device)
    for block in blocks(q, k, v, scoring):
        lse[block.row_index] = of_block = block.lse
        out[block.where] = probabilities(block.scores, of_block) @ block.v
    return Forward(out, lse)


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, scoring: Scoring = DENSE
) -> Gradients:
    """dQ, dK, dV in float64. dlse: gradient that flows into LSE, or None.

    Raises: ProblemError if the shapes do not fit together.
    """
    _check_shapes(q, k, v, scoring, dout)
    grads = _zeros(q, k, v)
    for block in blocks(q, k, v, scoring):
        p = probabilities(block.scores, block.lse)
        do = dout[block.where].double()
        dp = do @ block.v.T
        d = (p * dp).sum(dim=1)
        if dlse is not None:
            d = d - dlse[block.row_index].double()
        ds = block.sloped(p * (dp - d[:, None]))
        _accumulate(grads, block, p.T @ do, ds, scoring.scale(q.shape[-1]))
    return grads


def sink_gradient(q: Tensor, k: Tensor, v: Tensor, stats: RowStats, scoring: Scoring) -> Tensor:
    """The gradient of the sink, (heads) float64, from LSE and D (less dLSE) of every row."""
    assert scoring.sink is not None, "without a sink there is no gradient of it"
    gradient = torch.zeros(q.shape[-2], dtype=torch.float64, device=q.device)
    for block in blocks(q, k, v, scoring):
        lse, d = stats.lse[block.row_index].double(), stats.d[block.row_index].double()
        gradient[block.where[-1]] -= (torch.exp(scoring.sink[block.where[-1]].double() - lse) * d).sum()
    return gradient


def row_stats(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None = None) -> RowStats:
    """LSE and D = rowsum(dO * O) - dLSE in float64, from O as it was stored (usually rounded to 16 bits)."""
    d = (dout.double() * out.double()).sum(dim=-1).transpose(-1, -2)
    return RowStats(lse.double(), d if dlse is None else d - dlse.double())


def ideal_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stats: RowStats, scoring: Scoring = DENSE
) -> Gradients:
    """The best gradients that a kernel with 16-bit matrix operands can give: the yardstick of every error budget.

    `ideal_sums`, each rounded once to the dtype of q, k, v: what is left when nothing but the number format errs.
    Raises: ProblemError if the shapes do not fit together.
    """
    sums = ideal_sums(q, k, v, dout, stats, scoring)
    return Gradients(*(round_to(grad, x.dtype).to(x.dtype) for grad, x in zip(sums, (q, k, v))))


def ideal_sums(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stats: RowStats, scoring: Scoring = DENSE) -> Gradients:
    """dQ, dK, dV in float64 if only P and dS are rounded, once each, to the dtype of q (they are matrix operands).

    dS is formed from the unrounded P. LSE and D come from `row_stats`, so that D carries the rounding of the stored O.
    """
    _check_shapes(q, k, v, scoring, dout)
    grads = _zeros(q, k, v)
    for block in blocks(q, k, v, scoring):
        p = probabilities(block.scores, stats.lse[block.row_index].double())
        do = dout[block.where].double()
        ds = block.sloped(p * (do @ block.v.T - stats.d[block.row_index].double()[:, None]))
        p, ds = round_to(p, q.dtype), round_to(ds, q.dtype)
        _accumulate(grads, block, p.T @ do, ds, scoring.scale(q.shape[-1]))
    return grads


def blocks(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Iterator[Block]:
    """Every (sequence, head) in pieces of at most BLOCK_ROWS query rows, with their scores."""
    group = _check_shapes(q, k, v, scoring)
    heads, head_dim = q.shape[-2:]
    scale = scoring.scale(head_dim)
    for batch, queries, keys in _extents(q, k, scoring):
        for head in range(heads):
            kv = (*batch, slice(keys.start, keys.stop), head // group)
            for start in range(0, len(queries), BLOCK_ROWS):
                rows = range(start, min(start + BLOCK_ROWS, len(queries)))  # within the sequence
                where = (*batch, slice(queries.start + rows.start, queries.start + rows.stop), head)
                scores, slope = scoring.capped(scale * (q[where].double() @ k[kv].double().T))
                kept = scoring.kept(rows, len(queries), len(keys), q.device)
                if kept is not None:
                    scores = scores.masked_fill(~kept, -math.inf)
                sink = None if scoring.sink is None else scoring.sink[head].double()
                yield Block(where, kv, q[where].double(), k[kv].double(), v[kv].double(), scores, slope, sink)


def _extents(q: Tensor, k: Tensor, scoring: Scoring) -> Iterator[tuple[tuple[int, ...], range, range]]:
    """Index of the batch element, if there are batch elements, query rows and keys of every sequence."""
    if scoring.sequences is None:
        yield from (((batch,), range(q.shape[1]), range(k.shape[1])) for batch in range(q.shape[0]))
    else:
        yield from (((), queries, keys) for queries, keys in scoring.sequences.used())


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """P = exp(S - LSE) row by row; a row that sees nothing (LSE = -inf) is all zeros."""
    sees_a_key = lse > -math.inf
    p = torch.exp(scores - torch.where(sees_a_key, lse, 0.0)[:, None])
    return torch.where(sees_a_key[:, None], p, 0.0)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values rounded once, to nearest even, to `dtype`; returned as float64.

    `Tensor.to` goes from float64 to a 16-bit type through float32, which rounds twice and differs near ties.
    """
    if dtype == torch.float64:
        return x
    info = torch.finfo(dtype)
    precision = 1 - round(math.log2(info.eps))  # significant bits, the implicit one included
    drop = (
        torch.finfo(torch.float64).bits - 11 - precision
    )  # low bits of a float64 (11 exponent bits and a sign) to lose
    bits = x.contiguous().view(torch.int64)
    half_to_even = (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)
    normal = ((bits + half_to_even) & -(1 << drop)).view(torch.float64)  # a carry runs into the exponent, as it should
    spacing = info.tiny * info.eps  # of the subnormal numbers
    rounded = torch.where(x.abs() < info.tiny, torch.round(x / spacing) * spacing, normal)
    return torch.where(rounded.abs() > info.max, torch.copysign(torch.full_like(x, math.inf), x), rounded)


def _accumulate(grads: Gradients, block: Block, dv: Tensor, ds: Tensor, scale: float) -> None:
    """Add one block's dV and scaled dQ, dK to the sums; several query heads of one kv head meet here."""
    grads.dq[block.where] = scale * (ds @ block.k)
    grads.dk[block.kv] += scale * (ds.T @ block.q)
    grads.dv[block.kv] += dv


def _zeros(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    return Gradients(*(torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v)))


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, dout: Tensor | None = None) -> int:
    """Query heads per kv head.

    Raises: ProblemError naming the first shape that does not fit.
    """
    axes = ("batch", "seqlen", "heads", "head_dim") if scoring.sequences is None else ("rows", "heads", "head_dim")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != len(axes):
            raise ProblemError(f"{name} has shape {tuple(x.shape)}: must be ({', '.join(axes)})")
    if k.shape != v.shape:
        raise ProblemError(f"v has shape {tuple(v.shape)}, k has {tuple(k.shape)}: must be equal")
    if q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1]:
        raise ProblemError(f"k has shape {tuple(k.shape)}, q has {tuple(q.shape)}: batch and head_dim must be equal")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ProblemError(f"k has {k.shape[-2]} heads, q has {q.shape[-2]}: kv heads must divide query heads")
    if dout is not None and dout.shape != q.shape:
        raise ProblemError(f"dout has shape {tuple(dout.shape)}, q has {tuple(q.shape)}: must be equal")
    return q.shape[-2] // k.shape[-2]
