"""Compiled calls on a real GPU: streams, graphs, devices, threads, and right values. Cases C01, C02, C05, C07."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.problems import complaints
from tests.runtime import on_device
from tests.runtime.calls import moved
from undertow import emulated
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm100.tensors import BackwardTensors
from undertow.reference import Gradients, Scoring
from undertow.runtime import device, objects
from undertow.runtime.architectures import ARCHITECTURES, Architecture

pytestmark = pytest.mark.gpu
TARGETS = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
ROOT = Path(__file__).resolve().parents[2]

FIRST_WORK = """
import sys, torch
from tests.runtime.calls import tensors_for
from undertow.runtime import device
class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        tensors = tensors_for("dense", device="cuda")
        device.backward(sys.argv[1], tensors)
        return grad + tensors.dq.float().sum().cpu()
x = torch.ones(1, requires_grad=True)
Backward.apply(x).backward()
print(x.grad.item())
"""


@pytest.fixture
def row_kernels(tmp_path, monkeypatch):
    """The compiled call of the two row kernels, for the GPU that is here."""
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path))
    capability = torch.cuda.get_device_capability()
    if capability not in TARGETS:
        pytest.skip(f"no target for compute capability {capability}")
    row = Architecture("rows", TARGETS[capability], capability, "tests.runtime.row_calls")
    return objects.load(row, on_device.variant("dense")).function


@pytest.fixture
def arch() -> str:
    """The architecture whose kernels run here."""
    capability = torch.cuda.get_device_capability()
    found = [row.name for row in ARCHITECTURES.values() if row.capability == capability]
    if not found:
        pytest.skip(f"no kernels for compute capability {capability}")
    return found[0]


def problem(seed: int = 0, where: str = "cuda", causal: bool = True) -> tuple[Batch, BackwardTensors]:
    batch = random_batch(Shape(2, 384, 512, 4, 2), seed, Scoring(causal=causal))
    return batch, moved(emulated.tensors_of(batch), where)


def gradients(tensors: BackwardTensors) -> Gradients:
    return Gradients(tensors.dq.cpu(), tensors.dk.cpu(), tensors.dv.cpu())


@pytest.mark.parametrize("ask", [on_device.right_values, on_device.on_a_side_stream, on_device.in_a_graph])
def test_row_kernels(row_kernels, ask):
    assert ask(row_kernels) == []


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_right(arch, causal):
    batch, tensors = problem(causal=causal)
    device.backward(arch, tensors, emulated.settings_of(batch.scoring))
    assert complaints(batch, gradients(tensors)) == []


def test_late_inputs_on_a_side_stream(arch):
    """Public case C01."""
    batch, tensors = problem()
    late = {x: x.clone() for x in (tensors.q, tensors.dout)}
    for x in late:
        x.fill_(torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        for x, values in late.items():
            x.copy_(values)
        device.backward(arch, tensors, emulated.settings_of(batch.scoring))
    torch.cuda.synchronize()
    assert complaints(batch, gradients(tensors)) == []


def test_a_graph_replays_to_the_same_bits(arch):
    """Public case C05: deterministic mode, inputs changed in place between the replays."""
    (batch, tensors), (other_batch, other) = problem(1), problem(2)
    settings = emulated.settings_of(batch.scoring, deterministic=True)
    device.backward(arch, other, settings)
    device.warm_up(arch, tensors, settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.backward(arch, tensors, settings)
    for name in ("q", "k", "v", "out", "dout", "lse"):
        getattr(tensors, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    assert complaints(other_batch, gradients(tensors)) == []
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(tensors, name), getattr(other, name)), name


def test_the_second_device_while_the_first_is_current(arch):
    """Public case C02."""
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability(1) != torch.cuda.get_device_capability(0):
        pytest.skip("needs two GPUs of a kind")
    batch, tensors = problem(where="cuda:1")
    device.backward(arch, tensors, emulated.settings_of(batch.scoring))
    assert torch.cuda.current_device() == 0
    assert complaints(batch, gradients(tensors)) == []


def test_the_first_work_of_a_process_may_be_ours_in_a_thread_of_autograd(arch):
    """Public case C07."""
    command = [sys.executable, "-c", FIRST_WORK, arch]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
