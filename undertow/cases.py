"""Launches as data that can be repeated: every run gets its own copies of the arrays, here or in another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from undertow import emulator, ptx
from undertow.plan.description import Launch, Pointer, Tensor, TensorMap

COMPLETIONS = ("eager", "late", "seeded")


class CaseError(ValueError):
    """A case or a setting that cannot be run; the message names the argument, its value and what is allowed."""


@dataclass(frozen=True)
class Kernel:
    """One launch of one kernel. name: what reports call it. Arrays are NumPy arrays, so that it can be pickled."""

    name: str
    ptx: str
    launch: Launch

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the launch by name (`params[3]` where the description gives none)."""
        held = {}
        for place, value in enumerate(self.launch.params):
            if isinstance(value, (Tensor, Pointer, TensorMap)):
                held[value.name or f"params[{place}]"] = value.array
        return held

    def program(self, mutated: str | None = None) -> emulator.Program:
        """The kernel decoded, or a mutant of its text.

        Raises: PtxSyntaxError, UnsupportedPtx, ValueError for an entry that is not there.
        """
        module = ptx.parse_module(self.ptx if mutated is None else mutated, self.name)
        return emulator.load_program(module, self.launch.kernel)


def fresh(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """The same launches on copies of their arrays; an array that two launches share stays shared."""
    copies: dict[int, np.ndarray] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, (Tensor, Pointer, TensorMap)):
            return value
        return dataclasses.replace(value, array=copies.setdefault(id(value.array), value.array.copy(order="K")))

    return tuple(
        dataclasses.replace(
            kernel, launch=dataclasses.replace(kernel.launch, params=tuple(copied(p) for p in kernel.launch.params))
        )
        for kernel in kernels
    )


def settings(seeds: int, completions: Sequence[str]) -> list[emulator.Options]:
    """Every scheduler seed with every completion mode; the later seeds let the last CTA run first.

    Raises: CaseError for less than one seed or an unknown mode.
    """
    if seeds < 1:
        raise CaseError(f"seeds={seeds}: must be at least 1")
    for mode in completions:
        if mode not in COMPLETIONS:
            raise CaseError(f"completion={mode!r}: must be one of {', '.join(COMPLETIONS)}")
    return [
        emulator.Options(schedule=seed, completion=("seeded", seed) if mode == "seeded" else mode)
        for seed in range(seeds)
        for mode in completions
    ]


def setting_name(options: emulator.Options) -> str:
    """How a setting is told: `seed 2, late`."""
    mode = options.completion if isinstance(options.completion, str) else "-".join(map(str, options.completion))
    return f"{'fixed order' if options.schedule == 'fixed' else f'seed {options.schedule}'}, {mode}"
