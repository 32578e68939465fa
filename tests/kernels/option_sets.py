"""Sets of options that identities are asked of, and random problems under each.

Masks, packing and softcap are all combined; the mode and the element type alternate so that any two options meet in
each of their combinations. Within a set, problems differ in lengths, groups of heads, sinks and gradients of LSE.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.problems import FAST
from undertow import emulated
from undertow.inputs import Batch, Shape, random_batch
from undertow.reference import Gradients, Scoring, Sequences
from undertow.tolerance import yardstick

MASKS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (60, 25)},
    "left": {"window": (70, None)},
}
HEADS = [(1, 1), (2, 2), (4, 2), (3, 1)]


@dataclass(frozen=True)
class Options:
    """What the kernels are compiled for."""

    mask: str
    packed: bool
    softcap: float | None
    deterministic: bool
    dtype: torch.dtype

    @property
    def name(self) -> str:
        flags = {"packed": self.packed, "softcap": self.softcap, "deterministic": self.deterministic}
        names = [self.mask, *(flag for flag, is_set in flags.items() if is_set)]
        return "-".join([*names, "fp16" if self.dtype == torch.float16 else "bf16"])


def _option_set(mask: int, packed: int, capped: int) -> Options:
    deterministic, half = (mask ^ packed ^ capped) & 1, (mask >> 1 ^ capped) & 1
    dtype = torch.float16 if half else torch.bfloat16
    return Options(list(MASKS)[mask], bool(packed), 2.0 if capped else None, bool(deterministic), dtype)


OPTION_SETS = [_option_set(*chosen) for chosen in itertools.product(range(4), range(2), range(2))]


def lengths_of(options: Options) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Rows and keys of up to three sequences, or of the one length that batch elements have."""
    if not options.packed:
        return st.lists(st.tuples(st.integers(1, 150), st.integers(1, 150)), min_size=1, max_size=1)
    some = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=3)
    return some.filter(lambda lengths: all(sum(side) for side in zip(*lengths)))


def sequences_of(lengths: list[tuple[int, int]]) -> Sequences:
    sides = ([0, *itertools.accumulate(side)] for side in zip(*lengths))
    return Sequences(*(torch.tensor(side, dtype=torch.int32) for side in sides))


@st.composite
def problems(draw, options: Options, sinks: bool = True, gradients_of_lse: bool = True, lengths=None) -> Batch:
    """A random batch; with sinks and a gradient of LSE only where they are allowed."""
    chosen = draw(lengths_of(options) if lengths is None else lengths)
    heads, kv_heads = draw(st.sampled_from(HEADS))
    scoring = Scoring(softcap=options.softcap, softmax_scale=draw(st.sampled_from([None, -0.3])), **MASKS[options.mask])
    if sinks and draw(st.booleans()):
        scoring = dataclasses.replace(scoring, sink=torch.linspace(-2.0, 3.0, heads))
    if options.packed:
        scoring = dataclasses.replace(scoring, sequences=sequences_of(chosen))
    rows, keys = (sum(side) for side in zip(*chosen))
    shape = Shape(1 if options.packed else draw(st.integers(1, 2)), rows, keys, heads, kv_heads)
    seed = draw(st.integers(0, 99))
    batch = random_batch(shape, seed, scoring, options.dtype)
    if gradients_of_lse and draw(st.booleans()):
        generator = torch.Generator().manual_seed(seed)
        batch = dataclasses.replace(batch, dlse=torch.randn(batch.lse.shape, generator=generator))
    return batch


def results(batch: Batch, options: Options) -> dict[str, Tensor]:
    """dq, dk, dv and, with a sink, dsink."""
    done = emulated.backward(batch, deterministic=options.deterministic, options=FAST)
    return {**done.gradients._asdict(), **({} if done.dsink is None else {"dsink": done.dsink})}


def misses(batch: Batch, got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Which gradients are further from what an identity says than the budget of `batch` allows."""
    measure = yardstick(batch, batch.scoring, batch.dlse)
    wrong = []
    for name, denominator, budget in zip(Gradients._fields, measure.denominators, measure.budget):
        if name in expected:
            error = float((got[name].double() - expected[name]).norm())
            if not error <= budget * denominator * (1 + 1e-9):
                wrong.append(f"{name}: {error:.3e} > {budget * denominator:.3e}")
    return wrong


def seeing(batch: Batch) -> Tensor:
    """Which rows see a key, shaped to be multiplied with dout."""
    kept = torch.zeros(batch.q.shape[:-1], dtype=torch.bool)
    for index, rows, keys in spans(batch):
        pairs = batch.scoring.kept(range(len(rows)), len(rows), len(keys))
        seen = torch.full((len(rows),), bool(len(keys))) if pairs is None else pairs.any(dim=1)
        kept[(*index, slice(rows.start, rows.stop))] = seen[:, None]
    return kept[..., None]


def spans(batch: Batch) -> list[tuple[tuple[int, ...], range, range]]:
    """Index of the batch element, rows and keys of every sequence."""
    if batch.scoring.sequences is not None:
        return [((), rows, keys) for rows, keys in batch.scoring.sequences.used()]
    return [((element,), range(batch.q.shape[1]), range(batch.k.shape[1])) for element in range(batch.q.shape[0])]


def by_row(x: Tensor) -> Tensor:
    """(..., heads, rows) as (..., rows, heads, 1), in float64."""
    return x.transpose(-1, -2)[..., None].double()


def share_of_the_sink(batch: Batch) -> Tensor:
    """exp(sink - LSE) of every row, (..., rows, heads, 1)."""
    if batch.scoring.sink is None:
        return torch.zeros(*batch.q.shape[:-1], 1, dtype=torch.float64)
    return torch.exp(batch.scoring.sink.double()[:, None] - by_row(batch.lse))


def folded(x: Tensor, kv_heads: int) -> Tensor:
    """Sums over the query heads of each group, along the last dimension but one."""
    return x.double().unflatten(-2, (kv_heads, -1)).sum(dim=-2)
