"""The SM90 kernels, executed instruction by instruction: right gradients, and nothing that an observer objects to."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.problems import FAST, complaints
from undertow import emulated, emulator
from undertow.check import check
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm90.launch import compile_for, launches
from undertow.reference import Gradients, Scoring

CAUSAL = Scoring(causal=True)
CASES = {
    "dense": (Shape(1, 300, 200, 1, 1), Scoring()),
    "one tile": (Shape(1, 64, 128, 1, 1), Scoring()),
    "causal, grouped heads": (Shape(1, 384, 384, 4, 2), CAUSAL),
    "window": (Shape(1, 500, 400, 1, 1), Scoring(window=(150, 60))),
    "more keys than rows": (Shape(2, 130, 300, 1, 1), CAUSAL),
}


def gradients(batch: Batch, deterministic: bool = False) -> Gradients:
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring, deterministic)
    for kernel, launch in launches(compile_for(None, tensors, settings), tensors, settings):
        emulator.launch(emulated.program(kernel.ptx, kernel.entry), launch, FAST)
    return Gradients(tensors.dq, tensors.dk, tensors.dv)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(name):
    batch = random_batch(CASES[name][0], 0, CASES[name][1])
    assert complaints(batch, gradients(batch)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [-0.3, 1e-5, 20.0])
def test_scales_and_rows_that_see_nothing(scale, dtype):
    batch = random_batch(Shape(1, 300, 200, 1, 1), 0, Scoring(causal=True, softmax_scale=scale), dtype=dtype)
    assert complaints(batch, gradients(batch)) == []


@pytest.mark.slow
def test_fp16():
    batch = random_batch(Shape(1, 300, 200, 1, 1), 0, CAUSAL, dtype=torch.float16)
    assert complaints(batch, gradients(batch)) == []


@pytest.mark.slow
def test_deterministic_turns():
    batch = random_batch(Shape(1, 300, 400, 1, 1), 0, CAUSAL)
    assert complaints(batch, gradients(batch, deterministic=True)) == []


@pytest.mark.parametrize("options", [emulator.Options(), emulator.Options(schedule=1, completion="late")])
@pytest.mark.parametrize("causal", [False, True])
def test_observers_find_nothing(options, causal):
    """Races, barriers, proxies, uninitialised memory, wgmma registers: three tiles of rows use every stage again."""
    batch = random_batch(Shape(1, 384, 256, 1, 1), 0, Scoring(causal=causal))
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring)
    compiled = compile_for(None, tensors, settings)
    for kernel, launch in launches(compiled, tensors, settings):
        plan = compiled.plan if kernel is compiled.main else None
        checked = check(emulated.program(kernel.ptx, kernel.entry), launch, options, plan=plan)
        assert checked.error is None
        assert checked.errors == (), kernel.name
    assert complaints(batch, Gradients(tensors.dq, tensors.dk, tensors.dv)) == []


@pytest.mark.parametrize("removed", ["fence.proxy.async.shared::cta", "wgmma.wait_group.sync.aligned", "bar.arrive"])
def test_observers_notice_what_is_taken_away(removed):
    """The same kernel without one kind of its synchronisation is found out."""
    batch = random_batch(Shape(1, 384, 128, 1, 1))
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring)
    (rows, first), (main, launch), _ = launches(compile_for(None, tensors, settings), tensors, settings)
    emulator.launch(emulated.program(rows.ptx, rows.entry), first)
    lines = main.ptx.splitlines()
    kept = [line for line in lines if removed not in line]
    assert len(kept) < len(lines), "nothing was removed"
    assert not check("\n".join(kept), launch).clean
