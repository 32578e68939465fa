"""Launch probes on the GPU at hand and read what they wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from undertow.calibrate.benchmark import ALL, Launch, Results
from undertow.calibrate.chipfile import CalibrationError
from undertow.calibrate.probe import compile_call
from undertow.kernels.compile import OBJECT
from undertow.runtime.architectures import ARCHITECTURES
from undertow.runtime.device import properties
from undertow.runtime.objects import load_object

REPETITIONS = 7  # that count, after a launch that brings code and data into the caches


@dataclass(frozen=True)
class Gpu:
    """The GPU at hand. target: of the compiler, such as sm_90a."""

    name: str
    num_sms: int
    target: str


def current_gpu() -> Gpu:
    """The current CUDA device.

    Raises: CalibrationError where there is none, or one of another architecture.
    """
    known = ", ".join(f"{'.'.join(map(str, row.capability))} ({row.target})" for row in ARCHITECTURES.values())
    if not torch.cuda.is_available():
        raise CalibrationError(
            f"torch {torch.__version__} has no CUDA device: constants are measured on a GPU of "
            f"compute capability {known}; without one --list names the benchmarks and --compile-only compiles them"
        )
    found = properties(torch.cuda.current_device())
    for row in ARCHITECTURES.values():
        if row.capability == found.capability:
            return Gpu(found.name, found.multiprocessors, row.target)
    has = ".".join(map(str, found.capability))
    raise CalibrationError(f"{found.name} has compute capability {has}: there are benchmarks for {known}")


def results_of(gpu: Gpu, launches: Iterable[Launch], repetitions: int = REPETITIONS) -> Results:
    """Run every launch once for the caches, then `repetitions` times.

    Raises: CompileError, CacheError.
    """
    found = {}
    for launch in launches:
        if launch.name not in found:
            found[launch.name] = _run(gpu, launch, repetitions)
    return found


def _run(gpu: Gpu, launch: Launch, repetitions: int) -> np.ndarray:
    function = _function(launch, gpu.target)
    ctas = gpu.num_sms if launch.ctas == ALL else launch.ctas
    out = torch.zeros(repetitions + 1, ctas * launch.probe.slots, dtype=torch.int64, device="cuda")
    data = torch.zeros(ctas * launch.floats, dtype=torch.float32, device="cuda")
    for results in out:
        function(results, data, launch.count, ctas)
    torch.cuda.synchronize()
    return out[1:].cpu().numpy().reshape(repetitions, ctas, launch.probe.slots)


def _function(launch: Launch, target: str) -> Callable[..., Any]:
    entry = compile_call(launch.probe, target)
    if entry.folder is not None:
        return load_object(entry.folder / OBJECT)
    with tempfile.TemporaryDirectory(prefix="undertow-probe-") as folder:  # the disk could not keep it
        path = Path(folder) / OBJECT
        path.write_bytes(entry.files[OBJECT])
        return load_object(path)
