"""Which synchronisations of a kernel are needed: take one away at a time, and see whether anybody notices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from undertow.cases import Kernel
from undertow.emulator import Options
from undertow.mutate.mutants import Mutant, mutants
from undertow.mutate.profile import Name
from undertow.mutate.report import Report, Row
from undertow.mutate.survivors import FOLDER, Reason, read_reasons, reasons_for
from undertow.mutate.trial import BY_RESULT, BY_RULE, SURVIVED, Verdict, trial
from undertow.pool import each

__all__ = [
    "BY_RESULT", "BY_RULE", "FOLDER", "SURVIVED", "Mutant", "Name", "Reason", "Report", "Row", "Verdict", "mutants",
    "mutate", "read_reasons", "reasons_for",
]  # fmt: skip


def mutate(
    problems: Sequence[Kernel],
    settings: Sequence[Options],
    reasons: Mapping[Name, Reason],
    chosen: Callable[[Mutant], bool] = lambda mutant: True,
    jobs: int = 1,
    step: Callable[[str], None] = lambda text: None,
) -> Report:
    """Judge every mutant of a kernel that is `chosen`, each on all problems until something shows.

    problems: launches of that one kernel; the first is run under all settings, the others under the first. reasons:
    justifications by name. step: told what is being done. Of reasons that match no synchronisation the report speaks
    only if all mutants are chosen.
    Raises: CaseError if the kernel itself has findings; EmulatorError if it cannot be run.
    """
    begin = time.perf_counter()
    step(f"running {problems[0].name} unmutated")
    judge = trial(problems, settings)
    every = mutants(problems)
    tried = [mutant for mutant in every if chosen(mutant)]
    verdicts: dict[int, Verdict] = {}
    step(f"0 of {len(tried)} mutants done")
    for position, verdict in each(judge, tried, jobs):
        verdicts[position] = verdict
        survived = sum(v.how == SURVIVED for v in verdicts.values())
        step(f"{len(verdicts)} of {len(tried)} mutants done, {survived} survived")
    rows = tuple(Row(mutant, verdicts[i], reasons.get(mutant.name)) for i, mutant in enumerate(tried))
    known = {mutant.name for mutant in every}
    unmatched = tuple(name for name in reasons if name not in known) if len(tried) == len(every) else ()
    return Report(rows, unmatched, time.perf_counter() - begin)
