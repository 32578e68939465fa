"""What a pattern is: a small kernel that synchronises rightly, and twins of it that are wrong in one place each.

A kernel takes the twin's name as the compile-time parameter `failure` (None for the pattern itself), so that both are
the same source and differ in one wait, fence, arrival or number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from undertow.emulator import Launch, Pointer
from undertow.kernels.compile import CompiledKernel, compile_kernel

RUNS_AHEAD = ("mbarrier-over-arrival", "mbarrier-doubled-phase", "mbarrier-unobserved-phase", "deadlock")
"""What may follow, according to the schedule, where one side of a hand-over does not wait for the other."""


@dataclass(frozen=True)
class Twin:
    """A pattern with one thing removed, moved or mistaken.

    failure:        its name, and the value of the kernel's `failure`.
    rules:          ids of the findings that it must give; `also`: ids of those that may come along as consequences, or
                    end a launch before the others can show.
    removed, added: mnemonics (or how they begin) of the synchronisation and memory instructions that its PTX lacks, or
                    has beside the pattern's; moved: of those that stand elsewhere. All empty: an operand or a guard
                    changed.
    visible:        whether the results go wrong, or the machine stops, in at least one of the settings of the tests.
    """

    failure: str
    rules: tuple[str, ...]
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    visible: bool = True


@dataclass(frozen=True)
class Case:
    """One launch with fresh arrays. results: pairs of an array that the kernel fills and what it must then be."""

    launch: Launch
    results: tuple[tuple[np.ndarray, np.ndarray], ...]

    @property
    def is_right(self) -> bool:
        """Whether every result is what it must be, bit for bit."""
        return all(np.array_equal(actual, expected) for actual, expected in self.results)


def case(launch: tuple[int, int, int], params: tuple[Any, ...], *results: tuple[np.ndarray, np.ndarray]) -> Case:
    """A launch of (CTAs, threads, bytes of shared memory); an array among `params` is a tensor of fixed shape."""
    ctas, threads, smem = launch
    values = [Pointer(value) if isinstance(value, np.ndarray) else value for value in params]
    return Case(Launch(grid=(ctas, 1, 1), block=(threads, 1, 1), params=values, dynamic_smem=smem), results)


@dataclass(frozen=True)
class Pattern:
    """A pattern: its kernel, an input with the right answer, and its twins.

    build: failure -> host function and arguments, for `compile_kernel`. case: makes the launch.
    """

    name: str
    build: Callable[[str | None], tuple[Any, tuple[Any, ...]]]
    case: Callable[[], Case]
    twins: tuple[Twin, ...]

    def compiled(self, failure: str | None = None) -> CompiledKernel:
        """The kernel of the pattern, or of the twin of that name, from the disk cache where possible."""
        assert failure is None or failure in {twin.failure for twin in self.twins}, (self.name, failure)
        source = Path(self.build.__code__.co_filename)
        digest = hashlib.sha256(source.read_bytes() + source.with_name("device.py").read_bytes()).hexdigest()
        return compile_kernel(f"pattern-{self.name}", (failure, digest), lambda: self.build(failure))


def numbers(*shape: int) -> np.ndarray:
    """Small whole numbers as float32, none of them zero: sums and products of them are exact, and so is bf16."""
    count = int(np.prod(shape))
    values = np.arange(count) * 7 % 13 - 6
    return np.where(values == 0, 7, values).astype(np.float32).reshape(shape)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The bit patterns of values that bf16 holds exactly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "these values would be rounded"
    return (bits >> 16).astype(np.uint16)


def unwritten(*shape: int) -> np.ndarray:
    """NaN: what no kernel wrote must not pass for a result."""
    return np.full(shape, np.nan, np.float32)
