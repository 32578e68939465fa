"""What only a GPU can show: real clocks, real libraries, a real profiler."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import torch

from tests.bench.stand_ins import cell_named
from undertow.bench.cellrun import Bench
from undertow.bench.machine import CudaStopwatch, NvmlMonitor, examine, uuid_of_current
from undertow.bench.measure import Method
from undertow.bench.peers import PROVIDERS
from undertow.bench.providers import UNDERTOW
from undertow.bench.records import BROKEN, MEASURED
from undertow.cli import main
from undertow.runtime.architectures import ARCHITECTURES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CELLS = ["mha-causal-8k-bf16", "gqa-varlen-8k-bf16", "mqa-local-16k-fp16", "mha-dense-1k-bf16-deterministic"]


def has_our_kernels() -> bool:
    return any(row.capability == torch.cuda.get_device_capability() for row in ARCHITECTURES.values())


def test_time_on_the_device_is_that_of_the_wall():
    stopwatch, cycles = CudaStopwatch(), 200_000_000
    stopwatch.seconds(lambda: torch.cuda._sleep(cycles), 1)  # the first call loads the kernel
    begin = time.perf_counter()
    measured = stopwatch.seconds(lambda: torch.cuda._sleep(cycles), 3)
    elapsed = time.perf_counter() - begin
    assert len(measured) == 3 and 0.8 * elapsed < sum(measured) < elapsed


def test_the_device_is_sampled():
    monitor = NvmlMonitor(uuid_of_current())
    if monitor.complaint:
        pytest.skip(monitor.complaint)
    stopwatch = CudaStopwatch()
    with monitor.watch() as samples:
        stopwatch.seconds(lambda: torch.cuda._sleep(500_000_000), 1)
    assert samples and all(100 < sample.clock_mhz < 4000 and 20 < sample.power_w < 2000 for sample in samples)
    assert examine(None, monitor).driver


@pytest.mark.parametrize("name", CELLS)
def test_small_cells_with_everything_that_is_installed(name):
    monitor = NvmlMonitor(uuid_of_current())
    providers = [provider for provider in PROVIDERS.values() if provider.missing() is None]
    bench = Bench(
        providers,
        Method(rounds=2, block_seconds=0.01),
        CudaStopwatch(),
        monitor,
        examine(None, monitor),
        size_of=lambda cell: cell.scaled,
        ceiling_size=1024,
    )
    found = {record.provider: record for record in bench.times(cell_named(name))}
    assert found["torch-flash"].status != BROKEN, found["torch-flash"].complaint
    if has_our_kernels():
        assert found[UNDERTOW].status == MEASURED, found[UNDERTOW].complaint


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs ncu")
def test_cycles_of_one_cell(tmp_path, capsys):
    words = ["bench", "--cycles", "--only", "mha-causal-8k-bf16", "--provider", "torch-flash", "--json"]
    assert main([*words, "--output", str(tmp_path / "bench.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 1
    (record,) = (json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines())
    assert record["cycles"] > 1e6 and len(record["kernels"]) >= 2
    assert record["cycles"] == max(kernel["cycles"] for kernel in record["kernels"])
