"""The SM90 kernels, executed instruction by instruction: right gradients, and nothing that an observer objects to."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.problems import complaints
from undertow import emulated, emulator
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


def gradients(batch: Batch, deterministic: bool = False, backend: str = "auto") -> tuple[Gradients, list]:
    """The gradients, and what the observers found in the three kernels."""
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring, deterministic)
    found = []
    for kernel, launch in launches(compile_for(tensors, settings), tensors, settings):
        result = emulator.launch(emulated.program(kernel.ptx, kernel.entry), launch, emulator.Options(backend=backend))
        found += result.findings
    return Gradients(tensors.dq, tensors.dk, tensors.dv), found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(name):
    batch = random_batch(CASES[name][0], 0, CASES[name][1])
    assert complaints(batch, gradients(batch)[0]) == []


@pytest.mark.slow
def test_fp16():
    batch = random_batch(Shape(1, 300, 200, 1, 1), 0, CAUSAL, dtype=torch.float16)
    assert complaints(batch, gradients(batch)[0]) == []


@pytest.mark.slow
def test_deterministic_turns():
    batch = random_batch(Shape(1, 300, 400, 1, 1), 0, CAUSAL)
    assert complaints(batch, gradients(batch, deterministic=True)[0]) == []


@pytest.mark.slow
def test_observers_find_nothing():
    """Races, barriers, proxies, uninitialised memory: three tiles of rows, so that every stage is used again."""
    batch = random_batch(Shape(1, 384, 128, 1, 1), 0, CAUSAL)
    result, found = gradients(batch, backend="numpy")
    assert found == []
    assert complaints(batch, result) == []
