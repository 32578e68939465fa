"""Why a synchronisation may be taken away unnoticed: written reasons, kept as data.

A file holds one table per reason:

    [[survivor]]
    schedules = ["split"]       # all schedules if left out
    role = "reduce"
    function = "_take_stage"
    kind = "copy-wait"
    form = "cp.async.bulk.wait_group.read"
    about = "sdQ"
    place = "in"
    ordinal = 1                 # 1 if left out; or a list of ordinals with one reason
    category = "redundant"
    because = "..."

The first keys are the name of the synchronisation (`profile.Name`). A reason that matches a synchronisation whose
absence was noticed, or none at all, is stale: it says something untrue and has to go.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.cases import CaseError
from undertow.mutate.profile import Name

FOLDER = Path(__file__).resolve().parent / "survivors"
CATEGORIES = {
    "first-pass": "the phase waited for is complete before anybody can wait: the wait always passes",
    "tail": "nothing that it would order follows any more",
    "redundant": "another synchronisation, named in the reason, orders the same accesses",
    "convergence": "it joins lanes that the instructions around it have already joined",
    "not-modelled": "what it prevents is outside of what the emulator can show; named in the reason",
}
_NAME_KEYS = ("role", "function", "kind", "form", "about", "place")
_KEYS = {*_NAME_KEYS, "schedules", "ordinal", "category", "because"}


@dataclass(frozen=True)
class Reason:
    """One justification. names: the synchronisations it speaks of. schedules: empty for all."""

    names: tuple[Name, ...]
    schedules: tuple[str, ...]
    category: str
    because: str


def read_reasons(path: Path) -> list[Reason]:
    """The reasons in a file.

    Raises: CaseError if the file cannot be read, or a reason is incomplete or of an unknown category.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CaseError(f"{path}: cannot be read: {error}") from error
    entries = content.get("survivor", [])
    if not isinstance(entries, list) or content.keys() - {"survivor"}:
        raise CaseError(f"{path}: must hold [[survivor]] tables and nothing else")
    reasons = [_reason(f"{path}: survivor {number}", entry) for number, entry in enumerate(entries, start=1)]
    seen: set[tuple[str, Name]] = set()
    for reason in reasons:
        for key in ((schedule, name) for schedule in reason.schedules or ("",) for name in reason.names):
            if key in seen:
                raise CaseError(f"{path}: two reasons for `{key[1]}`")
            seen.add(key)
    return reasons


def reasons_for(reasons: Sequence[Reason], schedule: str) -> dict[Name, Reason]:
    """The reasons that hold for one schedule, by the synchronisation they speak of."""
    return {
        name: reason
        for reason in reasons
        if not reason.schedules or schedule in reason.schedules
        for name in reason.names
    }


def _reason(what: str, entry: Any) -> Reason:
    if not isinstance(entry, dict) or entry.keys() - _KEYS:
        unknown = sorted(entry.keys() - _KEYS) if isinstance(entry, dict) else entry
        raise CaseError(f"{what}: unknown {unknown}; allowed are {', '.join(sorted(_KEYS))}")
    for key in (*_NAME_KEYS, "category", "because"):
        if not isinstance(entry.get(key), str):
            raise CaseError(f"{what}: {key}={entry.get(key)!r} must be a string")
    if entry["category"] not in CATEGORIES:
        raise CaseError(f"{what}: category={entry['category']!r}: must be one of {', '.join(CATEGORIES)}")
    if len(entry["because"].split()) < 5:
        raise CaseError(f"{what}: because={entry['because']!r}: must say why, in a sentence")
    ordinals = entry.get("ordinal", 1)
    ordinals = ordinals if isinstance(ordinals, list) else [ordinals]
    schedules = entry.get("schedules", [])
    if not all(isinstance(o, int) for o in ordinals) or not all(isinstance(s, str) for s in schedules):
        raise CaseError(f"{what}: ordinal must be whole numbers, schedules must be names")
    words = [entry[key] for key in _NAME_KEYS]
    names = tuple(Name(*words, ordinal=ordinal) for ordinal in ordinals)
    return Reason(names, tuple(schedules), entry["category"], " ".join(entry["because"].split()))
