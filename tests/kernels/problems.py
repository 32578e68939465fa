"""Emulated backward passes that several tests ask something about."""

from __future__ import annotations

import torch

from undertow import emulated, emulator
from undertow.inputs import Batch
from undertow.tolerance import yardstick

FAST = emulator.Options(backend="auto")


def run(batch: Batch, schedule: str = "split", options: emulator.Options = FAST) -> emulated.EmulatedBackward:
    """The backward pass of `batch` on whichever back end is faster."""
    return emulated.backward(batch, schedule=schedule, options=options)


def complaints(batch: Batch, gradients) -> list[str]:
    """The gradients whose error exceeds 1.25 times that of the ideal pipeline."""
    measure = yardstick(batch, batch.scoring)
    errors, budgets = measure.errors(gradients), measure.budget
    return [f"{n}: {e:.3e} > {b:.3e}" for n, e, b in zip(("dq", "dk", "dv"), errors, budgets) if not e <= b]


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether every element is +0 or -0; NaN, as an element never written would be, is not."""
    return bool((tensor == 0).all())
