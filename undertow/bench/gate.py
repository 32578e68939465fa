"""Gradients are judged before a time counts: against float64 in slices, and as a whole against another provider.

A place is one sequence with one key/value head and the query heads that read it. There float64 makes LSE and D of all
rows, so that dQ of a slice of rows needs these rows and all keys only, and dK, dV of a slice of keys all rows and these
keys only: a slice of the scores, not their square. The errors of the slices of a place, taken together, must stay
within the budget of `undertow.tolerance`, 1.25 times those of an ideal 16-bit pipeline. Its float32 floor is left out:
on normal random inputs it is far below 1 % of the budget.

What lies in no slice must be finite, and the whole gradients of two providers that both passed can differ by no more
than the sum of their budgets (triangle inequality).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.bench.workload import Workload
from undertow.reference import (
    Forward,
    Gradients,
    RowStats,
    Scoring,
    blocks,
    ideal_backward,
    ideal_sums,
    round_to,
    row_stats,
)
from undertow.tolerance import IDEAL_FACTOR, Errors, relative_error

SLICE_ROWS = 128  # a tile of the kernels
_UNKNOWN = Errors(math.nan, math.nan, math.nan)


class Place(NamedTuple):
    """rows: of one sequence, in the tensors of the workload. kv_head: with all query heads that read it."""

    rows: slice
    kv_head: int


@dataclass(frozen=True)
class Slices:
    """What float64 says of one place: exact and ideal values of slices of dQ, dK, dV, each kind in one tensor."""

    place: Place
    parts: tuple[slice, ...]  # of rows, or of keys, within the sequence
    exact: Gradients
    ideal: Errors


@dataclass(frozen=True)
class Verdict:
    """errors: the largest of any place, NaN if not judged. budget: the least of any place. complaint: None if right."""

    errors: Errors
    budget: Errors
    complaint: str | None


class Gates:
    """Gates of many cells. Those that differ in the deterministic mode alone have the same true gradients."""

    def __init__(self) -> None:
        self._slices: dict[Hashable, list[Slices]] = {}

    def of(self, workload: Workload) -> Gate:
        """The gate of one workload, whose tensors depend on nothing but its cell and size."""
        problem = workload.size, workload.cell.causal, workload.cell.dtype
        gate = Gate(workload, self._slices.get(problem))
        self._slices[problem] = gate.slices
        return gate


class Gate:
    """Knows the true gradients of one workload, where it looks."""

    def __init__(self, workload: Workload, slices: list[Slices] | None = None):
        """slices: of another gate for the same tensors and mask."""
        self._workload = workload
        self._group = workload.size.heads.q // workload.size.heads.kv
        self.slices = slices or [self._judged(place) for place in places(workload)]

    def verdict(self, gradients: Gradients) -> Verdict:
        """Judge gradients in the shapes and the dtype of q, k, v of the workload."""
        budget = Errors(*(min(column) for column in zip(*map(_budget, self.slices))))
        for name, gradient, like in zip(Gradients._fields, gradients, self._inputs()):
            if gradient.shape != like.shape or gradient.dtype != like.dtype:
                have, want = (f"{x.dtype} of {tuple(x.shape)}" for x in (gradient, like))
                return Verdict(_UNKNOWN, budget, f"{name} is {have}: must be {want}")
            if not bool(torch.isfinite(gradient).all()):
                return Verdict(_UNKNOWN, budget, f"{name} is not finite everywhere")
        found = [self._errors(slices, gradients) for slices in self.slices]
        errors = Errors(*(max(column) for column in zip(*found)))
        for slices, place_errors in zip(self.slices, found):
            for name, error, allowed in zip(Gradients._fields, place_errors, _budget(slices)):
                if not error <= allowed:
                    return Verdict(errors, budget, f"{name} errs by {error:.3e} of at most {allowed:.3e}{_at(slices)}")
        return Verdict(errors, budget, None)

    def disagreement(self, gradients: Gradients, trusted: Gradients) -> str | None:
        """Why two gradients, whose slices are right, cannot both be right as a whole; None if they can."""
        budgets = Errors(*(max(column) for column in zip(*map(_budget, self.slices))))
        for name, x, y, budget in zip(Gradients._fields, gradients, trusted, budgets):
            distance = relative_error(x, y)
            if not distance <= 2 * budget:
                return f"{name} differs by {distance:.3e} where two right ones differ by at most {2 * budget:.3e}"
        return None

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._workload.q, self._workload.k, self._workload.v

    def _errors(self, slices: Slices, gradients: Gradients) -> Errors:
        q_heads = _query_heads(slices.place, self._group)
        found = []
        for gradient, exact, heads in zip(gradients, slices.exact, (q_heads, _one(slices.place), _one(slices.place))):
            held = gradient[slices.place.rows, heads]
            found.append(relative_error(torch.cat([held[part] for part in slices.parts]), exact))
        return Errors(*found)

    def _judged(self, place: Place) -> Slices:
        w, q_heads = self._workload, _query_heads(place, self._group)
        q, dout = (x[place.rows, q_heads][None] for x in (w.q, w.dout))
        k, v = (x[place.rows, _one(place)][None] for x in (w.k, w.v))
        forward = forward_of(q, k, v, w.scoring)
        true = row_stats(forward.out, dout, forward.lse)
        kept = row_stats(round_to(forward.out, q.dtype), dout, forward.lse.float())
        length = q.shape[1]
        parts = tuple(_parts(length))
        whole = slice(0, length)
        exact: list[list[Tensor]] = [[], [], []]
        ideal: list[list[Tensor]] = [[], [], []]
        for part in parts:
            for rows, keys, wanted in ((part, whole, (0,)), (whole, part, (1, 2))):
                scoring = within(w.scoring, rows, keys)
                cut = q[:, rows], k[:, keys], v[:, keys], dout[:, rows]
                nearest = ideal_backward(cut[0], cut[1], cut[2], cut[3], _stats(kept, rows), scoring)
                q64, k64, v64, dout64 = (x.double() for x in cut)
                sums = ideal_sums(q64, k64, v64, dout64, _stats(true, rows), scoring)
                for index in wanted:
                    exact[index].append(sums[index][0])
                    ideal[index].append(nearest[index][0])
        truth = Gradients(*map(torch.cat, exact))
        return Slices(place, parts, truth, Errors(*map(relative_error, map(torch.cat, ideal), truth)))


def forward_of(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Forward:
    """As `attention_forward`, with half as many passes over the scores, which at full size are what takes the time.

    Every row sees a key.
    """
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float64, device=q.device)
    for block in blocks(q, k, v, scoring):
        top = block.scores.amax(1, keepdim=True)
        weights = block.scores.sub_(top).exp_()
        total = weights.sum(1)
        lse[block.row_index] = top[:, 0] + total.log()
        out[block.where] = weights @ block.v / total[:, None]
    return Forward(out, lse)


def places(workload: Workload) -> Iterator[Place]:
    """The first longest sequence with the last key/value head, the last shortest that is not empty with the first."""
    lengths = workload.size.lengths
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    filled = [index for index, length in enumerate(lengths) if length]
    longest = max(filled, key=lambda index: lengths[index])
    shortest = min(reversed(filled), key=lambda index: lengths[index])
    for index, head in {longest: workload.size.heads.kv - 1, shortest: 0}.items():
        yield Place(slice(begins[index], begins[index] + lengths[index]), head)


def within(scoring: Scoring, rows: slice, keys: slice) -> Scoring:
    """The same mask, said of some rows and some keys of a sequence with as many rows as keys."""
    left, right = scoring.window
    if scoring.causal:
        right = 0 if right is None else min(right, 0)
    # the diagonal of the cut goes through its last row and last key
    shift = (keys.start - rows.start) + (keys.stop - keys.start) - (rows.stop - rows.start)
    window = (None if left is None else left + shift, None if right is None else right - shift)
    return replace(scoring, causal=False, window=window)


def _parts(length: int) -> Iterator[slice]:
    """The first rows, some in the middle and the last, without a row twice."""
    size = min(SLICE_ROWS, length)
    begin = 0
    for start in (0, (length - size) // 2, length - size):
        start = max(start, begin)
        if start < length:
            begin = min(start + size, length)
            yield slice(start, begin)


def _query_heads(place: Place, group: int) -> slice:
    return slice(place.kv_head * group, (place.kv_head + 1) * group)


def _one(place: Place) -> slice:
    return slice(place.kv_head, place.kv_head + 1)


def _stats(stats: RowStats, rows: slice) -> RowStats:
    return RowStats(*(x[..., rows] for x in stats))


def _budget(slices: Slices) -> Errors:
    return Errors(*(IDEAL_FACTOR * ideal for ideal in slices.ideal))


def _at(slices: Slices) -> str:
    rows = slices.place.rows
    return f", in slices of the sequence at rows {rows.start} to {rows.stop}, key/value head {slices.place.kv_head}"
