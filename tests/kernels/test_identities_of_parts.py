"""Identities between a whole and its parts or its other spellings: permutations, packing, groups, chunks, windows."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.option_sets import MASKS, OPTION_SETS, folded, problems, results, sequences_of, spans
from undertow.inputs import Batch

few = settings(max_examples=3, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
ROWS, KEYS = ("q", "dout", "out"), ("k", "v")


@pytest.fixture(params=OPTION_SETS, ids=lambda options: options.name, scope="module")
def options(request):
    """One set after the other, so that kernels are decoded once."""
    return request.param


def taken(batch: Batch, rows: tuple, keys: tuple, of_lse: tuple, **scoring: Any) -> Batch:
    """The part of a batch at these places of the tensors of rows, of keys, and of LSE."""
    parts = {name: getattr(batch, name)[rows] for name in ROWS} | {name: getattr(batch, name)[keys] for name in KEYS}
    dlse = None if batch.dlse is None else batch.dlse[of_lse]
    given = dataclasses.replace(batch.scoring, **scoring)
    return dataclasses.replace(batch, **parts, lse=batch.lse[of_lse], dlse=dlse, scoring=given)


def assert_equal(one: dict[str, Tensor], dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    assert torch.equal(one["dq"], dq) and torch.equal(one["dk"], dk) and torch.equal(one["dv"], dv)


@few
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_permutation_of_heads_permutes_the_results(options, data, seed):
    batch = data.draw(problems(options))
    groups = list(range(batch.k.shape[-2]))
    random.Random(seed).shuffle(groups)
    group = batch.q.shape[-2] // batch.k.shape[-2]
    heads = [group * kv + i for kv in groups for i in range(group)]
    sink = None if batch.scoring.sink is None else batch.scoring.sink[heads]
    permuted = taken(batch, (..., heads, slice(None)), (..., groups, slice(None)), (..., heads, slice(None)), sink=sink)
    got, plain = results(permuted, options), results(batch, options)
    assert_equal(got, plain["dq"][..., heads, :], plain["dk"][..., groups, :], plain["dv"][..., groups, :])
    assert "dsink" not in got or torch.equal(got["dsink"], plain["dsink"][heads])


@few
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_permutation_of_batch_elements_or_sequences_permutes_the_results(options, data, seed):
    batch = data.draw(problems(options))
    parts = spans(batch)
    random.Random(seed).shuffle(parts)
    if options.packed:
        rows = torch.tensor([row for _, span, _ in parts for row in span], dtype=torch.int64)
        keys = torch.tensor([key for _, _, span in parts for key in span], dtype=torch.int64)
        sequences = sequences_of([(len(queries), len(others)) for _, queries, others in parts])
        at = (rows,), (keys,), (slice(None), rows)
    else:
        order, sequences = [element for (element,), _, _ in parts], None
        at = (order,), (order,), (order,)
    got, plain = results(taken(batch, *at, sequences=sequences), options), results(batch, options)
    assert_equal(got, plain["dq"][at[0]], plain["dk"][at[1]], plain["dv"][at[1]])


@few
@given(data=st.data())
def test_every_sequence_is_as_if_it_were_alone(options, data):
    """Packed sequences as dense batches of one, batch elements as well: the same bits."""
    batch = data.draw(problems(options))
    together = results(batch, options)
    for index, rows, keys in spans(batch):
        if not rows or not keys:
            assert not together["dq"][(*index, slice(rows.start, rows.stop))].any()
            assert not together["dk"][(*index, slice(keys.start, keys.stop))].any()
            continue
        of_rows, of_keys = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        first = (slice(index[0], index[0] + 1),) if index else (None,)
        of_lse = (*first, slice(None), of_rows)
        alone = results(taken(batch, (*first, of_rows), (*first, of_keys), of_lse, sequences=None), options)
        assert_equal(
            alone,
            *(together[name][(*first, span)] for name, span in (("dq", of_rows), ("dk", of_keys), ("dv", of_keys))),
        )


@few
@given(data=st.data())
def test_a_group_is_the_fold_of_heads_with_keys_of_their_own(options, data):
    """dQ bit by bit; dK and dV of the group are summed before they are rounded."""
    batch = data.draw(problems(options))
    kv_heads, group = batch.k.shape[-2], batch.q.shape[-2] // batch.k.shape[-2]
    own = {name: getattr(batch, name).repeat_interleave(group, dim=-2) for name in KEYS}
    apart, together = results(dataclasses.replace(batch, **own), options), results(batch, options)
    assert torch.equal(apart["dq"], together["dq"])
    rounding = torch.finfo(options.dtype).eps / 2
    for name in ("dk", "dv"):
        difference = (folded(apart[name], kv_heads) - together[name].double()).norm()
        allowed = rounding * (apart[name].double().norm() + together[name].double().norm())
        assert difference <= allowed + 2**-24 * together[name].numel() ** 0.5


@few
@given(data=st.data(), cut=st.integers(1, 149))
def test_chunks_of_keys_with_the_final_lse_and_out_add_up(options, data, cut):
    """What a ring does: every chunk reads the O and LSE of all keys; dQ is a sum, dK and dV are side by side.

    Bounds are relative to the last key, so that those of the first chunk move by the keys that it lacks.
    """
    batch = data.draw(problems(options))
    if options.packed:
        batch = _first_sequence(batch)
    lacks = batch.k.shape[-3] - min(cut, batch.k.shape[-3])
    at = batch.k.shape[-3] - lacks
    bounds = _bounds(options.mask)
    moved = tuple(None if bound is None else bound + sign * lacks for bound, sign in zip(bounds, (-1, 1)))
    whole, parts = results(batch, options), []
    for keys, window in ((slice(0, at), moved), (slice(at, None), bounds)):
        if not batch.k[..., keys, :, :].numel():
            continue
        chunk = {name: getattr(batch, name)[..., keys, :, :] for name in KEYS}
        rows, sequences = batch.q.shape[-3], batch.scoring.sequences
        packing = None if sequences is None else sequences_of([(rows, chunk["k"].shape[-3])])
        scoring = dataclasses.replace(batch.scoring, causal=False, window=window, sequences=packing)
        parts.append(results(dataclasses.replace(batch, **chunk, scoring=scoring), options))
    for name in ("dk", "dv"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=-3), whole[name])
    summed = sum(part["dq"].double() for part in parts)
    scale = sum(float(part["dq"].double().norm()) for part in parts)
    assert (summed - whole["dq"].double()).norm() <= 2**-7 * scale + 2**-24 * whole["dq"].numel() ** 0.5


def _bounds(mask: str) -> tuple[int | None, int | None]:
    return (None, 0) if mask == "causal" else MASKS[mask].get("window", (None, None))


def _first_sequence(batch: Batch) -> Batch:
    """The first packed sequence that has rows and keys, alone but still packed; else the batch with one sequence."""
    for _, rows, keys in spans(batch):
        if rows and keys:
            at = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
            alone = sequences_of([(len(rows), len(keys))])
            return taken(batch, at[:1], at[1:], (slice(None), at[0]), sequences=alone)
    return batch


@few
@given(data=st.data())
def test_spellings_of_a_mask_are_one_mask(options, data):
    """Bounds that nobody reaches, and the tighter of two: the same bits, though other kernels make them.

    Every spelling is one more kernel to compile; a softcap, which is applied before any mask, meets one of each mask.
    """
    batch = data.draw(problems(options, lengths=_square(options)))
    far = batch.q.shape[-3]
    spellings = {
        "dense": [{"window": (far - 1, far - 1)}, {"window": (None, 2**31 - 1)}, {"window": (2**40, None)}],
        "causal": [{"window": (None, 0)}, {"window": (far - 1, 0)}, {"causal": True, "window": (far, 3)}],
        "window": [{"window": (60, 25)}],
        "left": [{"window": (70, far)}, {"window": (70, 2**31)}],
    }[options.mask]
    plain = results(batch, options)
    for spelling in spellings if options.softcap is None else spellings[:1]:
        scoring = dataclasses.replace(batch.scoring, **{"causal": False, "window": (None, None), **spelling})
        other = results(dataclasses.replace(batch, scoring=scoring), options)
        assert_equal(other, plain["dq"], plain["dk"], plain["dv"])


def _square(options) -> st.SearchStrategy[list[tuple[int, int]]]:
    """As many keys as rows, in every sequence."""
    lengths = st.integers(1, 90).map(lambda n: (n, n))
    return st.lists(lengths, min_size=1, max_size=3 if options.packed else 1)
