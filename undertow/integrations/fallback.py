"""Our kernels, or whoever computed a call before us: logged once per reason, refused in strict mode."""

from __future__ import annotations

import logging
from typing import NamedTuple

from undertow.attention.dispatch import choose, is_strict
from undertow.attention.prepared import run
from undertow.attention.problem import AttentionInputError, BackendError, Gradients, Problem

_LOG = logging.getLogger("undertow.integrations")
_told: set[tuple[str, str]] = set()


class NotOurs(NamedTuple):
    """reason: why our kernels do not compute a problem. next_best: the backend that `dispatch` would take."""

    reason: str
    next_best: str | None = None


def by_our_kernels(problem: Problem, backend: str) -> Gradients | NotOurs:
    """Gradients by our kernels, or by whoever stands in for them on the CPU. backend: as for `run_backward`.

    Raises: what `run_backward` raises, unless it is about who computes.
    """
    try:
        return run(problem, backend, strict=True)  # which looks at the call once, if it is ours
    except (AttentionInputError, BackendError) as error:
        try:
            choice = choose(problem, backend)
        except (AttentionInputError, BackendError) as refusal:
            return NotOurs(str(refusal))
        if not choice.is_fallback:
            raise error
        reasons = "; ".join(f"{name}: {why}" for name, why in choice.rejected.items())
        return NotOurs(reasons, choice.backend)


def fall_back(where: str, reason: str, strict: bool | None) -> None:
    """Say that the caller of `where` gets what it would get without us. strict: as for `run_backward`.

    Raises: BackendError in strict mode.
    """
    if is_strict(strict):
        raise BackendError(f"strict: {where} is not computed by our kernels: {reason}")
    if (where, reason) not in _told:
        _told.add((where, reason))
        _LOG.warning("%s is computed as it was without undertow: %s", where, reason)
