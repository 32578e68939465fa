"""What stopped a launch, as a finding like any other, behind what the observers had found by then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import EmulatorError, UnsupportedPtx
from .base import Finding


def findings_after(error: EmulatorError, observers: Sequence[Any]) -> list[Finding]:
    """Findings of all observers, then the error itself.

    An observer may have `stopped(error)`, called before its `finish`, and `explain(error) -> (message, hint) | None`:
    the first answer is the text of the last finding.
    PTX that the emulator does not know is no finding about the kernel.
    """
    for observer in observers:
        if hasattr(observer, "stopped"):
            observer.stopped(error)
    found = [finding for observer in observers for finding in observer.finish()]
    if isinstance(error, UnsupportedPtx):
        return found
    message, hint = error.fact.splitlines()[0], ""
    for observer in observers:
        explained = observer.explain(error) if hasattr(observer, "explain") else None
        if explained:
            message, hint = explained
            break
    return [*found, Finding(error.rule, message, error.place, hint=hint)]
