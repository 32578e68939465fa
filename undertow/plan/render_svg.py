"""Pictures of a plan's tensor memory: which tile lies where, what lies over what, and where guards must stand."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.plan.drawing import ALARM, GRID, INK, MUTED, Drawing, fill_of
from undertow.plan.schema import TMEM_COLUMNS, DType, Plan, TmemRegion
from undertow.plan.steps import Load

LEFT, SCALE, RIGHT = 150, 1.9, 24  # pixels: row names, one TMEM column, margin
ROW, GAP = 46, 10
TICK_COLUMNS = 64


def tmem_maps(plans: Sequence[Plan]) -> str:
    """SVG of the TMEM maps of `plans`, one panel per different map: 512 columns, fp32 above, 16-bit tiles below."""
    panels = same_map(plans)
    heights = [_panel_height(group) for group in panels]
    width = int(LEFT + TMEM_COLUMNS * SCALE + RIGHT)
    drawing = Drawing(width, 20 + sum(heights), "Tensor-memory maps of " + ", ".join(p.name for p in plans))
    top = 20
    for group, height in zip(panels, heights, strict=True):
        _panel(drawing, group, top)
        top += height
    return drawing.svg()


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
    """The map's regions in rows without overlap: fp32 rows first (an accumulator that reuses columns starts a second),
    16-bit rows last."""
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
        drawing.text(LEFT, below + 14 + 24 * line, summary(each), size=16)


def summary(plan: Plan) -> str:
    """One line: where the plan's compute-wide barriers come from."""
    guards = ", ".join(f"{region} x{count}" for region, count in plan.guards.items()) or "none"
    signals = f"{plan.compute_barrier_sites - len(plan.guards)} of {len(plan.signals)}"
    return (
        f"{plan.name}: alias guards {guards}; signals behind a barrier {signals};"
        f" {plan.compute_barriers_per_tile} compute-wide barriers per tile"
    )


def _ruler(drawing: Drawing, top: float, bottom: float) -> None:
    for column in range(0, TMEM_COLUMNS + 1, TICK_COLUMNS):
        drawing.line((_x(column), top - 8), (_x(column), bottom), GRID, dashes="2 3")
        drawing.text(_x(column), top - 13, str(column), size=13, anchor="middle", ink=MUTED)


def _row_name(drawing: Drawing, rows: list[list[TmemRegion]], index: int, y: float) -> None:
    dtype = rows[index][0].dtype
    again = index > 0 and rows[index - 1][0].dtype is DType.F32 and dtype is DType.F32
    name = "fp32, reused" if again else "fp32" if dtype is DType.F32 else f"{dtype.label}, packed"
    drawing.text(LEFT - 14, y + ROW / 2 + 5, name, anchor="end", ink=MUTED)


def _region(drawing: Drawing, region: TmemRegion, y: float) -> None:
    drawing.box(_x(region.column), y, region.columns * SCALE, ROW, fill_of(region.name))
    middle = _x(region.column) + region.columns * SCALE / 2
    drawing.text(middle, y + 21, f"**{region.name}**", size=17, anchor="middle")
    drawing.text(middle, y + 38, f"[{region.column}, {region.end})", size=13, anchor="middle")


def _shared(drawing: Drawing, lower: tuple[TmemRegion, float], upper: tuple[TmemRegion, float]) -> None:
    """Hatch a strip of the upper region where the lower one lies on the same columns."""
    shared = lower[0].overlap(upper[0])
    if shared:
        drawing.hatch(_x(shared.start), upper[1] + ROW - 7, len(shared) * SCALE, 7)
        drawing.hatch(_x(shared.start), lower[1], len(shared) * SCALE, 7)


def _unused(drawing: Drawing, plan: Plan, y: float) -> None:
    taken = {column for region in plan.tmem for column in range(region.column, region.end)}
    free = [column for column in range(TMEM_COLUMNS) if column not in taken]
    if free and len(free) == free[-1] - free[0] + 1:
        drawing.box(_x(free[0]), y, len(free) * SCALE, ROW, "", dashed=True)
        drawing.text(_x(free[0]) + len(free) * SCALE / 2, y + 28, "unused", anchor="middle", ink=MUTED)


def _guards(drawing: Drawing, plan: Plan, y: float) -> None:
    """Under each tile that is stored over somebody else's loads: how many guards a tile pays."""
    for name, count in plan.guards.items():
        region = plan.tmem_region(name)
        start, end = _x(region.column), _x(region.end)
        drawing.line((start, y + 6), (end, y + 6), ALARM)
        over = ", ".join(sorted({s.region for s in plan.program("compute") if _loaded_under(plan, s, region)}))
        drawing.text(start, y + 24, f"over {over}: guard x{count}", size=15, ink=ALARM)


def _loaded_under(plan: Plan, step, region: TmemRegion) -> bool:
    if not isinstance(step, Load) or not any(r.name == step.region for r in plan.tmem):
        return False
    return bool(plan.tmem_region(step.region).overlap(region))


__all__ = ["INK", "rows_of", "same_map", "summary", "tmem_maps"]
