"""A picture of one tile: who does what in which order, who signals whom, and who stands at which barrier.

The horizontal axis is order, not time: every kind of step has a drawn width (`WIDTHS`) that leaves room for its name,
and a step begins when everything it waits for has ended. Warps of the second compute warpgroup are drawn a little
slower, so that one can see who holds whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from undertow.plan.drawing import ALARM, GRID, MUTED, Drawing, fill_of
from undertow.plan.order import Node, Order
from undertow.plan.schema import Plan
from undertow.plan.steps import Copy, Issue, Load, Step, Store

TILES = 6  # unrolled; the drawn tile is the fourth, far from both ends of the loop
DRAWN = 3
UNIT = 13.0  # pixels per unit of width
LEFT, RIGHT, TOP = 136, 20, 60
LANE, GAP = 48, 38
SLOWER = 1.2

LANES = ("load", "tensor pipe", "compute[0]", "compute[1]", "reduce")

# Drawn widths, in units: room for a name, nothing measured. A step that is not listed has no width.
WIDTHS = {
    ("Copy", "sQ"): 4.0,
    ("Copy", "sdO"): 4.0,
    ("Load", "S"): 4.8,
    ("Load", "sLSE"): 11.0,
    ("Store", "P"): 4.8,
    ("Load", "dP"): 5.0,
    ("Load", "sD"): 5.2,
    ("Store", "dS"): 2.6,
    ("Store", "sdS"): 3.0,
    ("Load", "dQ"): 5.2,
    ("Store", "sdQ"): 3.0,
}
GEMM_WIDTH = 4.0
NAMES = {  # arithmetic is drawn where its last operand is loaded
    ("Load", "sLSE"): ("softmax", "P"),
    ("Load", "sD"): ("form dS", "dS"),
    ("Store", "dS"): ("dS", "dS"),
    ("Store", "sdS"): ("sdS", "dS"),
    ("Store", "sdQ"): ("sdQ", "dQ"),
}
CHARACTER = 8.4  # pixels of one, at most

STROKES = {
    "load_mma_q": "#6b7280",
    "load_mma_do": "#374151",
    "mma_compute_s": "#1d5fb4",
    "compute_mma_p": "#0b8a7d",
    "mma_compute_dp": "#c2410c",
    "compute_mma_ds": "#a16207",
    "mma_reduce_dq": "#6d3fb0",
}


@dataclass(frozen=True)
class Span:
    """A step on the axis of the drawing, in units."""

    start: float
    end: float


def schedule(plan: Plan) -> str:
    """SVG of one tile of `plan`'s loop: the tensor pipe's GEMMs, the compute warps' steps, signals and barriers."""
    order = Order(plan, TILES)
    spans = spread(order)
    window = _window(order, spans)
    width = int(LEFT + (window.end - window.start) * UNIT + RIGHT)
    height = TOP + len(LANES) * (LANE + GAP) + 68
    drawing = Drawing(width, height, f"One tile of schedule {plan.name}")
    drawing.text(20, 34, f"**{plan.name}**", size=19)
    drawing.text(LEFT, 34, "one tile of the loop: order of steps from left to right; widths are not times", ink=MUTED)
    _lanes(drawing, plan, width)
    _signals(drawing, order, spans, window)
    _barriers(drawing, order, spans, window)
    for index, node in enumerate(order.nodes):
        if node.who in LANES and overlaps(spans[index], window):
            _step(drawing, node, spans[index], window)
    _waiting(drawing, order, spans, window)
    _legend(drawing, plan, height - 72)
    return drawing.svg()


def width_of(node: Node) -> float:
    """Drawn width of a node; the second compute warpgroup is drawn slower."""
    if node.step is None or node.who == "mma":
        return 0.0
    if isinstance(node.step, Issue):
        return GEMM_WIDTH
    if isinstance(node.step, Copy | Load | Store):
        width = WIDTHS.get((type(node.step).__name__, node.step.region), 0.0)
        return width * SLOWER if node.who == "compute[1]" else width
    return 0.0


def spread(order: Order) -> list[Span]:
    """Earliest place of every node: behind everything that happens before it."""
    waiting = [0] * len(order.nodes)
    for followers in order.edges.values():
        for follower in followers:
            waiting[follower] += 1
    starts = [0.0] * len(order.nodes)
    queue = [index for index, count in enumerate(waiting) if not count]
    for index in queue:
        end = starts[index] + width_of(order.nodes[index])
        for follower in order.edges[index]:
            starts[follower] = max(starts[follower], end)
            waiting[follower] -= 1
            if not waiting[follower]:
                queue.append(follower)
    return [Span(start, start + width_of(node)) for start, node in zip(starts, order.nodes, strict=True)]


def overlaps(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end


def _window(order: Order, spans: list[Span]) -> Span:
    """From the first load of the drawn tile's S to the first load of the next one's, with a margin."""

    def first_load(tile: int) -> float:
        return min(
            span.start
            for node, span in zip(order.nodes, spans, strict=True)
            if isinstance(node.step, Load) and node.step.region == "S" and node.tile == tile
        )

    return Span(first_load(DRAWN) - 3, first_load(DRAWN + 1) + 8)


def _x(at: float, window: Span) -> float:
    return LEFT + (min(max(at, window.start), window.end) - window.start) * UNIT


def _y(lane: str) -> float:
    return TOP + LANES.index(lane) * (LANE + GAP)


def _lanes(drawing: Drawing, plan: Plan, width: int) -> None:
    for lane in LANES:
        y = _y(lane)
        drawing.line((LEFT, y + LANE / 2), (width - RIGHT, y + LANE / 2), GRID, dashes="2 4")
        role, warpgroup = lane.removesuffix("]").partition("[")[::2]
        warps = plan.role("mma" if role == "tensor pipe" else role).warps
        if warpgroup:
            warps = range(warps.start + 4 * int(warpgroup), warps.start + 4 * int(warpgroup) + 4)
        several = f"warps {warps.start}-{warps.stop - 1}" if len(warps) > 1 else f"warp {warps.start}"
        drawing.text(LEFT - 14, y + 20, f"**{role}**", anchor="end")
        drawing.text(LEFT - 14, y + 40, several, size=14, anchor="end", ink=MUTED)


def _step(drawing: Drawing, node: Node, span: Span, window: Span) -> None:
    x, end = _x(span.start, window), _x(span.end, window)
    if end - x < 8:
        return
    y, (name, fill) = _y(node.who), _look(node.step)
    drawing.box(x, y, end - x, LANE, fill_of(fill))
    if max(len(name), len(_tile(node.tile))) * CHARACTER > end - x:
        return
    drawing.text((x + end) / 2, y + 21, name, size=15, anchor="middle")
    drawing.text((x + end) / 2, y + 39, _tile(node.tile), size=14, anchor="middle", ink=MUTED)


def _look(step: Step | None) -> tuple[str, str]:
    """What is written in a step's box, and the region that gives it its colour."""
    if isinstance(step, Issue):
        return step.mma, step.mma
    assert isinstance(step, Copy | Load | Store), "other steps have no width"
    kind = type(step).__name__
    plain = step.region if isinstance(step, Copy) else f"{kind.lower()} {step.region}"
    return NAMES.get((kind, step.region), (plain, step.region))


def _tile(tile: int) -> str:
    offset = tile - DRAWN
    return f"t{offset:+d}" if offset else "t"


def _waiting(drawing: Drawing, order: Order, spans: list[Span], window: Span) -> None:
    """Hatch the gaps between two steps of a lane."""
    for lane in LANES[1:4]:
        drawn = [
            span for node, span in zip(order.nodes, spans, strict=True) if node.who == lane and span.end > span.start
        ]
        for before, after in pairwise(drawn):
            gap = Span(before.end, after.start)
            if after.start - before.end > 0.1 and overlaps(gap, window):
                x, end = _x(gap.start, window), _x(gap.end, window)
                drawing.hatch(x, _y(lane) + LANE / 2 - 5, end - x, 10)


def _barriers(drawing: Drawing, order: Order, spans: list[Span], window: Span) -> None:
    """A red line through the compute lanes where the last warp arrives."""
    for (_, _, kind), nodes in order.joins.items():
        at = max(spans[node].end for node in nodes[::2])
        if window.start < at < window.end - 2:  # the name below the line takes room
            x = _x(at, window)
            drawing.line((x, _y("compute[0]") - 10), (x, _y("compute[1]") + LANE + 8), ALARM, dashes="6 4")
            drawing.text(x, _y("compute[1]") + LANE + 22, kind, size=15, anchor="middle", ink=ALARM)


def _signals(drawing: Drawing, order: Order, spans: list[Span], window: Span) -> None:
    for source, wait, name in order.hand_overs:
        pipeline = name.split(".")[0]
        start, end = order.nodes[source], order.nodes[wait]
        target = _used_by(order, wait)
        lanes = [n.who if n.who != "mma" else "tensor pipe" for n in (start, end)]
        if pipeline not in STROKES or target is None or not all(lane in LANES for lane in lanes):
            continue
        a, b = spans[source].end, spans[target].start
        if not (window.start <= a and b < window.end - 1):
            continue
        down = LANES.index(lanes[0]) < LANES.index(lanes[1])
        y0, y1 = (_y(lanes[0]) + LANE, _y(lanes[1])) if down else (_y(lanes[0]), _y(lanes[1]) + LANE)
        head = (_x(b, window) + 4 + 6 * (name.endswith("empty")), y1)
        drawing.arrow((_x(a, window) - 2, y0), head, STROKES[pipeline], dashed=name.endswith("empty"))


def _used_by(order: Order, wait: int) -> int | None:
    """The drawn step that a wait holds back: the warp's next one, for the MMA warp the GEMM it issues next."""
    who = order.nodes[wait].who
    for index in range(wait + 1, len(order.nodes)):
        node = order.nodes[index]
        if who == "mma" and node.who == "tensor pipe":
            return index
        if node.who == who and width_of(node):
            return index
    return None


def _legend(drawing: Drawing, plan: Plan, y: float) -> None:
    drawn = [p.name for p in plan.pipelines if p.name in STROKES]
    for index, name in enumerate(drawn):
        x, line = LEFT + index % 4 * 212, y + index // 4 * 24
        drawing.line((x, line - 5), (x + 28, line - 5), STROKES[name])
        drawing.text(x + 34, line, name)
    wide = "solid: full; dashed: empty; hatched: waits"
    if plan.compute_barriers_per_tile:
        wide += "; red: all compute warps wait for the last one"
    drawing.text(LEFT, y + 50, wide, ink=MUTED)
