"""Going to whoever computed a call before us: logged once per reason, refused in strict mode."""

from __future__ import annotations

import logging

from undertow.attention.dispatch import Choice, is_strict
from undertow.attention.problem import BackendError

_LOG = logging.getLogger("undertow.integrations")
_told: set[tuple[str, str]] = set()


def fall_back(where: str, reason: str, strict: bool | None) -> None:
    """Say that the caller of `where` gets what it would get without us. strict: as for `dispatch.run_backward`.

    Raises: BackendError in strict mode.
    """
    if is_strict(strict):
        raise BackendError(f"strict: {where} is not computed by our kernels: {reason}")
    if (where, reason) not in _told:
        _told.add((where, reason))
        _LOG.warning("%s is computed as it was without undertow: %s", where, reason)


def reasons(choice: Choice) -> str:
    """Why none of our kernels computes a call."""
    return "; ".join(f"{backend}: {why}" for backend, why in choice.rejected.items())
