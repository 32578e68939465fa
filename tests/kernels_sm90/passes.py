"""Emulated backward passes of the SM90 kernels."""

from __future__ import annotations

from tests.kernels.problems import FAST
from undertow import emulated, emulator
from undertow.inputs import Batch
from undertow.tolerance import sink_error, yardstick

ARCH = "sm90"


def run(batch: Batch, deterministic: bool = False, options: emulator.Options = FAST) -> emulated.EmulatedBackward:
    """The backward pass of `batch`, on whichever back end is faster if nothing else is said."""
    return emulated.backward(batch, deterministic=deterministic, options=options, arch=ARCH)


def complaints(batch: Batch, done: emulated.EmulatedBackward) -> list[str]:
    """Gradients out of their budget, that of the sink included."""
    measure = yardstick(batch, batch.scoring, batch.dlse)
    errors = list(zip(measure.errors(done.gradients), measure.budget))
    if done.dsink is not None:
        errors.append(sink_error(batch, done.dsink, batch.scoring, batch.dlse))
    named = zip(("dq", "dk", "dv", "dsink"), errors)
    return [f"{name}: {error:.3e} > {budget:.3e}" for name, (error, budget) in named if not error <= budget]
