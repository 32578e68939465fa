"""Reports about bounds of windows and about results that differ from run to run. Each test names its public thread."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

from tests.kernels.problems import FAST, complaints, is_zero, run
from tests.public_cases.batches import BF16, F16, packing, randn, reported
from undertow import emulated, emulator
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.tensors import allocate_workspaces
from undertow.plan.attention import Attention
from undertow.plan.tiles import Tiling, band
from undertow.reference import DENSE, Gradients, Scoring

CAUSAL = Scoring(causal=True)


def counted(lengths: tuple[int, int], scoring: Scoring) -> torch.Tensor:
    """How much of the rows each key gets: with q = 0 and dO = 1 a row gives each of its n keys 1 / n."""

    def change(tensors):
        tensors["q"].zero_()
        tensors["dout"].fill_(1)

    return run(reported(lengths, scoring=scoring, change=change)).gradients.dv[0, :, 0, 0].double()


def shares(lengths: tuple[int, int], scoring: Scoring) -> torch.Tensor:
    """The same from the definition."""
    kept = scoring.kept(range(lengths[0]), *lengths)
    kept = torch.ones(lengths, dtype=torch.bool) if kept is None else kept
    return (kept / kept.sum(dim=1, keepdim=True).clamp(min=1).double()).sum(dim=0)


@pytest.mark.parametrize("right", [7, 2**31 - 1])
def test_a_right_bound_is_not_clamped_to_the_keys(right):
    """Dao-AILab/flash-attention#895: 8 rows, 4 keys, all 32 pairs kept."""
    assert torch.allclose(counted((8, 4), Scoring(window=(None, right))), torch.full((4,), 2.0, dtype=torch.float64))


def test_four_ways_to_say_causal():
    """Dao-AILab/flash-attention#1133."""
    results = [
        run(reported((256, 256), scoring=scoring)).gradients
        for scoring in (CAUSAL, *(Scoring(window=(left, 0)) for left in (None, 256, 255)))
    ]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_four_ways_to_say_causal_at_sixteen_thousand_rows():
    """Dao-AILab/flash-attention#1133: the same tiles are visited, the same ones masked, and the bits are the same.

    The first and the last CTA of the main kernel run, on any O and LSE: those of the last keys meet the diagonal only,
    those of the first all rows of the left bound.
    """
    seqlen = 16384
    spellings = [CAUSAL, *(Scoring(window=(left, 0)) for left in (None, seqlen, seqlen - 1))]
    tilings = [Tiling(seqlen, seqlen, band(scoring.causal, scoring.window)) for scoring in spellings]
    for kv_tile in range(seqlen // 128):
        assert len({(t.query_tiles(kv_tile), t.unmasked_query_tiles(kv_tile)) for t in tilings}) == 1
    q, k, v, out, dout = (randn(seed, 1, seqlen, 1, 64).bfloat16() for seed in range(5))
    tensors = emulated.tensors_of(Batch(q, k, v, dout, out, torch.full((1, 1, seqlen), 9.0)))
    results = []
    for scoring in spellings:
        given = dataclasses.replace(tensors, dk=torch.full_like(k, torch.nan), dv=torch.full_like(k, torch.nan))
        settings = emulated.settings_of(scoring)
        compiled = launch.compile_for("split", given, settings)
        for kernel, described in launch.launches(compiled, given, settings)[:2]:
            order = [0, seqlen // 128 - 1] if kernel is compiled.main else None
            emulator.launch(kernel.ptx, described, emulator.Options("auto", cta_order=order))
        results.append(
            torch.cat([x[0, keys] for x in (given.dk, given.dv) for keys in (slice(128), slice(-128, None))])
        )
    assert torch.isfinite(results[0]).all() and all(torch.equal(results[0], other) for other in results[1:])


def test_a_band_that_is_empty_on_purpose_stays_empty():
    """Dao-AILab/flash-attention PR 2490."""
    batch = reported((64, 64), scoring=Scoring(window=(7, -8)))
    assert (batch.lse == -torch.inf).all() and all(map(is_zero, run(batch).gradients))


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1)])
def test_minus_one_is_a_number(window):
    """NVIDIA/TransformerEngine#3528: only None is no bound. With a left bound of -1, causal rows see nothing."""
    batch = reported((64, 64), scoring=Scoring(causal=True, window=window))
    assert (batch.lse == -torch.inf).all() and all(map(is_zero, run(batch).gradients))


@pytest.mark.parametrize("left", [None, 2**31 - 1, 2**40])
def test_a_bound_that_no_key_reaches_is_none(left):
    """NVIDIA/TransformerEngine#3528: 8 heads of 1024 rows in the report."""
    expected, got = (
        run(reported((1024, 1024), (2, 2), scoring)).gradients
        for scoring in (CAUSAL, Scoring(causal=True, window=(left, 0)))
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


@pytest.mark.parametrize("window", [(0, 0), (0, None), (None, 0)])
def test_zero_is_a_bound(window):
    """Dao-AILab/flash-attention PR 2624."""
    batch = reported((150, 150), scoring=Scoring(window=window))
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    if window == (0, 0):
        assert torch.equal(gradients.dv, batch.dout)


def test_bounds_are_inclusive():
    """huggingface/transformers#39408: with 15 to the left, a row sees 16 keys; with 16, it sees 17."""
    for keys in (16, 17):
        scoring = Scoring(window=(keys - 1, 0))
        assert torch.allclose(counted((64, 64), scoring), shares((64, 64), scoring), rtol=2**-7, atol=0)
        assert int(scoring.kept(range(40, 41), 64, 64).sum()) == keys  # type: ignore[union-attr]
        assert counted((64, 64), scoring)[63].item() == pytest.approx(1 / keys, rel=2**-7), "the last row's share"


def test_a_causal_call_leaves_nothing_behind_for_the_next():
    """NVIDIA/TransformerEngine#629: cross attention after self attention."""
    first = reported((64, 128))
    before = run(first).gradients
    run(reported((64, 128), scoring=CAUSAL))
    assert all(torch.equal(a, b) for a, b in zip(before, run(first).gradients))
    assert not complaints(first, before)


def test_causal_means_the_last_row_and_the_last_key_with_grouped_heads():
    """xlite-dev/ffpa-attn PR 300."""
    batch = reported((64, 192), (4, 2), CAUSAL)
    assert not complaints(batch, run(batch).gradients)


def test_a_right_window_whose_last_tile_some_rows_do_not_see():
    """tile-ai/TileOPs PR 1633."""
    batch = reported((512, 512), (8, 2), Scoring(window=(None, 64)))
    first = emulated.backward(batch, deterministic=True, options=FAST).gradients
    again = emulated.backward(batch, deterministic=True, options=emulator.Options("auto", 7, ("seeded", 7))).gradients
    assert not complaints(batch, first) and all(torch.equal(a, b) for a, b in zip(first, again))


MATRIX = {
    "full": DENSE,
    "causal": CAUSAL,
    "local": Scoring(window=(128, 0)),
    "packed-causal": Scoring(causal=True, sequences=packing([0, 300, 1000], [0, 300, 1000])),
    "packed": Scoring(sequences=packing([0, 300, 1000], [0, 300, 1000])),
    "packed-local": Scoring(window=(128, 0), sequences=packing([0, 300, 1000], [0, 300, 1000])),
}


@pytest.mark.parametrize("scoring", MATRIX.values(), ids=MATRIX)
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_turns_advance_under_every_mask_and_packing(scoring, heads):
    """Dao-AILab/flash-attention PR 1893: nobody waits for a CTA that skips a tile."""
    lengths = (1000, 1000) if scoring.sequences is not None else (400, 400)
    batch = reported(lengths, heads, scoring)
    first, again = (
        emulated.backward(batch, deterministic=True, options=options).gradients
        for options in (FAST, emulator.Options("auto", 3, ("seeded", 3)))
    )
    assert not complaints(batch, first) and all(torch.equal(a, b) for a, b in zip(first, again))


def test_repeated_runs_in_fp16():
    """Dao-AILab/flash-attention#2244: 2 x 512 rows; `tests/kernels/test_deterministic.py` looks at the sums too."""
    batch = random_batch(Shape(2, 512, 512, 2), dtype=F16)
    results = [
        emulated.backward(batch, deterministic=True, options=options).gradients
        for options in (FAST, *(emulator.Options("auto", seed, "late") for seed in range(4)))
    ]
    assert not complaints(batch, results[0])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize("completion", ["late", ("seeded", 1)], ids=str)
def test_no_order_of_warps_changes_a_bit_of_a_long_causal_head(completion):
    """Dao-AILab/flash-attention PR 2033: 2048 rows; LSE, D and dS handed on in any order that the barriers allow."""
    batch = reported((2048, 2048), scoring=CAUSAL)
    first, again = (
        emulated.backward(batch, deterministic=True, options=options).gradients
        for options in (FAST, emulator.Options("auto", 1, completion))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_the_buffers_of_turns_live_as_long_as_the_launches():
    """Dao-AILab/flash-attention PR 2063: nobody else holds them, and nobody may reuse their memory before."""
    batch = random_batch(Shape(1, 16, 16, 2, 1), scoring=CAUSAL)
    settings, tensors = emulated.settings_of(CAUSAL, deterministic=True), emulated.tensors_of(batch)
    work = allocate_workspaces(tensors, deterministic=True)
    buffers = {name: weakref.ref(x) for name, x in vars(work).items() if x is not None}
    launches = launch.launches(launch.compile_for("split", tensors, settings), tensors, settings, work)
    del work
    gc.collect()
    assert "turns" in buffers and all(buffer() is not None for buffer in buffers.values())
    for kernel, described in launches:
        emulator.launch(kernel.ptx, described, FAST)
    assert not complaints(batch, Gradients(tensors.dq, tensors.dk, tensors.dv))
    del launches, kernel, described
    gc.collect()
    assert all(buffer() is None for buffer in buffers.values())


def test_the_flag_chooses_another_kernel():
    """Dao-AILab/flash-attention#746, NVIDIA/cudnn-frontend PR 837, pytorch/pytorch PR 197771: a flag without effect."""
    for dtype, heads in ((BF16, (1, 1)), (F16, (4, 2))):
        batch = reported((40, 40), heads, dtype=dtype)
        plain, ordered = (emulated.backward(batch, deterministic=flag, options=FAST).plan for flag in (False, True))
        assert plain.attention == Attention() and ordered.attention == Attention(deterministic=True)
        names = [launch.compile_backward(chosen).main.entry for chosen in (plain, ordered)]
        assert "deterministic" not in names[0] and "deterministic" in names[1]


def test_without_the_flag_bits_differ_at_least_once():
    """Dao-AILab/flash-attention#1596: CTAs in reverse order add to dQ in reverse order."""
    tensors = emulated.tensors_of(reported((128, 700)))
    compiled, bits = launch.compile_for("split", tensors), []
    for order in (None, range(5, -1, -1)):
        work = allocate_workspaces(tensors)
        for kernel, described in launch.launches(compiled, tensors, workspaces=work):
            chosen = order if kernel is compiled.main else None
            emulator.launch(kernel.ptx, described, emulator.Options("auto", cta_order=chosen))
        bits.append(work.dq_accumulator)
    assert not torch.equal(*bits)
