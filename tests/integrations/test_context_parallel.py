"""torch's context parallelism over two processes on the CPU: the ring ends in our backward pass, and is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integrations.ring_process import VARIANTS
from undertow.inputs import Batch, complete
from undertow.reference import Gradients, Scoring, attention_forward, ideal_backward, round_to, row_stats
from undertow.tolerance import IDEAL_FACTOR, relative_error, yardstick

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
STEPS = {  # the first of two sees nothing of the last chunk, unless work is balanced
    "balanced": (2, 2),
    "unbalanced": (1, 2),
    "full": (2, 2),
    "emulator": (2, 2),
}


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
    whole = torch.arange(batch.q.shape[1]).chunk(4)
    first, last = ((0, 1), (2, 3)) if variant in ("unbalanced", "full") else ((0, 3), (1, 2))
    owned = [torch.cat([whole[chunk] for chunk in chunks]) for chunks in (first, last)]
    measure, ideal = yardstick(batch, batch.scoring), ideal_ring(batch, owned)
    for name, want, floor in zip(Gradients._fields, measure.reference, measure.floor):
        budget = IDEAL_FACTOR * relative_error(getattr(ideal, name), want) + floor
        assert relative_error(parts[name], want) <= budget, name
    exact = attention_forward(batch.q, batch.k, batch.v, batch.scoring).out
    assert relative_error(parts["out"], exact) <= 2 * 2.0**-9, "parts are rounded to bf16, and then their sum"
    backend = variant if variant == "emulator" else "reference"
    assert found["counts"] == {backend: STEPS[variant][rank] + 1}, "one a step that sees anything, one for all"


def ideal_ring(batch: Batch, owned: list[Tensor]) -> Gradients:
    """What is left if nothing but number formats err, in a ring too: each step's gradients are rounded, then added up.

    owned: the rows of each device. The steps of dK and dV are those of the queries of one device, whose dO alone is
    not zero; the steps of dQ are those of the keys of one device.
    """
    sums = [torch.zeros(x.shape, dtype=torch.float64) for x in (batch.q, batch.k, batch.v)]
    for rows in owned:
        mine = torch.zeros(1, batch.q.shape[1], 1, 1, dtype=batch.q.dtype).index_fill(1, rows, 1)
        for dout, k, names in ((batch.dout * mine, batch.k, ("dk", "dv")), (batch.dout, batch.k * mine, ("dq",))):
            stats = row_stats(batch.out, dout, batch.lse)
            step = ideal_backward(batch.q, k, batch.v, dout, stats, batch.scoring)
            for name in names:
                sums[Gradients._fields.index(name)] += getattr(step, name).double()
    return Gradients(*(round_to(x, batch.q.dtype) for x in sums))
