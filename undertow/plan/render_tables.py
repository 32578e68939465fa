"""A plan as Markdown tables: every number in them is derived, none is typed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from undertow.plan.attention import Attention
from undertow.plan.schedule import mma_program, synchronised_program
from undertow.plan.schema import MBARRIER_BYTES, SMEM_BYTES_PER_CTA, TMEM_COLUMNS, WARP_THREADS, Pipeline, Plan
from undertow.plan.steps import (
    Copy,
    Guard,
    Issue,
    Join,
    Load,
    PassTurn,
    Signal,
    Step,
    Store,
    SynchronisedStep,
    TakeTurn,
    Wait,
)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a column is right-aligned if all its cells are numbers."""
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [
        bool(cells) and all(row[i].replace(",", "").replace(".", "").isdigit() or not row[i] for row in cells)
        for i in range(len(header))
    ]
    lines = [list(header), ["---:" if right else "---" for right in numeric], *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def schedules(plans: Sequence[Plan]) -> str:
    """The plans side by side: guards, signals, barriers, issue order."""
    rows = [
        (
            f"`{p.name}`",
            p.what,
            ", ".join(f"{region} x{count}" for region, count in p.guards.items()) or "none",
            p.compute_barrier_sites,
            p.compute_barriers_per_tile,
            ", ".join(_issue(issue) for issue in p.order),
        )
        for p in plans
    ]
    return table(("schedule", "what it is", "alias guards", "barrier sites", "barriers per tile", "MMA order"), rows)


def roles(plan: Plan) -> str:
    """Warps, threads, registers and what each role does; the last row sums the registers of the CTA."""
    rows: list[Sequence[object]] = [
        (f"`{r.name}`", _span(r.warps), r.threads, r.registers, r.threads * r.registers, r.does) for r in plan.roles
    ]
    total = sum(r.threads * r.registers for r in plan.roles)
    rows.append(("sum", _span(range(plan.num_warps)), plan.num_threads, "", total, "an SM has 65536"))
    return table(("role", "warps", "threads", "registers each", "registers", "does"), rows)


def gemms(plan: Plan) -> str:
    """The five GEMMs with their operands' homes and shapes."""
    tmem = {region.name for region in plan.tmem}

    def operand(name: str, major: tuple[str, ...]) -> str:
        return f"{name} (TMEM)" if name in tmem else f"{name} (SMEM, {'MN' if name in major else 'K'}-major)"

    rows = [
        (
            f"`{op.name}`",
            op.math,
            f"{op.m} x {op.n} x {op.k}",
            operand(op.a, op.mn_major),
            operand(op.b, op.mn_major),
            f"{op.d}, {'a new sum per tile' if op.into_zero else 'summed over tiles'}",
        )
        for op in plan.mmas
    ]
    return table(("GEMM", "computes", "M x N x K", "A", "B", "accumulator"), rows)


def pipelines(plan: Plan) -> str:
    """Every hand-off: who completes each side, how often, with how many bytes, and when the slot is free again."""
    return table(
        ("pipeline", "carries", "stages", "full: arrivals", "bytes", "empty: arrivals", "released when"),
        [_pipeline_row(plan, p) for p in plan.pipelines],
    )


def _pipeline_row(plan: Plan, p: Pipeline) -> Sequence[object]:
    tx = ""
    if p.producer == "load":
        first = plan.tx_bytes(p, first=True)
        tx = f"{plan.tx_bytes(p)}" + (f", first {first}" if p.first_also else "")
    empty = f"{plan.arrivals(p, 'empty')} from {p.consumer}" if p.has_empty else "no empty side"
    released = p.why if p.has_empty else "once per CTA" if p.once else f"{p.why} (`{p.released_by}`)"
    return (
        f"`{p.name}`",
        ", ".join(p.carries + tuple(f"{name} with the first" for name in p.first_also)),
        p.stages,
        f"{plan.arrivals(p, 'full')} from {p.producer}",
        tx,
        empty,
        released,
    )


def shared_memory(plan: Plan) -> str:
    """Offsets and sizes of the shared-memory map, barriers first."""
    words = len(plan.mbarriers)
    rows: list[Sequence[object]] = [
        ("mbarriers", 0, words * MBARRIER_BYTES, f"{words} words of {MBARRIER_BYTES}"),
    ]
    if plan.tmem:
        rows.append(("TMEM base", plan.tmem_pointer_offset, 4, "written by tcgen05.alloc"))
    for region in plan.smem:
        stages = f"{region.stages} stages of " if region.stages > 1 else ""
        what = f"{stages}{region.rows} x {region.columns} {region.dtype.label}"
        rows.append((f"`{region.name}`", plan.smem_offsets[region.name], region.bytes, what))
    rows.append(("end", plan.smem_bytes, "", f"a CTA has {SMEM_BYTES_PER_CTA}"))
    return table(("region", "offset", "bytes", "holds"), rows)


def tensor_memory(plan: Plan) -> str:
    """Columns of the TMEM map and what else lies on them."""
    rows = []
    for region in plan.tmem:
        shared = [f"{other.name} {_columns(region.overlap(other))}" for other in plan.tmem if other is not region]
        shared = [text for text in shared if not text.endswith(" ")]
        columns = _columns(range(region.column, region.end))
        rows.append((f"`{region.name}`", columns, region.columns, region.dtype.label, ", ".join(shared) or "nothing"))
    used = len({column for region in plan.tmem for column in range(region.column, region.end)})
    rows.append(("used", "", used, "", f"of {TMEM_COLUMNS}"))
    return table(("region", "columns", "width", "type", "shares columns with"), rows)


def named_barriers(plan: Plan) -> str:
    rows = [
        (f"`{b.name}`", plan.barrier_ids[b.name], plan.barrier_threads(b.name), ", ".join(b.roles), b.does)
        for b in plan.barriers
    ]
    return table(("barrier", "id", "threads", "roles", "does"), rows)


def mma_rows(plan: Plan) -> str:
    """The MMA warp's program, a row per GEMM: what it waits for before, and what its commit completes after."""
    program, rows = mma_program(plan), []
    for part, steps in (("prologue, t = -1", program.prologue), ("body", program.body), ("tail, last t", program.tail)):
        for waits, issue, commits in _around_issues(steps):
            rows.append((part, _all(waits), _issue(issue) if issue else "", _all(commits)))
    return table(("part", "waits for", "GEMM", "commits"), rows)


def _around_issues(steps: Sequence[Step]) -> list[tuple[list[Step], Issue | None, list[Step]]]:
    out: list[tuple[list[Step], Issue | None, list[Step]]] = []
    waits: list[Step] = []
    for step in steps:
        if isinstance(step, Wait):
            waits.append(step)
        elif isinstance(step, Issue):
            out.append((waits, step, []))
            waits = []
        elif out and not waits:
            out[-1][2].append(step)
        else:
            out.append((waits, None, [step]))
            waits = []
    return out


def compute_steps(plan: Plan) -> str:
    """One tile of a compute warp, step by step, with the guards and joins that the plan derives."""
    rows = []
    for number, step in enumerate(synchronised_program(plan, "compute"), start=1):
        rows.append((number, *_describe(plan, step)))
    return table(("", "step", "of", "where, or what it orders"), rows)


def reduce_steps(plan: Plan) -> str:
    """One tile of a reduce warp, step by step."""
    rows = [
        (number, *_describe(plan, step)[:2])
        for number, step in enumerate(synchronised_program(plan, "reduce"), start=1)
    ]
    return table(("", "step", "of"), rows)


def registers(plans: Mapping[str, Plan]) -> str:
    """Registers per thread of each role, one column for each of the named plans."""
    names = [role.name for role in next(iter(plans.values())).roles]
    rows = [(f"`{name}`", *(p.role(name).registers for p in plans.values())) for name in names]
    return table(("role", *plans), rows)


def cta_orders(masks: Sequence[Attention]) -> str:
    """In which order the CTAs of a head take their key/value tiles, by default and in deterministic mode."""

    def order(attention: Attention) -> str:
        return "last tile first" if attention.descending else "first tile first"

    rows = [(mask.name, order(mask), order(replace(mask, deterministic=True))) for mask in masks]
    return table(("mask", "default: the longest first", "deterministic"), rows)


def _describe(plan: Plan, step: SynchronisedStep) -> tuple[str, str, str]:
    if isinstance(step, Wait | Signal):
        verb = "wait" if isinstance(step, Wait) else "signal"
        return verb, f"`{step.pipeline}.{step.side}` {tile(step.tile)}", ""
    if isinstance(step, Load | Store):
        return type(step).__name__.lower(), f"`{step.region}`", _where(plan, step)
    if isinstance(step, Guard):
        threads = plan.barrier_threads("compute")
        return "**guard**", "barrier `compute`", f"all {threads} threads have loaded what {step.region} is stored over"
    if isinstance(step, Join):
        fences = " and ".join(
            n for n, on in (("TMEM stores done", step.tmem), ("SMEM stores visible", step.smem)) if on
        )
        if step.barrier:
            return "**join**", f"barrier `{step.barrier}`", fences
        return "join", f"warp sync ({WARP_THREADS} lanes)", fences
    if isinstance(step, TakeTurn | PassTurn):
        return "**take turn**" if isinstance(step, TakeTurn) else "**pass turn**", f"`{step.region}` of the tile", ""
    assert isinstance(step, Copy | Issue)
    return "", "", ""


def _where(plan: Plan, step: Load | Store) -> str:
    if all(region.name != step.region for region in plan.tmem):
        region = plan.smem_region(step.region)
        return "" if region.stages == len(step.stages) else f"part {', '.join(map(str, step.stages))}"
    parts = []
    role = plan.role("compute")
    for group in range(role.warpgroups):
        warps = role.warps[4 * group : 4 * group + 4]
        columns = " ".join(_columns(plan.columns_of(step.region, stage, group)) for stage in step.stages)
        parts.append(f"warps {_span(warps)}: {columns}")
    return "; ".join(parts)


def _all(steps: Sequence[Step]) -> str:
    return ", ".join(f"`{s.pipeline}.{s.side}` {tile(s.tile)}" for s in steps if isinstance(s, Wait | Signal))


def _issue(issue: Issue) -> str:
    return f"{issue.mma} {tile(issue.tile)}"


def tile(offset: int) -> str:
    """A tile counted from the trip's own: `t`, `t+1`, `t-2`."""
    return f"t{offset:+d}" if offset else "t"


def _columns(columns: range) -> str:
    return f"[{columns.start}, {columns.stop})" if columns else ""


def _span(warps: range) -> str:
    return f"{warps.start}-{warps.stop - 1}" if len(warps) > 1 else f"{warps.start}"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")
