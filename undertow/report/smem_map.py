"""A picture of shared memory as a plan packs it: every buffer with its stages, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.plan.drawing import GRID, INK, MUTED, Drawing, fill_of
from undertow.plan.schema import SMEM_BYTES_PER_CTA, Plan, SmemRegion

LEFT, WIDTH, RIGHT, TOP, ROW, PANEL = 24, 1032, 24, 44, 50, 132  # pixels
KIB = 1024
CHARACTER = 7.4  # pixels of one at size 13, at most
TICK_KIB = 32


def smem_maps(plans: Sequence[Plan]) -> str:
    """SVG of the shared memory of `plans`, one panel per different map."""
    groups: list[list[Plan]] = []
    for plan in plans:
        group = next((group for group in groups if group[0].smem_offsets == plan.smem_offsets), None)
        groups.append([plan]) if group is None else group.append(plan)
    names = ", ".join(plan.name for plan in plans)
    drawing = Drawing(LEFT + WIDTH + RIGHT, PANEL * len(groups) + 10, f"Shared-memory maps of {names}", _told(groups))
    for index, group in enumerate(groups):
        _panel(drawing, group, PANEL * index)
    return drawing.svg()


def _told(groups: Sequence[Sequence[Plan]]) -> str:
    sentences = []
    for group in groups:
        plan = group[0]
        parts = ", ".join(f"{r.name} {r.bytes} bytes at {plan.smem_offsets[r.name]}" for r in plan.smem)
        sentences.append(f"{', '.join(each.name for each in group)}: {parts}.")
    return " ".join(sentences)


def _x(offset: float) -> float:
    return LEFT + offset / SMEM_BYTES_PER_CTA * WIDTH


def _panel(drawing: Drawing, group: Sequence[Plan], above: float) -> None:
    plan, top = group[0], above + TOP
    used = plan.smem_bytes
    heading = f"{', '.join(each.name for each in group)}: {used} of {SMEM_BYTES_PER_CTA} bytes"
    drawing.text(LEFT, above + 28, f"**{heading}**", size=15)
    for kib in range(0, SMEM_BYTES_PER_CTA // KIB + 1, TICK_KIB):
        drawing.line((_x(kib * KIB), top), (_x(kib * KIB), top + ROW + 6), GRID)
        drawing.text(_x(kib * KIB), top + ROW + 20, f"{kib} KiB", size=12, anchor="middle", ink=MUTED)
    for region in plan.smem:
        start = plan.smem_offsets[region.name]
        x, end = _x(start), _x(start + region.bytes)
        drawing.box(x, top, end - x, ROW, fill_of(region.name.removeprefix("s")))
        for stage in range(region.stages):
            _stage(drawing, region, stage, start + stage * region.stage_bytes, top)
    drawing.box(_x(used), top, _x(SMEM_BYTES_PER_CTA) - _x(used), ROW, "", dashed=True)
    drawing.text((_x(used) + _x(SMEM_BYTES_PER_CTA)) / 2, top + 31, "unused", size=13, anchor="middle", ink=MUTED)


def _stage(drawing: Drawing, region: SmemRegion, stage: int, start: int, top: float) -> None:
    x, end = _x(start), _x(start + region.stage_bytes)
    if stage:
        drawing.line((x, top), (x, top + ROW), INK, dashes="3 3")
    name = f"{region.name}[{stage}]" if region.stages > 1 else region.name
    if len(name) * CHARACTER < end - x:
        drawing.text((x + end) / 2, top + 22, f"**{name}**", size=14, anchor="middle")
        drawing.text((x + end) / 2, top + 40, f"{region.stage_bytes // KIB} KiB", size=12, anchor="middle")
