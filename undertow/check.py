"""Run one launch under all observers and say what they found, whether or not it came to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from undertow import emulator, ptx
from undertow.emulator.observers import Finding, Observer, all_observers
from undertow.plan.labels import PlanLabels
from undertow.plan.schema import Plan


@dataclass(frozen=True)
class Check:
    """What one watched launch showed.

    findings: of all observers; if the machine stopped, the last one says why. error: what stopped it, or None.
    seconds: with the observers.
    """

    findings: tuple[Finding, ...]
    error: emulator.EmulatorError | None
    seconds: float

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are not advice."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def clean(self) -> bool:
        """Whether nothing but advice was found."""
        return not self.errors


def check(
    module: str | ptx.Module | emulator.Program,
    launch: Any,
    options: emulator.Options | None = None,
    *,
    plan: Plan | None = None,
    strict: bool = False,
    also: Sequence[Observer] = (),
) -> Check:
    """Run a launch on the NumPy machine under the standard observers.

    plan: names warps, buffers and regions in findings. strict: see `undertow.emulator.observers.race`; elect.sync then
    chooses the highest lane, since it may choose any. also: further observers, such as `Coverage`. The kernel writes
    into the arrays of the launch, as in `emulator.launch`.
    Raises: what `emulator.launch` raises before the kernel runs (bad PTX, unsupported PTX, a launch that does not fit).
    """
    observers = [*all_observers(strict, plan, PlanLabels(plan) if plan else None), *also]
    options = options or emulator.Options()
    if strict:
        options = replace(options, elected="highest")
    start = time.perf_counter()
    try:
        result = emulator.launch(module, launch, options, observers)
    except (emulator.LaunchError, emulator.UnsupportedPtx):
        raise
    except emulator.EmulatorError as error:
        return Check(tuple(error.findings), error, time.perf_counter() - start)
    return Check(tuple(result.findings), None, time.perf_counter() - start)
