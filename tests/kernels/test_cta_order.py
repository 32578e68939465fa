"""CTAs take the tiles that the plan says, in its order, share K and V, and never wait for one that has not started."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.problems import FAST, run
from undertow import emulated, emulator, ptx
from undertow.emulator import machine
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.launch import CompiledBackward
from undertow.kernels.sm100.tensors import BackwardTensors, Workspaces, allocate_workspaces
from undertow.plan.description import Launch
from undertow.plan.grid import Grid, Place, heads_per_bundle
from undertow.reference import Scoring

SCORINGS = {
    "dense": Scoring(),
    "causal": Scoring(causal=True),
    "left": Scoring(window=(140, None)),
    "sliding": Scoring(causal=True, window=(140, None)),
}
EVERY_SCORING = pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
TILES = 3


def described(
    batch: Batch, deterministic: bool
) -> tuple[CompiledBackward, BackwardTensors, Workspaces, dict[str, Launch]]:
    """The launches of the split schedule by name, with the first kernel already run."""
    settings, tensors = emulated.settings_of(batch.scoring, deterministic), emulated.tensors_of(batch)
    work = allocate_workspaces(tensors, deterministic)
    compiled = launch.compile_for("split", tensors, settings)
    named = zip(emulated.KERNELS, launch.launches(compiled, tensors, settings, work))
    launches: dict[str, Launch] = {name: each for name, (_, each) in named}
    emulator.launch(compiled.preprocess.ptx, launches["preprocess"], FAST)
    return compiled, tensors, work, launches


@EVERY_SCORING
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_cta_writes_the_tile_of_its_number(scoring, deterministic):
    """One after the other on results full of NaN: what is a number afterwards is what that CTA owns."""
    shape = Shape(2, 300, 300, 6, 3)
    compiled, tensors, _, launches = described(random_batch(shape, scoring=scoring), deterministic)
    bundle = heads_per_bundle(shape.seqlen_q, 2, 3) if compiled.plan.attention.masked else 1
    grid = Grid(TILES, 3, shape.batch, bundle, compiled.plan.attention.descending)
    assert launches["main"].grid == (grid.num_ctas, 1, 1) and grid.num_ctas == 18
    main = emulator.load_program(compiled.main.ptx, compiled.main.entry)
    for number in range(grid.num_ctas):
        tensors.dk.fill_(torch.nan)
        emulator.launch(main, launches["main"], emulator.Options("auto", cta_order=[number]))
        written = ~tensors.dk.isnan().any(dim=-1)
        owners = {Place(int(row) // 128, int(head), int(batch)) for batch, row, head in written.nonzero()}
        assert owners == {grid.place(number)}
        assert int(written.sum()) == min(128, 300 - 128 * grid.place(number).kv_tile)


@EVERY_SCORING
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=["mha", "gqa"])
def test_k_and_v_are_loaded_once_for_all_query_heads_of_a_group(scoring, heads):
    """A tensor copy of each for a CTA, however many heads share them, and one of Q and of dO for each trip."""
    done = run(random_batch(Shape(1, 300, 300, *heads), scoring=scoring))
    main = launch.compile_backward(done.plan).main
    copies = [
        int(done.results["main"].executions[i.index])
        for i in ptx.parse_module(main.ptx).entry(main.entry).instructions
        if i.mnemonic.startswith("cp.async.bulk.tensor")
    ]
    assert sum(copies) == 2 * TILES * heads[1] + 2 * done.tile_iterations


def order_within(slots: int, ctas: int) -> list[int]:
    """The hardest order that `slots` CTAs started in order allow: of each handful the last one comes first."""
    return [number for first in range(0, ctas, slots) for number in reversed(range(first, min(first + slots, ctas)))]


@pytest.mark.parametrize("scoring", [SCORINGS["dense"], SCORINGS["causal"]], ids=["ascending", "descending"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_turns_end_with_few_ctas_at_a_time(monkeypatch, scoring, slots):
    """NumPy back end, whose limit of CTAs side by side is a number; it starts another only beside one that spins."""
    monkeypatch.setattr(machine, "MAX_RESIDENT", slots)
    compiled, _, work, launches = described(random_batch(Shape(1, 300, 300, 2), scoring=scoring), deterministic=True)
    order = order_within(slots, launches["main"].grid[0])
    main = emulator.load_program(compiled.main.ptx, compiled.main.entry)
    emulator.launch(main, launches["main"], emulator.Options("numpy", completion="late", cta_order=order))
    limited = work.dq_accumulator.clone()
    work.dq_accumulator.zero_()
    assert work.turns is not None
    work.turns.zero_()
    emulator.launch(main, launches["main"], FAST)
    assert torch.equal(limited, work.dq_accumulator)


def test_a_cta_that_starts_before_those_it_waits_for_blocks_the_only_slot(monkeypatch):
    """Negative control: the limit is one, and the order in which CTAs start is what the mode relies on."""
    monkeypatch.setattr(machine, "MAX_RESIDENT", 1)
    compiled, _, _, launches = described(random_batch(Shape(1, 128, 300, 1)), deterministic=True)
    backwards = emulator.Options("numpy", cta_order=[2, 1, 0])
    with pytest.raises(emulator.Deadlock, match="every resident CTA spins"):
        emulator.launch(compiled.main.ptx, launches["main"], backwards)
