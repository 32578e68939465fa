"""The GPU that is measured: its clock for times, what it says of itself, and the versions of all that takes part."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import undertow
from undertow.bench.measure import Sample
from undertow.runtime.architectures import ARCHITECTURES

PACKAGE = Path(undertow.__file__).parent
PACKAGES = (
    *("flash-attn-4", "flash-attn-3", "dew-flash-attn-cu13"),  # the last is flash-attn-3's kernels, built for JAX
    *("nvidia-cutlass-dsl", "apache-tvm-ffi", "triton"),
)
SAMPLE_SECONDS = 0.04


class BenchError(ValueError):
    """There is nothing that could be measured; the message says what is needed."""


@dataclass(frozen=True)
class Machine:
    """device: name of the GPU. uuid: as NVML knows it. driver: its version, None where NVML is missing.

    versions: of what takes part. sources: digest of this package. revision: of its repository, None if unknown.
    """

    device: str
    capability: tuple[int, int]
    multiprocessors: int
    uuid: str
    driver: str | None
    versions: dict[str, str]
    sources: str
    revision: str | None


class CudaStopwatch:
    """Event times on the current stream."""

    def seconds(self, work: Callable[[], Any], calls: int) -> list[float]:
        events = [(_event(), _event()) for _ in range(calls)]
        for begin, end in events:
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class NvmlMonitor:
    """Samples of one GPU from NVML every 40 ms, by a thread. complaint: why there are none, or None."""

    def __init__(self, uuid: str):
        self.driver: str | None = None
        self.complaint: str | None = None
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.driver = str(self._nvml.nvmlSystemGetDriverVersion())
            self._sample()
        except Exception as error:  # no package, no library, no permission: times are right without
            self.complaint = f"clock and power are not recorded: {type(error).__name__}: {error}"

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Sample]]:
        samples: list[Sample] = []
        if self.complaint is not None:
            yield samples
            return
        done = threading.Event()

        def run() -> None:
            while not done.wait(SAMPLE_SECONDS):
                samples.append(self._sample())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield samples
        finally:
            done.set()
            thread.join()

    def _sample(self) -> Sample:
        nvml, handle = self._nvml, self._handle
        clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
        return Sample(float(clock), watts, int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))


def require_gpu() -> None:
    """Raises: BenchError where torch has no CUDA device."""
    if torch.cuda.is_available():
        return
    ours = ", ".join(f"{'.'.join(map(str, row.capability))} ({row.name})" for row in ARCHITECTURES.values())
    build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    raise BenchError(
        f"torch {torch.__version__}, built {build}, has no CUDA device: bench measures on a GPU. It needs a CUDA build "
        f"of torch, a driver, and for the kernels of this package a GPU of compute capability {ours}; "
        "--report words, tables and draws the records of another machine"
    )


def examine(revision: str | None, monitor: NvmlMonitor | None = None) -> Machine:
    """The current CUDA device and what runs on it."""
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        found.name,
        (found.major, found.minor),
        found.multi_processor_count,
        uuid_of_current(),
        None if monitor is None else monitor.driver,
        versions(),
        sources(),
        revision or revision_of(PACKAGE.parent),
    )


def uuid_of_current() -> str:
    """The UUID of the current CUDA device in NVML's spelling."""
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"GPU-{found.uuid}"


def versions() -> dict[str, str]:
    """What takes part and is installed."""
    found = {"undertow": undertow.__version__, "python": platform.python_version(), "torch": torch.__version__}
    found |= {name: text for name, text in (("cuda", torch.version.cuda), ("cudnn", _cudnn())) if text}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _cudnn() -> str | None:
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return None if number is None else str(number)


def sources() -> str:
    """Digest of the sources of this package."""
    sha = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        sha.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()[:16]


def revision_of(folder: Path) -> str | None:
    """The commit of a working tree, with -dirty if a tracked file differs; None if git does not know."""
    command = ["git", "-C", os.fspath(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None
