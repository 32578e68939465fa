"""Reports about bounds of windows and about results that differ from run to run. Each test names its public thread."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.problems import complaints, is_zero, run
from tests.public_cases.batches import F16, packing, reported
from undertow import emulated, emulator
from undertow.plan.attention import Attention
from undertow.reference import DENSE, Scoring

CAUSAL = Scoring(causal=True)
FAST = emulator.Options(backend="auto")


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


def test_a_band_that_is_empty_on_purpose_stays_empty():
    """Dao-AILab/flash-attention PR 2490."""
    batch = reported((64, 64), scoring=Scoring(window=(7, -8)))
    assert (batch.lse == -torch.inf).all() and all(map(is_zero, run(batch).gradients))


def test_minus_one_is_a_number():
    """NVIDIA/TransformerEngine#3528: only None is no bound. With a left bound of -1, causal rows see nothing."""
    batch = reported((64, 64), scoring=Scoring(causal=True, window=(-1, 0)))
    assert (batch.lse == -torch.inf).all() and all(map(is_zero, run(batch).gradients))


@pytest.mark.parametrize("window", [(0, 0), (0, None), (None, 0)])
def test_zero_is_a_bound(window):
    """Dao-AILab/flash-attention PR 2624."""
    batch = reported((150, 150), scoring=Scoring(window=window))
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    if window == (0, 0):
        assert torch.equal(gradients.dv, batch.dout)


def test_bounds_are_inclusive():
    """huggingface/transformers#39408: with 15 to the left, a row sees 16 keys."""
    scoring = Scoring(window=(15, 0))
    assert torch.allclose(counted((64, 64), scoring), shares((64, 64), scoring), rtol=2**-7, atol=0)
    assert shares((64, 64), scoring)[20].item() == pytest.approx(1.0)


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
    """Dao-AILab/flash-attention#2244, smaller; `tests/kernels/test_deterministic.py` varies the order of CTAs too."""
    batch = reported((400, 400), (2, 2), dtype=F16)
    results = [
        emulated.backward(batch, deterministic=True, options=emulator.Options("auto", seed, "late")).gradients
        for seed in range(4)
    ]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_the_flag_chooses_another_kernel():
    """Dao-AILab/flash-attention#746 and pytorch/pytorch PR 197771: a flag without an effect."""
    batch = reported((40, 40))
    plain, ordered = (emulated.backward(batch, deterministic=flag, options=FAST).plan for flag in (False, True))
    assert plain.attention == Attention() and ordered.attention == Attention(deterministic=True)
