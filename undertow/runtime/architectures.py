"""Which kernels exist for which GPU: one row per architecture.

The package named in a row has two modules. `call`, which needs no compiler, is a `Call`; `entry` has `build(variant)`,
which returns the host function with its arguments.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.tensors import BackwardTensors
from undertow.plan.schema import DType


class ArchitectureError(ValueError):
    """There are no kernels of that name; the message says which there are."""


class Call(Protocol):
    """What a package of kernels says about a whole backward pass, as `undertow.kernels.sm100.call` does."""

    def variant_of(self, schedule: str | None, tensors: BackwardTensors, settings: Settings) -> Any: ...

    def variant_named(self, name: str, dtype: DType, schedule: str | None = ...) -> Any: ...

    def used_for(self, variant: Any) -> tuple[Any, ...]: ...

    def check_call(self, variant: Any, tensors: BackwardTensors) -> None: ...

    def workspace_floats(self, variant: Any, tensors: BackwardTensors) -> int: ...

    def numbers_of(self, variant: Any, tensors: BackwardTensors, settings: Settings, multiprocessors: int) -> tuple: ...

    def arguments(self, tensors: BackwardTensors, workspace: torch.Tensor, numbers: tuple) -> tuple: ...


@dataclass(frozen=True)
class Architecture:
    """name: as callers say it. target: as the compiler says it. capability: of the devices that run it.

    kernels: the package with the modules `call` and `entry`.
    """

    name: str
    target: str
    capability: tuple[int, int]
    kernels: str

    @property
    def call(self) -> Call:
        return importlib.import_module(f"{self.kernels}.call")  # type: ignore[return-value]

    def build(self, variant: Any) -> tuple[Any, tuple[Any, ...]]:
        """The host function and its arguments; this imports the compiler."""
        return importlib.import_module(f"{self.kernels}.entry").build(variant)


ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("sm100", "sm_100a", (10, 0), "undertow.kernels.sm100"),  # a: runs on 10.0 alone
        Architecture("sm90", "sm_90a", (9, 0), "undertow.kernels.sm90"),
    )
}


def architecture(name: str) -> Architecture:
    """Return the row of that name, or of that compiler target.

    Raises: ArchitectureError.
    """
    for row in ARCHITECTURES.values():
        if name in (row.name, row.target):
            return row
    known = ", ".join(f"{row.name} ({row.target})" for row in ARCHITECTURES.values())
    raise ArchitectureError(f"arch={name!r}: there are kernels for {known}")
