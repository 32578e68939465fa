"""Pictures of a plan's tensor memory: which tile lies where, what lies over what, and where guards must stand."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.plan.drawing import ALARM, GRID, MUTED, Drawing, fill_of
from undertow.plan.schema import TMEM_COLUMNS, DType, Plan, TmemRegion
from undertow.plan.steps import Load, Store

LEFT, SCALE, RIGHT = 132, 1.75, 24  # pixels: row names, one TMEM column, margin
ROW, GAP, SHARED = 54, 10, 8  # pixels: a row, the space below it, the hatched strip of shared columns
TICK_COLUMNS = 64
WARPGROUP_FILLS = ("#d7e7fb", "#fdebc8")


def tmem_maps(plans: Sequence[Plan]) -> str:
    """SVG of the TMEM maps of `plans`, one panel per different map: 512 columns, fp32 above, 16-bit tiles below."""
    panels = same_map(plans)
    heights = [_panel_height(group) for group in panels]
    width = int(LEFT + TMEM_COLUMNS * SCALE + RIGHT)
    drawing = Drawing(width, 20 + sum(heights) + 16, "Tensor-memory maps of " + ", ".join(p.name for p in plans))
    top = 20
    for group, height in zip(panels, heights, strict=True):
        _panel(drawing, group, top)
        top += height
    threads = plans[0].role("compute").threads
    note = f"hatched: columns that two tiles share; a guard is a barrier of all {threads} compute threads"
    drawing.text(24, top + 4, note, ink=MUTED)
    return drawing.svg()


def hazard(plan: Plan, stored: str, loaded: str) -> str:
    """SVG of the columns that the compute warps of one lane quarter load from one region and store to another.

    Red: columns that a warp stores although its sister in the other warpgroup, which has the same lanes, loads them.
    """
    region, over = plan.tmem_region(stored), plan.tmem_region(loaded)
    first, last = min(region.column, over.column), max(region.end, over.end)
    scale = (TMEM_COLUMNS * SCALE) / (last - first)
    drawing = Drawing(
        int(LEFT + TMEM_COLUMNS * SCALE + RIGHT), 250, f"Columns of {loaded} loaded and of {stored} stored"
    )
    stages = {name: _stages(plan, name) for name in (stored, loaded)}
    groups = range(plan.role("compute").warpgroups)
    for name, y in ((loaded, 44), (stored, 140)):
        verb = "load" if name == loaded else "store"
        drawing.text(LEFT - 14, y + ROW / 2 + 5, f"{verb} {name}", anchor="end")
        for stage, group in ((s, g) for s in stages[name] for g in groups):
            part = plan.columns_of(name, stage, group)
            x, width = LEFT + (part.start - first) * scale, len(part) * scale
            drawing.box(x, y, width, ROW, WARPGROUP_FILLS[group % 2])
            drawing.text(x + width / 2, y + 24, f"warp {_sister(plan, group)}", anchor="middle")
            drawing.text(x + width / 2, y + 43, f"[{part.start}, {part.stop})", size=13, anchor="middle", ink=MUTED)
    for written in ((s, g) for s in stages[stored] for g in groups):
        for read in ((s, g) for s in stages[loaded] for g in groups):
            mine, theirs = plan.columns_of(stored, *written), plan.columns_of(loaded, *read)
            shared = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
            if shared and written[1] != read[1]:
                at = LEFT + (shared.start + len(shared) / 2 - first) * scale
                drawing.arrow((at, 140), (at, 44 + ROW), ALARM)
                drawing.hatch(LEFT + (shared.start - first) * scale, 44 + ROW - SHARED, len(shared) * scale, SHARED)
    drawing.text(LEFT, 28, "lanes [32, 64) of TMEM, seen by the two compute warps that own them", ink=MUTED)
    note = f"red: stores of {stored} over columns of {loaded} that the other warp may still have to load"
    drawing.text(LEFT, 228, note, ink=ALARM)
    return drawing.svg()


def _stages(plan: Plan, region: str) -> list[int]:
    """Stages in which compute warps touch a region."""
    steps = [s for s in plan.program("compute") if isinstance(s, Load | Store) and s.region == region]
    return sorted({stage for step in steps for stage in step.stages})


def _sister(plan: Plan, group: int) -> int:
    """The warp of a compute warpgroup that owns lanes [32, 64)."""
    return next(w for w in plan.role("compute").warps[4 * group : 4 * group + 4] if w % 4 == 1)


def same_map(plans: Sequence[Plan]) -> list[list[Plan]]:
    """The plans in groups of equal TMEM maps, in the order of first appearance."""
    groups: list[list[Plan]] = []
    for plan in plans:
        for group in groups:
            if group[0].tmem == plan.tmem:
                group.append(plan)
                break
        else:
            groups.append([plan])
    return groups


def rows_of(plan: Plan) -> list[list[TmemRegion]]:
    """The map's regions in rows without overlap.

    fp32 rows come first; an accumulator that reuses columns starts a second one. 16-bit rows come last.
    """
    rows: list[list[TmemRegion]] = []
    for wide in (True, False):
        start = len(rows)
        for region in plan.tmem:
            if (region.dtype is DType.F32) is not wide:
                continue
            for row in rows[start:]:
                if not any(region.overlap(other) for other in row):
                    row.append(region)
                    break
            else:
                rows.append([region])
    return rows


def _panel_height(group: list[Plan]) -> int:
    return 62 + len(rows_of(group[0])) * (ROW + GAP) + 24 + 24 * len(group) + 14


def _x(column: float) -> float:
    return LEFT + column * SCALE


def _panel(drawing: Drawing, group: list[Plan], top: float) -> None:
    plan = group[0]
    drawing.text(24, top + 20, "**" + ", ".join(p.name for p in group) + "**", size=19)
    rows, first = rows_of(plan), top + 62
    _ruler(drawing, first, first + len(rows) * (ROW + GAP) - GAP)
    seen: list[tuple[TmemRegion, float]] = []
    for index, row in enumerate(rows):
        y = first + index * (ROW + GAP)
        _row_name(drawing, rows, index, y)
        for region in row:
            _region(drawing, region, y)
            for other, other_y in seen:
                _shared(drawing, (region, y), (other, other_y))
        for region in row:
            seen.append((region, y))
    _unused(drawing, plan, first + (len(rows) - 1) * (ROW + GAP))
    _guards(drawing, plan, first + (len(rows) - 1) * (ROW + GAP) + ROW)
    below = first + len(rows) * (ROW + GAP) + 24
    for line, each in enumerate(group):
        drawing.text(24, below + 14 + 24 * line, summary(each), size=16)


def summary(plan: Plan) -> str:
    """One line: where the plan's compute-wide barriers come from."""
    guards = " + ".join(f"{region} x{count}" for region, count in plan.guards.items()) or "none"
    signals = f"{plan.compute_barrier_sites - len(plan.guards)} of {len(plan.signals)} signals"
    total = f"{plan.compute_barriers_per_tile} compute-wide barriers per tile"
    return f"{plan.name}: guards {guards}, barriers before {signals}: {total}"


def _ruler(drawing: Drawing, top: float, bottom: float) -> None:
    for column in range(0, TMEM_COLUMNS + 1, TICK_COLUMNS):
        drawing.line((_x(column), top - 8), (_x(column), bottom), GRID, dashes="2 3")
        drawing.text(_x(column), top - 13, str(column), size=14, anchor="middle", ink=MUTED)


def _row_name(drawing: Drawing, rows: list[list[TmemRegion]], index: int, y: float) -> None:
    dtype = rows[index][0].dtype
    again = index > 0 and rows[index - 1][0].dtype is DType.F32 and dtype is DType.F32
    name = "fp32, reused" if again else "fp32" if dtype is DType.F32 else f"{dtype.label}, packed"
    drawing.text(LEFT - 14, y + ROW / 2 + 5, name, anchor="end", ink=MUTED)


def _region(drawing: Drawing, region: TmemRegion, y: float) -> None:
    drawing.box(_x(region.column), y, region.columns * SCALE, ROW, fill_of(region.name))
    middle = _x(region.column) + region.columns * SCALE / 2
    drawing.text(middle, y + 25, f"**{region.name}**", size=17, anchor="middle")
    drawing.text(middle, y + 43, f"[{region.column}, {region.end})", size=14, anchor="middle")


def _shared(drawing: Drawing, lower: tuple[TmemRegion, float], upper: tuple[TmemRegion, float]) -> None:
    """Hatch a strip of the upper region where the lower one lies on the same columns."""
    shared = lower[0].overlap(upper[0])
    if shared:
        drawing.hatch(_x(shared.start), upper[1] + ROW - SHARED, len(shared) * SCALE, SHARED)
        drawing.hatch(_x(shared.start), lower[1], len(shared) * SCALE, SHARED)


def _unused(drawing: Drawing, plan: Plan, y: float) -> None:
    taken = {column for region in plan.tmem for column in range(region.column, region.end)}
    free = [column for column in range(TMEM_COLUMNS) if column not in taken]
    if free and len(free) == free[-1] - free[0] + 1:
        drawing.box(_x(free[0]), y, len(free) * SCALE, ROW, "", dashed=True)
        drawing.text(_x(free[0]) + len(free) * SCALE / 2, y + 32, "unused", anchor="middle", ink=MUTED)


def _guards(drawing: Drawing, plan: Plan, y: float) -> None:
    """Under each tile that is stored over somebody else's loads: how many guards a tile pays."""
    for name, count in plan.guards.items():
        region = plan.tmem_region(name)
        start, end = _x(region.column), _x(region.end)
        drawing.line((start, y + 6), (end, y + 6), ALARM)
        loaded = {step.region for step in plan.program("compute") if isinstance(step, Load)}
        over = ", ".join(r.name for r in plan.tmem if r.name in loaded and r.overlap(region))
        drawing.text(start, y + 24, f"over {over}: guard x{count}", size=15, ink=ALARM)
