"""A transformer learns through the emulated kernels what it learns through float64 gradients, but for rounding.

The noise that bf16 makes is measured, not guessed: the same training with P, dS and the results, which every 16-bit
kernel rounds, rounded at random instead of to nearest. The kernels' losses may be 1.25 times as far from those of the
reference as the furthest of three such runs; the factor is that of all error budgets here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import undertow
from tests.attention.places import Place
from undertow.attention import counts, reset_counts
from undertow.reference import Scoring, blocks, probabilities, row_stats
from undertow.tolerance import IDEAL_FACTOR

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_small_gpt.py"
CAUSAL = Scoring(causal=True)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_small_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def randomly_rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    """`x` in bf16, up or down with the probability that makes the mean right; float64."""
    bits = x.float().view(torch.int32)
    low = torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32)
    return ((bits + low) & -(2**16)).view(torch.float32).double()


class RandomlyRounded(torch.autograd.Function):
    """Causal attention; its gradients are right but for one random rounding of P, of dS and of each result.

    scales: factors on dq, dk, dv, for gradients that are wrong.
    """

    @staticmethod
    def forward(ctx, q, k, v, generator, scales):
        out, lse = undertow.flash_attn_func(q, k, v, causal=True, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.generator, ctx.scales = generator, scales
        return out

    @staticmethod
    def backward(ctx, *grads):
        (dout,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        stats = row_stats(out, dout, lse)
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v))
        for block in blocks(q, k, v, CAUSAL):
            do = dout[block.where].double()
            p = probabilities(block.scores, stats.lse[block.row_index])
            ds = p * (do @ block.v.T - stats.d[block.row_index][:, None])
            p, ds = (randomly_rounded(x, ctx.generator) for x in (p, ds))
            dq[block.where] = ds @ block.k / 8
            dk[block.kv] += ds.T @ block.q / 8
            dv[block.kv] += p.T @ do
        made = (randomly_rounded(s * x, ctx.generator).bfloat16() for s, x in zip(ctx.scales, (dq, dk, dv)))
        return *made, None, None


def distance(a: list[float], b: list[float]) -> float:
    """The largest difference of two curves."""
    return max(abs(x - y) for x, y in zip(a, b))


def rounded_runs(example: ModuleType, config, seeds: range, scales=(1, 1, 1)) -> list[list[float]]:
    runs = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        runs.append(example.train(config, lambda q, k, v, g=generator: RandomlyRounded.apply(q, k, v, g, scales)))
    return runs


def test_training_follows_the_reference_within_the_noise_of_rounding(example, kernels: Place):
    config = example.Config()
    assert (config.layers, config.steps) == (3, 20)
    reference = example.train(config, example.attention_by("reference"))
    noise = max(distance(run, reference) for run in rounded_runs(example, config, range(3)))
    reset_counts()
    losses = example.train(config, example.attention_by(kernels.backend), kernels.device)
    ran = counts()
    assert sum(ran.values()) == 60 and set(ran) <= {"emulator", "sm100", "sm90"}, "three layers, twenty steps"
    assert distance(losses, reference) <= IDEAL_FACTOR * noise, (losses, reference, noise)
    assert reference[-1] < reference[0] - 1, "it learns"
    for scales in ((1, 1, 1.02), (1.5, 1.5, 1)):
        (wrong,) = rounded_runs(example, config, range(1), scales)
        assert distance(wrong, reference) > IDEAL_FACTOR * noise, f"gradients wrong by factors {scales} are seen"


def test_the_script_tells_who_ran(example, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_small_gpt.py", "--steps", "2", "--seqlen", "16", "--heads", "1"])
    example.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "backward passes: {'emulator': 6}" or torch.cuda.is_available()
    assert said[1].split()[:3] == ["step", "emulator", "reference"] and len(said) == 4
