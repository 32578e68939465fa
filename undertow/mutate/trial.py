"""Runs one mutant on one problem after another until something shows, and says what.

What a problem does not execute it cannot miss, so there a mutant is not run. The first problem comes under all
settings. The others are there for what the first does not do; they take longer, and come under the first setting only,
because what is unordered shows under any.

A mutant that shows nothing is run once more in the strict mode of the observers, on the first problem that executes it:
what the ISA leaves undefined, but the emulator and the hardware do anyway, such as reading a register before
tcgen05.wait::ld or electing lane 0, is found only there. Rules that the unmutated kernel breaks in strict mode as well
say nothing about a mutant.

If nobody waits for an mbarrier any more, its phases end unobserved, which is a finding whether or not the wait ordered
anything. So a mutant that has no other findings is tried to the end: it may be that only the protocol notices.
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
    problem, setting: where it showed. runs: launches that it took. protocol_only: no access is left unordered in any
    of them, and all results are right.
    """

    how: str
    rules: tuple[str, ...] = ()
    problem: str = ""
    setting: str = ""
    shown: str = ""
    runs: int = 0
    strict: bool = False
    protocol_only: bool = False


@dataclass(frozen=True)
class Problem:
    """A launch of the kernel, and the settings under which it is run.

    expected: its arrays as the unmutated kernel leaves them. tolerated: the rules that this breaks in strict mode.
    """

    kernel: Kernel
    settings: tuple[Options, ...]
    expected: dict[str, np.ndarray]
    tolerated: frozenset[str]


@dataclass(frozen=True)
class Trial:
    """Judges mutants of one kernel: callable, and picklable for other processes."""

    problems: tuple[Problem, ...]

    def __call__(self, mutant: Mutant) -> Verdict:
        kernel = self.problems[0].kernel
        program = kernel.program(mutant.of(kernel.ptx))
        problems = [self.problems[number] for number in mutant.problems]
        runs = [(problem.settings[0], problem) for problem in problems]
        runs += [(options, problem) for problem in problems for options in problem.settings[1:]]
        unobserved: Verdict | None = None
        for count, (options, problem) in enumerate(runs, start=1):
            (own,) = fresh([problem.kernel])
            checked = check(program, own.launch, options)
            where, rules = (problem.kernel.name, setting_name(options)), _rules(checked.errors)
            wrong = "" if checked.error else differences(own.arrays, problem.expected)
            if not checked.clean:
                verdict = Verdict(BY_RULE, rules, *where, str(checked.errors[0]), count)
                if wrong or not PROTOCOL.issuperset(rules):
                    return verdict
                unobserved = unobserved or verdict
            elif wrong:
                return Verdict(BY_RESULT, (), *where, wrong, count)
        if unobserved:
            return replace(unobserved, runs=len(runs), protocol_only=True)
        return _strictly(program, problems[0], len(runs) + 1) if problems else Verdict(SURVIVED)


def _strictly(program: Program, problem: Problem, count: int) -> Verdict:
    options = problem.settings[0]
    findings = _strict_findings(problem.kernel, program, options)
    found = [finding for finding in findings if finding.rule not in problem.tolerated]
    if not found:
        return Verdict(SURVIVED, runs=count)
    where = (problem.kernel.name, f"{setting_name(options)}, strict")
    return Verdict(BY_RULE, _rules(found), *where, str(found[0]), count, True)


def trial(problems: Sequence[Kernel], settings: Sequence[Options]) -> Trial:
    """A trial of mutants of the kernel of `problems`, which is clean and gives equal results under all settings.

    Raises: CaseError if it is or does not: a mutant of it could not be judged.
    """
    first, *more = problems
    return Trial((_problem(first, tuple(settings)), *(_problem(kernel, (settings[0],)) for kernel in more)))


def _problem(kernel: Kernel, settings: tuple[Options, ...]) -> Problem:
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
    return Problem(kernel, settings, expected, frozenset(_rules(_strict_findings(kernel, program, settings[0]))))


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
