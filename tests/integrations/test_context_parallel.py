"""torch's context parallelism over two processes on the CPU: the ring ends in our backward pass, and is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.ring_process import VARIANTS
from undertow.inputs import complete
from undertow.reference import Gradients, Scoring, attention_forward
from undertow.tolerance import relative_error, yardstick
from undertow.verify import complaint

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
STEPS = {"balanced": (2, 2), "unbalanced": (1, 2), "full": (2, 2)}  # the first of two sees nothing of the last chunk


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """A folder with what each process of the example has computed."""
    folder = tmp_path_factory.mktemp("ring")
    processes = [start(rank, folder) for rank in range(PROCESSES)]
    try:
        output = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * PROCESSES, "\n".join(output)
    return folder


def start(rank: int, folder: Path) -> subprocess.Popen[str]:
    module, meeting = "tests.integrations.ring_process", str(folder / "meeting")
    return subprocess.Popen(
        [sys.executable, "-m", module, str(rank), str(PROCESSES), meeting, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("rank", range(PROCESSES))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ring_gives_what_one_device_gives(results, variant, rank):
    found = torch.load(results / f"{variant}-{rank}")
    rows = {name: x.transpose(1, 2) for name, x in zip(("q", "k", "v", "dout"), found["tensors"])}
    batch = complete(rows, Scoring(causal=variant != "full"))
    parts = {name: x.transpose(1, 2) for name, x in found["parts"].items()}
    assert not complaint(yardstick(batch, batch.scoring), Gradients(*(parts[name] for name in Gradients._fields)))
    exact = attention_forward(batch.q, batch.k, batch.v, batch.scoring).out
    assert relative_error(parts["out"], exact) <= 2 * 2.0**-9, "parts are rounded to bf16, and then their sum"
    assert found["counts"] == {"reference": STEPS[variant][rank] + 1}, (
        "one for each step that sees anything, one for all"
    )
