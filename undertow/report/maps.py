"""The section of the plans: what lies where in tensor memory and in shared memory."""

from __future__ import annotations

from undertow.kernels.sm90.plan import plan as hopper_plan
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.render_svg import tmem_maps
from undertow.plan.schema import Plan
from undertow.report.page import Figure, Label, Section, Source, Table
from undertow.report.smem_map import smem_maps

KEY, TITLE = "maps", "Where tiles lie"
COMMAND = "python tools/regen.py"


def section() -> Section:
    """TMEM and SMEM maps of all plans."""
    plans = [plan(name) for name in SCHEDULES]
    hopper = hopper_plan()
    source = Source(Label.PLAN, "`undertow/kernels/sm100/plan.py`", COMMAND)
    both = Source(Label.PLAN, "`undertow/kernels/sm100/plan.py` and `undertow/kernels/sm90/plan.py`", COMMAND)
    barriers = Table(
        "Compute-wide barriers of a tile, by schedule.",
        ("schedule", "what it is", "alias guards", "barriers per tile"),
        (None, None, source, source),
        [(p.name, p.what, _guards(p), str(p.compute_barriers_per_tile)) for p in plans],
    )
    regions = Table(
        "Buffers of shared memory.",
        ("kernel", "buffer", "offset, bytes", "bytes", "stages", "elements of a stage"),
        (None, None, both, both, both, both),
        [*_regions("sm100, all schedules", plans[0]), *_regions("sm90", hopper)],
    )
    return Section(
        KEY,
        TITLE,
        COMMAND,
        [
            Figure(tmem_maps(plans), "Tensor memory of the four SM100 schedules.", source),
            barriers,
            Figure(smem_maps([*plans, hopper]), "Shared memory of one CTA, of the SM100 and SM90 kernels.", both),
            regions,
        ],
    )


def _guards(plan: Plan) -> str:
    return ", ".join(f"{region} x{count}" for region, count in plan.guards.items()) or "none"


def _regions(kernel: str, plan: Plan) -> list[tuple[str, ...]]:
    rows = []
    for region in plan.smem:
        numbers = (plan.smem_offsets[region.name], region.bytes, region.stages)
        elements = f"{region.rows} x {region.columns} {region.dtype.label}"
        rows.append((kernel, region.name, *map(str, numbers), elements))
    return rows
