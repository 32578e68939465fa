"""The machine is asked through NVML by UUID; where it does not answer there are times without clocks."""

from __future__ import annotations

import sys
import time
import types

import pytest
import torch

from undertow.bench import machine
from undertow.bench.machine import BenchError, NvmlMonitor, require_gpu, revision_of, sources, versions


def nvml(**broken) -> types.ModuleType:
    """A library in the place of NVML that answers for one GPU."""
    module = types.ModuleType("pynvml")

    def by_uuid(uuid: str) -> str:
        assert uuid == "GPU-1234"
        return "handle"

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlSystemGetDriverVersion": lambda: "580.159.04",
        "nvmlDeviceGetClockInfo": lambda handle, kind: {"handle": 1665}[handle] if kind == "SM" else 0,
        "nvmlDeviceGetPowerUsage": lambda handle: 689_500,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 4,
        "NVML_CLOCK_SM": "SM",
    }
    vars(module).update(answers | broken)
    return module


def test_a_block_is_sampled_while_it_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monkeypatch.setattr(machine, "SAMPLE_SECONDS", 0.001)
    monitor = NvmlMonitor("GPU-1234")
    assert (monitor.driver, monitor.complaint) == ("580.159.04", None)
    with monitor.watch() as samples:
        deadline = time.monotonic() + 10
        while len(samples) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    seen = len(samples)
    assert seen >= 3 and set(samples) == {(1665.0, 689.5, 4)}
    time.sleep(0.02)
    assert len(samples) == seen  # nobody looks on behind the block


def test_without_nvml_there_are_no_samples_and_the_reason_is_told(monkeypatch):
    def refuse() -> None:
        raise RuntimeError("Driver/library version mismatch")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=refuse))
    monitor = NvmlMonitor("GPU-1234")
    assert monitor.complaint == "clock and power are not recorded: RuntimeError: Driver/library version mismatch"
    with monitor.watch() as samples:
        pass
    assert samples == []


def test_a_machine_without_a_gpu_is_told_what_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError, match=r"has no CUDA device: .* compute capability .*10\.0 \(sm100\)"):
        require_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_gpu()


def test_what_takes_part_is_named():
    found = versions()
    assert found["torch"] == torch.__version__ and {"undertow", "python", "nvidia-cutlass-dsl"} <= found.keys()
    assert "flash-attn-3" not in found


def test_sources_and_revision(tmp_path, monkeypatch):
    before = sources()
    assert len(before) == 16 and before == sources()
    (tmp_path / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(machine, "PACKAGE", tmp_path)
    first = sources()
    (tmp_path / "a.py").write_text("a = 2\n")
    assert len({before, first, sources()}) == 3
    assert revision_of(tmp_path) is None  # no repository
