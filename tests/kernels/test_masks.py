"""Causal masks and windows in the kernels: right values, exact zeros, and nothing spent where nothing is masked."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.problems import complaints, is_zero, run
from undertow import ptx
from undertow.inputs import Shape, random_batch
from undertow.kernels.sm100 import launch, softmax
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.attention import Attention
from undertow.plan.tiles import Tiling, band
from undertow.reference import Scoring

BARRIERS_PER_TILE = {"aliased": 5, "slots": 3, "signals": 3, "split": 0}
COMPUTE_WARPS = 8
CAUSAL = Scoring(causal=True)

CASES = {  # seqlen_q, seqlen_k, scoring
    "causal": (384, 384, CAUSAL),
    "causal-more-rows": (300, 130, CAUSAL),
    "causal-more-keys": (130, 300, CAUSAL),
    "window": (300, 300, Scoring(window=(100, 40))),
    "wide": (400, 400, Scoring(window=(260, 140))),
    "sliding": (400, 400, Scoring(causal=True, window=(127, None))),
    "left-only": (260, 260, Scoring(window=(64, None))),
    "right-only": (260, 260, Scoring(window=(None, 70))),
    "off-centre": (256, 256, Scoring(window=(200, -150))),
    "ahead": (256, 256, Scoring(window=(-30, 90))),
}


def scored(seqlen_q: int, seqlen_k: int, scoring: Scoring, heads: int = 1, seed: int = 0):
    return random_batch(Shape(1, seqlen_q, seqlen_k, heads), seed, scoring)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_right_under_every_kind_of_mask(schedule, case):
    batch = scored(*CASES[case])
    done = run(batch, schedule)
    assert not complaints(batch, done.gradients)
    assert done.compute_barriers_per_tile == BARRIERS_PER_TILE[schedule]


LENGTHS = st.integers(1, 300)
BOUNDS = st.none() | st.integers(-320, 320)


@settings(max_examples=25)
@given(LENGTHS, LENGTHS, st.booleans(), st.tuples(BOUNDS, BOUNDS))
def test_any_window_on_any_lengths(seqlen_q, seqlen_k, causal, window):
    batch = scored(seqlen_q, seqlen_k, Scoring(causal=causal, window=window))
    assert not complaints(batch, run(batch).gradients)


def test_schedules_agree_bit_by_bit_on_dk_and_dv():
    batch = scored(*CASES["sliding"], heads=2)
    first, *others = (run(batch, schedule).gradients for schedule in SCHEDULES)
    for other in others:
        assert torch.equal(first.dk, other.dk) and torch.equal(first.dv, other.dv)


def mask_instructions(kernel) -> list[ptx.Instruction]:
    """What masking has become: the selects between scores and -inf, and all code of `masked`, bit tests included."""
    source, first = inspect.getsourcelines(softmax.masked)
    lines = range(first, first + len(source))

    def masks(instruction: ptx.Instruction) -> bool:
        where = instruction.source
        return instruction.mnemonic == "selp.f32" or (
            where is not None and where.file.endswith("sm100/softmax.py") and where.line in lines
        )

    return [i for i in ptx.parse_module(kernel.ptx).entry(kernel.entry).instructions if masks(i)]


@pytest.mark.parametrize("case", ["causal", "causal-more-keys", "wide", "left-only"])
def test_tiles_that_need_no_mask_execute_no_mask_instruction(case):
    seqlen_q, seqlen_k, scoring = CASES[case]
    batch = scored(seqlen_q, seqlen_k, scoring, heads=2)
    done = run(batch)
    found = mask_instructions(launch.compile_backward(done.plan).main)
    assert [i.mnemonic for i in found].count("selp.f32") == 64, "one select per score of a thread"
    assert len(found) > 64
    tiling = Tiling(seqlen_q, seqlen_k, band(scoring.causal, scoring.window))
    tiles = range(-(-seqlen_k // 128))
    masked = sum(tiling.query_tiles(n).count - tiling.unmasked_query_tiles(n).count for n in tiles)
    assert 0 < 2 * masked < done.tile_iterations, "the case has tiles of both kinds"
    executed = done.results["main"].executions
    assert {int(executed[i.index]) for i in found} == {masked * 2 * COMPUTE_WARPS}


def test_a_dense_kernel_has_no_mask_instruction():
    assert not mask_instructions(launch.compile_backward(plan("split")).main)


@pytest.mark.parametrize("flags", [("right",), ("left",), ("left", "right")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_masks_spill_no_register(schedule, flags):
    main = launch.compile_backward(plan(schedule, attention=Attention(**dict.fromkeys(flags, True)))).main
    resources = main.resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)


def test_tiles_without_a_pair_are_not_visited():
    done = run(scored(*CASES["sliding"]))
    assert done.tile_iterations == 4 + 3, "the diagonal and one tile under it, of 4 x 4"
    trips = {int(n) for n in done.results["main"].executions}
    assert done.tile_iterations * COMPUTE_WARPS in trips


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_keys_that_no_row_sees_get_exact_zeros(schedule):
    """Two of four key tiles have no trip at all; of the others some rows are unseen."""
    batch = scored(130, 512, Scoring(window=(50, 0)))
    gradients = run(batch, schedule).gradients
    unseen = 512 - 130 - 50
    assert is_zero(gradients.dk[:, :unseen]) and is_zero(gradients.dv[:, :unseen])
    assert not complaints(batch, gradients)


def test_a_window_without_keys_gives_zeros_everywhere():
    batch = scored(200, 200, Scoring(window=(7, -8)))
    done = run(batch)
    assert done.tile_iterations == 0 and all(map(is_zero, done.gradients))


@pytest.mark.parametrize("filling", [1.0, 1e30])
def test_rows_without_keys_are_out_of_everything(filling):
    """128 rows, 3 keys: 125 rows see nothing, whatever dO and O hold there."""
    batch = scored(128, 3, CAUSAL)
    batch.dout[:, :125] = filling
    batch.out[:, :125] = filling
    gradients = run(batch).gradients
    assert is_zero(gradients.dq[:, :125])
    alone = random_batch(Shape(1, 3, 3, 1), scoring=CAUSAL)
    for name in ("q", "dout", "out"):
        getattr(alone, name).copy_(getattr(batch, name)[:, 125:])
    for name in ("k", "v"):
        getattr(alone, name).copy_(getattr(batch, name))
    alone.lse.copy_(batch.lse[:, :, 125:])
    expected = run(alone).gradients
    assert torch.equal(gradients.dq[:, 125:], expected.dq)
    assert not complaints(alone, gradients._replace(dq=gradients.dq[:, 125:]))
    assert not complaints(alone, expected)


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-30, 1e4])
def test_masks_hold_for_every_scale(scale):
    """Zero makes every score alike and a negative scale turns their order round; neither may lift a mask."""
    batch = scored(200, 200, Scoring(softmax_scale=scale, causal=True))
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    if scale == 0.0:
        assert is_zero(gradients.dq) and is_zero(gradients.dk)


@pytest.mark.parametrize("window", [(None, 0), (255, 0), (256, 0), (2**31 - 1, 0)])
def test_a_window_that_is_causal_gives_the_bits_of_causal(window):
    causal, windowed = (scored(256, 256, scoring) for scoring in (CAUSAL, Scoring(window=window)))
    assert all(torch.equal(a, b) for a, b in zip(run(causal).gradients, run(windowed).gradients))


def test_a_row_that_sees_only_itself_is_exact():
    batch = scored(150, 150, Scoring(window=(0, 0)))
    gradients = run(batch).gradients
    assert torch.equal(gradients.dv, batch.dout)
    assert not complaints(batch, gradients)
