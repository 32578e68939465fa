"""The benchmarks, one module per unit of an SM, and the order in which they run."""

from __future__ import annotations

from undertow.calibrate.benchmark import Benchmark
from undertow.calibrate.units import (
    arithmetic,
    beside,
    clocks,
    copies,
    copy_port,
    global_memory,
    matrix,
    shared,
    signals,
    tensor_memory,
)

# What decides most comes first: whether operands of the tensor cores share the port of loads and stores.
_MODULES = (beside, copy_port, matrix, tensor_memory, shared, signals, arithmetic, global_memory, copies, clocks)


def benchmarks(arch: str) -> dict[str, Benchmark]:
    """All benchmarks of an architecture by name, in order. arch: sm_90a or sm_100a."""
    return {found.name: found for module in _MODULES for found in module.benchmarks(arch)}
