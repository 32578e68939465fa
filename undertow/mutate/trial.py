"""Runs one mutant under all settings until something shows, and says what.

A mutant that shows nothing is run once more in the strict mode of the observers: what the ISA leaves undefined, but the
emulator and the hardware do anyway, such as reading a register before tcgen05.wait::ld, is found only there. Rules that
the unmutated kernel breaks in strict mode as well say nothing about a mutant.

If nobody waits for an mbarrier any more, its phases end unobserved, which is a finding whether or not the wait ordered
anything. So a mutant that has no other findings is tried under all settings: it may be that only the protocol notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from undertow.cases import CaseError, Kernel, fresh, setting_name
from undertow.check import check
from undertow.emulator import Finding, Options, Program
from undertow.mutate.mutants import Mutant

REORDERED = 2.0**-20  # relative error that another order of fp32 sums may give
PROTOCOL = frozenset({"mbarrier-unobserved-phase"})  # rules that a wait without work breaks as well when it is gone
BY_RULE, BY_RESULT, SURVIVED = "killed-by-rule", "killed-by-wrong-result", "survived"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    rules: ids of the findings; strict: only the strict mode has them. shown: the first finding, or what is wrong.
    setting: where it showed. runs: launches that it took. protocol_only: no access is left unordered under any setting,
    and all results are right.
    """

    how: str
    rules: tuple[str, ...] = ()
    setting: str = ""
    shown: str = ""
    runs: int = 0
    strict: bool = False
    protocol_only: bool = False


@dataclass(frozen=True)
class Trial:
    """Judges mutants of one kernel: callable, and picklable for other processes.

    expected: the arrays as the unmutated kernel leaves them. tolerated: the rules that it breaks in strict mode.
    """

    kernel: Kernel
    settings: tuple[Options, ...]
    expected: dict[str, np.ndarray]
    tolerated: frozenset[str]

    def __call__(self, mutant: Mutant) -> Verdict:
        program = self.kernel.program(mutant.of(self.kernel.ptx))
        unobserved: Verdict | None = None
        for count, options in enumerate(self.settings, start=1):
            (own,) = fresh([self.kernel])
            checked = check(program, own.launch, options)
            name, rules = setting_name(options), _rules(checked.errors)
            wrong = "" if checked.error else differences(own.arrays, self.expected)
            if not checked.clean:
                verdict = Verdict(BY_RULE, rules, name, str(checked.errors[0]), count)
                if wrong or not PROTOCOL.issuperset(rules):
                    return verdict
                unobserved = unobserved or verdict
            elif wrong:
                return Verdict(BY_RESULT, (), name, wrong, count)
        count = len(self.settings)
        return replace(unobserved, runs=count, protocol_only=True) if unobserved else self._strictly(program, count + 1)

    def _strictly(self, program: Program, count: int) -> Verdict:
        found = [f for f in _strict_findings(self.kernel, program, self.settings[0]) if f.rule not in self.tolerated]
        if not found:
            return Verdict(SURVIVED, runs=count)
        return Verdict(BY_RULE, _rules(found), f"{setting_name(self.settings[0])}, strict", str(found[0]), count, True)


def trial(kernel: Kernel, settings: Sequence[Options]) -> Trial:
    """A trial of mutants of `kernel`, which itself is clean and gives equal results under all settings.

    Raises: CaseError if it is or does not: a mutant of it could not be judged.
    """
    expected: dict[str, np.ndarray] = {}
    program = kernel.program()
    for options in settings:
        (own,) = fresh([kernel])
        checked = check(program, own.launch, options)
        if not checked.clean:
            raise CaseError(
                f"{kernel.name} has findings before anything is taken away ({setting_name(options)}), first "
                f"{checked.errors[0]}"
            )
        wrong = differences(own.arrays, expected or own.arrays)
        if wrong:
            raise CaseError(f"{kernel.name} gives other results under {setting_name(options)}: {wrong}")
        expected = expected or {name: array.copy() for name, array in own.arrays.items()}
    tolerated = frozenset(_rules(_strict_findings(kernel, program, settings[0])))
    return Trial(kernel, tuple(settings), expected, tolerated)


def _strict_findings(kernel: Kernel, program: Program, options: Options) -> tuple[Finding, ...]:
    (own,) = fresh([kernel])
    return check(program, own.launch, options, strict=True).findings


def _rules(findings: Sequence[Finding]) -> tuple[str, ...]:
    return tuple(sorted({finding.rule for finding in findings}))


def differences(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> str:
    """Which arrays differ by more than another order of sums explains, in words; empty if none."""
    said = []
    for name, array in actual.items():
        want = expected[name]
        if array.tobytes() == want.tobytes():
            continue
        if array.dtype.kind != "f":
            said.append(f"{name}: {np.count_nonzero(array != want)} of {array.size} elements differ")
            continue
        got, right = array.astype(np.float64), want.astype(np.float64)
        defined = np.isfinite(right)
        if not np.array_equal(np.isfinite(got), defined):
            said.append(f"{name}: {np.count_nonzero(np.isfinite(got) != defined)} elements are or are not numbers")
            continue
        scale = np.linalg.norm(right[defined]) or 1.0
        error = np.linalg.norm(got[defined] - right[defined]) / scale
        if error > REORDERED:
            said.append(f"{name}: relative error {error:.1e}")
    return "; ".join(said)
