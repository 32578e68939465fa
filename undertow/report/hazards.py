"""The section of the hazards: what the emulator finds when a guard is taken away, and that it finds nothing else."""

from __future__ import annotations

from collections.abc import Callable

from undertow.backward_case import main_case
from undertow.campaign import Campaign, Found, campaign, picture
from undertow.cases import COMPLETIONS, Kernel, settings
from undertow.hazard_figure import sides
from undertow.inputs import Shape
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.schema import Plan
from undertow.report.page import Figure, Label, Part, Section, Source, Table

KEY, TITLE = "hazards", "Hazards, and what guards against them"
COMMAND = "undertow check"
MADE_BY = "undertow report"
SEEDS = 1


def section(jobs: int, step: Callable[[str], None] = lambda text: None) -> Section:
    """Run the main kernels of the four schedules and of the baseline without each of its guards.

    Two query tiles and one key tile each; every moment of asynchronous completion. Raises: CompileError.
    """
    baseline = plan("aliased")
    whole = {name: plan(name) for name in SCHEDULES}
    broken = {each.name: each for each in (baseline.without_guard(region) for region in baseline.guards)}
    step("hazards: compiling")
    cases = {name: (_kernel(each),) for name, each in (whole | broken).items()}
    done = campaign(cases, settings(SEEDS, COMPLETIONS), jobs=jobs, step=lambda text: step(f"hazards: {text}"))
    settled = f"{SEEDS} scheduler seed, {len(COMPLETIONS)} moments of completion"
    source = Source(Label.EMULATED, f"the compiled PTX, executed under all observers, {settled}", MADE_BY)
    parts: list[Part] = [_table(done, source)]
    for name in broken:
        found = _drawable(done, name)
        if found is not None:
            caption = f"`{name}`: {found.finding.missing}."
            parts.append(Figure(picture(cases, found), caption, source))
    wrong = [f"`{name}`: {count} findings" for name in whole if (count := _count(done, name))]
    wrong += [f"`{name}`: nothing was found" for name in broken if not _count(done, name)]
    return Section(KEY, TITLE, COMMAND, parts, wrong)


def _count(done: Campaign, case: str) -> int:
    return sum(found.case == case for found in done.errors)


def _kernel(each: Plan) -> Kernel:
    return main_case(each, Shape(1, 2 * each.tile_m, each.tile_n, 1))


def _drawable(done: Campaign, case: str) -> Found | None:
    """A finding about two warps in tensor memory, one in which an early store meets a later load if there is one."""
    of_case = [found for found in done.errors if found.case == case and sides(found.finding)]
    early = [found for found in of_case if (pair := sides(found.finding)) and pair[1].warp < pair[0].warp]
    return next(iter(early or of_case), None)


def _table(done: Campaign, source: Source) -> Table:
    rows = []
    for case, runs in done.runs_of_case.items():
        found = [one for one in done.errors if one.case == case]
        missing = "; ".join(dict.fromkeys(one.finding.missing for one in found)) or "nothing"
        rules = ", ".join(dict.fromkeys(one.finding.rule for one in found)) or "none"
        rows.append((f"`{case}`", str(runs), str(len(found)), rules, missing))
    return Table(
        "The main kernel of each schedule, and the baseline without one of its guards.",
        ("kernel", "runs", "findings", "rules", "what is missing"),
        (None, source, source, None, None),
        rows,
    )
