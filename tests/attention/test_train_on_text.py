"""The training on text: both backends run on a CPU, and the criterion passes what is noise and nothing else."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROUNDING = 2.0**-9  # relative, to bf16
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_on_text.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_on_text", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runs(bias: float = 0.0, scatter: float = 0.001, seeds: int = 4) -> list[dict[str, Any]]:
    """Made up: seeds are 0.01 apart, runs of one seed 0.001; undertow's are off by more."""
    draw = random.Random(0)
    found = []
    for seed in range(seeds):
        curve = [4 * 0.99**step + draw.gauss(0, 0.01) for step in range(300)]
        offset = draw.gauss(0, 0.01)
        for backend, shift, width in (("undertow", bias, scatter), ("torch", 0.0, 0.0), ("torch-again", 0.0, 0.001)):
            moved = shift + offset + draw.gauss(0, width)
            found.append(
                {
                    "backend": backend,
                    "seed": seed,
                    "config": {"steps": 300},
                    "text": {"bytes": 1},
                    "losses": [loss + moved for loss in curve],
                    "held_out": {"300": curve[-1]},
                    "step_ms": {"median": 20.0},
                }
            )
    return found


def apart(example: ModuleType, config: Any, text: Any, device: str) -> float:
    """How far the losses of two right runs may be from each other after the first few steps.

    A loss is the difference of two functions of the logits, each of which moves by no more than the logit that moves
    most: two roundings of it in each run. AdamW moves a weight by up to the learning rate, in the sign of its gradient;
    signs differ where gradients are below their error, a rounding in each run, so that over the steps the loss moves by
    no more than twice the learning rates times that part of the sum of the gradients' magnitudes.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = example.GPT(config, example.attention_by("torch", device))
    given, wanted = example.windows(text.training, torch.zeros(config.batch, dtype=torch.int64), config)
    with torch.autocast(device, torch.bfloat16):
        logits = model(given)
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten()).backward()
    gradients = sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
    moved = sum(config.learning_rate * min(1.0, (step + 1) / config.rising_steps) for step in range(config.steps - 1))
    return 4 * ROUNDING * float(logits.abs().max()) + 2 * moved * 2 * ROUNDING * gradients


def test_noise_is_let_pass(example):
    lines, holds = example.compare(runs())
    assert holds and len(lines) == 14


@pytest.mark.parametrize("wrong", [{"bias": 0.1}, {"bias": -0.1}, {"scatter": 0.02}, {"bias": 0.01}])
def test_what_is_more_than_noise_is_not(example, wrong):
    assert not example.compare(runs(**wrong))[1]


def test_runs_that_cannot_be_compared_are_refused(example):
    with pytest.raises(SystemExit, match="a comparison needs one run of each of"):
        example.compare(runs()[:-1])
    with pytest.raises(SystemExit, match=r"of \[2, 3, 4, 5, 6, 8\] seeds"):
        example.compare(runs(seeds=1))
    with pytest.raises(SystemExit, match="not of one size on one text"):
        example.compare([*runs()[1:], {**runs()[0], "text": {"bytes": 2}}])
    same = [{**run, "losses": [1.0] * 50} for run in runs()]
    with pytest.raises(SystemExit, match="without noise there is no criterion"):
        example.compare(same)


def test_a_run_leaves_a_record(example, tmp_path, capsys):
    path, sizes = tmp_path / "train.jsonl", ["--steps", "2", "--seqlen", "40", "--heads", "1", "--layers", "1"]
    assert example.main(["--seeds", "1", "--output", str(path), *sizes, "--batch", "1", "--evaluate-every", "2"]) == 0
    ours, torchs, again = (json.loads(line) for line in path.read_text().splitlines())
    assert [r["backend"] for r in (ours, torchs, again)] == list(example.BACKENDS)
    assert ours["text"]["bytes"] > 1_000_000 and len(ours["text"]["sha256"]) == 64
    assert 5 < ours["losses"][0] < 6 and list(ours["held_out"]) == ["2"] and ours["step_ms"]["median"] > 0
    config = example.Config(layers=1, heads=1, seqlen=40, batch=1, steps=2)
    bound = apart(example, config, example.library_text("cpu"), "cpu")
    assert bound < 0.01 < torchs["losses"][0] - torchs["losses"][1], "what a step changes is more than the bound"
    assert ours["losses"] == pytest.approx(torchs["losses"], abs=bound)
    assert torchs["backward_passes"] == {} and "undertow, seed 0: loss" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert ours["backward_passes"] == {"emulator": 2} and again["losses"] == torchs["losses"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_backward_pass_is_ours(example):
    text, config = example.library_text("cuda"), example.Config(layers=2, heads=4, seqlen=512, steps=5)
    ours, torchs = (example.train(config, name, 0, text, "cuda") for name in ("undertow", "torch"))
    (backend,) = ours["backward_passes"]
    assert backend in ("sm90", "sm100") and ours["backward_passes"][backend] == 10
    assert torchs["backward_passes"] == {}
    assert ours["losses"] == pytest.approx(torchs["losses"], abs=apart(example, config, text, "cuda"))
