"""Many launches under all observers: every case under every setting, findings merged, coverage added up."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from undertow import emulator, ptx
from undertow.cases import Kernel, fresh, setting_name
from undertow.check import check
from undertow.emulator.observers import Coverage
from undertow.emulator.semantics.table import Decoded
from undertow.hazard_figure import Footprint, hazard_figure
from undertow.mutate.sites import sites
from undertow.pool import each


@dataclass(frozen=True)
class Executed:
    """What one run of one kernel executed: PTX instruction indices, and the ways that branches went."""

    lines: frozenset[int]
    branches: frozenset[tuple[int, str]]


@dataclass(frozen=True)
class Ran:
    """One run of one kernel."""

    kernel: str
    findings: tuple[emulator.Finding, ...]
    executed: Executed


@dataclass
class Found:
    """One finding, first met under `options`, and all settings under which it came up."""

    case: str
    kernel: str
    finding: emulator.Finding
    options: emulator.Options
    settings: list[str]


@dataclass
class Covered:
    """How much of what there is was executed; `missing` says what was not."""

    executed: int
    total: int
    missing: list[str]


@dataclass
class Campaign:
    """What came of it. runs: launches of a case under a setting. coverage: forms, branches, synchronisations."""

    findings: list[Found]
    runs: int
    coverage: dict[str, Covered]
    seconds: float
    runs_of_case: dict[str, int] = field(default_factory=dict)

    @property
    def errors(self) -> list[Found]:
        """The findings that are not advice."""
        return [found for found in self.findings if found.finding.severity == "error"]


@dataclass(frozen=True)
class Runner:
    """Runs one case under one setting; callable, and picklable for other processes."""

    cases: Mapping[str, tuple[Kernel, ...]]
    strict: bool

    def __call__(self, task: tuple[str, emulator.Options]) -> list[Ran]:
        case, options = task
        ran = []
        for kernel in fresh(self.cases[case]):
            coverage = Coverage()
            program = _program(kernel.name, kernel.ptx, kernel.launch.kernel)
            checked = check(program, kernel.launch, options, strict=self.strict, also=[coverage])
            sides = frozenset((index, side) for index, ways in coverage.branches.items() for side in ways)
            ran.append(Ran(kernel.name, checked.findings, Executed(frozenset(coverage.lines), sides)))
            if checked.error is not None:
                break  # the next kernel would read what was never written
        return ran


def campaign(
    cases: Mapping[str, tuple[Kernel, ...]],
    settings: Sequence[emulator.Options],
    strict: bool = False,
    jobs: int = 1,
    step: Callable[[str], None] = lambda text: None,
) -> Campaign:
    """Run every case under every setting.

    Raises: LaunchError, UnsupportedPtx, PtxSyntaxError for a kernel that cannot be run as described.
    """
    begin = time.perf_counter()
    tasks = [(case, options) for options in settings for case in cases]
    found: dict[tuple, Found] = {}
    executed: dict[tuple[str, str], list[Executed]] = {}
    step(f"0 of {len(tasks)} runs done")
    for done, (position, ran) in enumerate(each(Runner(cases, strict), tasks, jobs), start=1):
        case, options = tasks[position]
        for run in ran:
            executed.setdefault((case, run.kernel), []).append(run.executed)
            for finding in run.findings:
                key = (case, run.kernel, finding.rule, _place(finding))
                entry = found.setdefault(key, Found(case, run.kernel, finding, options, []))
                entry.settings.append(setting_name(options))
        step(f"{done} of {len(tasks)} runs done, {len(found)} findings")
    programs = {
        (case, k.name): _program(k.name, k.ptx, k.launch.kernel) for case, kernels in cases.items() for k in kernels
    }
    return Campaign(
        list(found.values()),
        len(tasks),
        _coverage(programs, executed),
        time.perf_counter() - begin,
        {case: len(settings) for case in cases},
    )


def picture(cases: Mapping[str, tuple[Kernel, ...]], found: Found) -> str:
    """SVG of a finding in tensor memory; its case is run once more, to see what the two instructions touch.

    Raises: ValueError if the finding is not about two warps in tensor memory.
    """
    for kernel in fresh(cases[found.case]):
        footprint = Footprint()
        program = _program(kernel.name, kernel.ptx, kernel.launch.kernel)
        check(program, kernel.launch, found.options, also=[footprint])
        if kernel.name == found.kernel:
            return hazard_figure(found.finding, footprint)
    raise AssertionError("the finding is of a kernel of its case")


@functools.lru_cache(maxsize=32)
def _program(name: str, text: str, entry: str | None) -> emulator.Program:
    return emulator.load_program(ptx.parse_module(text, name), entry)


def _place(finding: emulator.Finding) -> tuple:
    """What makes two findings the same: the instructions, not the turn or the lane in which they met."""
    return tuple((access.line, access.verb, access.role) for access in finding.accesses) or (finding.where,)


def _coverage(
    programs: Mapping[tuple[str, str], emulator.Program], executed: Mapping[tuple[str, str], list[Executed]]
) -> dict[str, Covered]:
    forms: dict[str, bool] = {}
    branches: dict[str, set[str]] = {}
    syncs: dict[str, bool] = {}
    for key, program in programs.items():
        runs = executed.get(key, [])
        lines = frozenset().union(*(run.lines for run in runs))
        sides = frozenset().union(*(run.branches for run in runs))
        for decoded in program.code:
            ran = decoded.index in lines
            forms[decoded.row.syntax] = forms.get(decoded.row.syntax, False) or ran
            if _decides(program, decoded):
                branches[_where(key, program, decoded.index)] = {s for index, s in sides if index == decoded.index}
        for site in sites(program):
            syncs[f"{site.form}, {_where(key, program, site.index)}"] = site.index in lines
    one_way = [f"{where}: {_ways(ways)}" for where, ways in branches.items() if len(ways) < 2]
    return {
        "forms": _covered(forms),
        "branches": Covered(len(branches) - len(one_way), len(branches), one_way),
        "synchronisations": _covered(syncs),
    }


def _decides(program: emulator.Program, decoded: Decoded) -> bool:
    """Whether a branch can go both ways; the loop around a wait goes on as soon as the machine lets it."""
    if decoded.instruction.opcode != "bra" or decoded.guard is None:
        return False
    before = program.code[max(decoded.index - 1, 0)]
    waits = before.row.blocking and any(o.operand == decoded.guard.register for o in before.destinations)
    return not waits


def _covered(ran: Mapping[str, bool]) -> Covered:
    return Covered(sum(ran.values()), len(ran), [name for name, executed in ran.items() if not executed])


def _ways(ways: set[str]) -> str:
    return f"only {next(iter(ways))}" if ways else "never reached"


def _where(key: tuple[str, str], program: emulator.Program, index: int) -> str:
    instruction = program.code[index].instruction
    source = f", {instruction.source}" if instruction.source else ""
    return f"{kernel_name(*key)}, PTX line {instruction.line}{source}"


def kernel_name(case: str, kernel: str) -> str:
    """How a kernel of a case is called in reports: `main of split`; a case that is one kernel gives it its name."""
    return kernel if kernel == case else f"{kernel} of {case}"
