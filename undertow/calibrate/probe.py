"""A probe: one kernel of a microbenchmark, as plain values, and how it is compiled.

All probes have one signature: results, a buffer in global memory, a number of iterations, a number of CTAs. Every CTA
writes `slots` 64-bit results of its own.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow import cache
from undertow.kernels.compile import CompiledKernel, compile_kernel, compile_object

TARGETS = ("sm_100a", "sm_90a")
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Probe:
    """name: unique among the probes of an architecture. body: `module.function` below `probes`.

    threads: of a CTA. slots: 64-bit results of a CTA. smem: bytes. settings: what the body reads, plain values.
    """

    name: str
    body: str
    threads: int
    slots: int
    smem: int = 0
    settings: Any = None


def compile_probe(probe: Probe, target: str) -> CompiledKernel:
    """The kernel alone: PTX, cubin, what ptxas says of it.

    Raises: CompileError, CacheError.
    """
    return compile_kernel(_name(probe), _config(probe), lambda: _build(probe, alone=True), target)


def compile_call(probe: Probe, target: str) -> cache.Entry:
    """The object of a host function that launches the kernel on torch's current stream.

    Raises: CompileError, CacheError.
    """
    return compile_object(f"{target}-{_name(probe)}", target, _config(probe), lambda: _build(probe, alone=False))


def _build(probe: Probe, alone: bool) -> tuple[Any, tuple[Any, ...]]:
    from undertow.calibrate.probes import entry

    return entry.build(probe, alone)


def _name(probe: Probe) -> str:
    return f"calibrate-{probe.name}"


def _config(probe: Probe) -> tuple[Probe, str]:
    return probe, sources()


@functools.lru_cache
def sources() -> str:
    """Digest of the sources that a compiled probe depends on."""
    sha = hashlib.sha256()
    for path in (*sorted((_FOLDER / "probes").glob("*.py")), Path(__file__)):
        sha.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()[:16]
