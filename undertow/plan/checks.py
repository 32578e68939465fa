"""Prove a plan before it is compiled; every refusal shows the arithmetic.

Capacity: TMEM columns, shared memory, registers. Protocol: every side of every pipeline has somebody who completes it,
stages are powers of two, no circle of waits. Order: two accesses that meet in a cell, one of them a write, are ordered
in every execution, and each read sees its own tile's value.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from undertow.plan.order import Access, Order, uncovered
from undertow.plan.schema import (
    REGISTERS_PER_SM,
    SMEM_BYTES_PER_CTA,
    TMEM_COLUMNS,
    WARP_THREADS,
    WARPGROUP_WARPS,
    Plan,
    PlanError,
)
from undertow.plan.steps import Copy, Signal, Wait
from undertow.plan.warpgroup_order import WarpgroupOrder, actors

ITEMS = {1: 5, 2: 3}  # key/value tiles of a CTA, by the query tiles of each: their slots are reused, too
TILES = 5  # twice the deepest pipeline and one more: every slot is reused, and the loop's first and last trips differ


def check(plan: Plan) -> None:
    """Refuse a plan that cannot work.

    Raises PlanError: names, regions, cells and the missing edge, or the sum that does not fit.
    """
    check_tmem(plan)
    check_smem(plan)
    check_registers(plan)
    check_pipelines(plan)
    check_order(plan)


def check_tmem(plan: Plan) -> None:
    """Every region lies inside the 512 columns and is as wide as its tile."""
    for region in plan.tmem:
        if region.column < 0 or region.end > TMEM_COLUMNS:
            raise PlanError(
                f"{plan.name}: {region.name} needs TMEM columns {region.column} + {region.columns} = {region.end},"
                f" but there are {TMEM_COLUMNS}"
            )
    for op in plan.mmas:
        width = plan.tmem_region(op.d).columns
        if width != op.n:
            raise PlanError(f"{plan.name}: {op.name} writes {op.n} columns into {op.d}, which has {width}")
        for region in plan.tmem:
            packed = op.k * region.dtype.bytes // 4
            if region.name == op.a and region.columns != packed:
                raise PlanError(
                    f"{plan.name}: {op.name} reads {packed} columns of {op.a}"
                    f" ({op.k} elements of {region.dtype.label}), which has {region.columns}"
                )


def check_smem(plan: Plan) -> None:
    """The packed map fits one CTA."""
    if plan.smem_bytes > SMEM_BYTES_PER_CTA:
        parts = " + ".join(f"{region.name} {region.bytes}" for region in plan.smem)
        raise PlanError(
            f"{plan.name}: shared memory is {plan.smem_bytes} bytes (barriers {plan.tmem_pointer_offset + 4} + {parts}"
            f" + alignment), but a CTA has {SMEM_BYTES_PER_CTA}"
        )


def check_registers(plan: Plan) -> None:
    """Roles fill whole warpgroups of one register value, and all of them fit the register file."""
    num_warps = -(-plan.num_warps // WARPGROUP_WARPS) * WARPGROUP_WARPS
    by_warp: dict[int, tuple[str, int]] = {}
    for role in plan.roles:
        for warp in role.warps:
            if warp in by_warp:
                raise PlanError(f"{plan.name}: warp {warp} is in {by_warp[warp][0]} and in {role.name}")
            by_warp[warp] = (role.name, role.registers)
        if role.registers % 8 or not 24 <= role.registers <= 256:
            raise PlanError(f"{plan.name}: {role.name} asks for {role.registers} registers; allowed: 24 to 256 by 8")
    for warp in range(num_warps):
        if warp not in by_warp:
            raise PlanError(
                f"{plan.name}: warp {warp} has no role; setmaxnreg needs all {WARPGROUP_WARPS} warps of a group"
            )
    total = 0
    for first in range(0, num_warps, WARPGROUP_WARPS):
        group = {by_warp[warp] for warp in range(first, first + WARPGROUP_WARPS)}
        values = {registers for _, registers in group}
        if len(values) != 1:
            raise PlanError(
                f"{plan.name}: warps {first} to {first + WARPGROUP_WARPS - 1} ask for different registers"
                f" ({', '.join(f'{n} {r}' for n, r in sorted(group))}); setmaxnreg is one value per warpgroup"
            )
        total += values.pop() * WARPGROUP_WARPS * WARP_THREADS
    if total > REGISTERS_PER_SM:
        parts = " + ".join(f"{r.name} {len(r.warps) * WARP_THREADS} x {r.registers}" for r in plan.roles)
        raise PlanError(f"{plan.name}: registers {parts} = {total}, but an SM has {REGISTERS_PER_SM}")


def check_pipelines(plan: Plan) -> None:
    """Every side that exists is completed by its role's program, and slots can be addressed by masking."""
    for name, steps in plan.programs:
        for step in steps:
            if isinstance(step, Wait | Signal | Copy):
                _check_end(plan, name.partition("[")[0], step)
    for pipeline in plan.pipelines:
        if pipeline.stages < 1 or pipeline.stages & (pipeline.stages - 1):
            raise PlanError(f"{plan.name}: {pipeline.name} has {pipeline.stages} stages; allowed: powers of two")
        for role, side in ((pipeline.producer, "full"), (pipeline.consumer, "empty")):
            if role == "mma" or (side == "empty" and not pipeline.has_empty):
                continue  # the MMA warp's commits are derived from the same data; an absent side needs no arriver
            if not _completes(plan, role, pipeline.name, side):
                raise PlanError(f"{plan.name}: {pipeline.name}.{side} has no arriver: {role} never signals it")


def _check_end(plan: Plan, role: str, step: Wait | Signal | Copy) -> None:
    """A step names a pipeline of the plan, and a role arrives only on its own side of it."""
    if not plan.has_pipeline(step.pipeline):
        raise PlanError(f"{plan.name}: {role} names pipeline {step.pipeline}, which the plan does not have")
    pipeline = plan.pipeline(step.pipeline)
    side = step.side if isinstance(step, Signal) else "full"
    owner = pipeline.producer if side == "full" else pipeline.consumer
    if not isinstance(step, Wait) and role != owner:
        raise PlanError(
            f"{plan.name}: {role} signals {pipeline.name}.{side},"
            f" but its {plan.arrivals(pipeline, side)} arrivals are {owner}'s"
        )


def _completes(plan: Plan, role: str, pipeline: str, side: str) -> bool:
    steps = plan.program(role)
    return any(
        (isinstance(step, Signal) and (step.pipeline, step.side) == (pipeline, side))
        or (isinstance(step, Copy) and side == "full" and step.pipeline == pipeline)
        for step in steps
    )


def check_order(plan: Plan) -> None:
    """No circle of waits, no wait for a phase that nobody completes, no unordered or stale access.

    Where warpgroups meet at named barriers also: rounds that are kept apart, and nothing read that nobody has written.
    """
    for order in _orders(plan):
        if isinstance(order, WarpgroupOrder):
            for message in (*order.rounds(), *order.uncounted()):
                raise PlanError(f"{plan.name}: {message}")
        if order.cyclic:
            raise PlanError(f"{plan.name}: the schedule deadlocks, in a circle: {', then '.join(order.cycle)}")
        for wait, following in order.unsignalled():
            raise PlanError(f"{plan.name}: {wait}, which nobody completes, before it {following}")
        for message in hazards(order):
            raise PlanError(f"{plan.name}: {message}")
        if isinstance(order, WarpgroupOrder):
            for message in order.unwritten():
                raise PlanError(f"{plan.name}: {message}")


def _orders(plan: Plan) -> Iterator[Order]:
    """Few tiles and many; where a CTA has several key/value tiles also those of one and of two query tiles."""
    for tiles in (1, TILES):
        yield WarpgroupOrder(plan, tiles) if actors(plan) else Order(plan, tiles)
    if any(pipeline.per_item for pipeline in plan.pipelines):
        yield from (WarpgroupOrder(plan, items * per_item, per_item) for per_item, items in ITEMS.items())


def hazards(order: Order) -> Iterator[str]:
    """Unordered or wrongly ordered pairs of accesses, each with its columns or bytes."""
    touches = [(index, access) for index, node in enumerate(order.nodes) for access in node.accesses]
    for (i, a), (j, b) in combinations(touches, 2):
        if i == j or a.space != b.space or not (a.writes or b.writes):
            continue
        shared = range(max(a.cells.start, b.cells.start), min(a.cells.stop, b.cells.stop))
        if not shared:
            continue
        first, second = order.nodes[i], order.nodes[j]
        where = f"{a.space} [{shared.start}, {shared.stop})"
        if not order.before(i, j) and not order.before(j, i):
            yield (
                f"{first.who} {_does(a)} and {second.who} {_does(b)} meet in {where} with no ordering edge"
                f" (cells [{a.cells.start}, {a.cells.stop}) and [{b.cells.start}, {b.cells.stop}));"
                f" a guard, a pipeline or other columns are needed"
            )
        elif stale := _stale(order, (i, a), (j, b)):
            yield f"{stale} in {where}"


def _does(access: Access) -> str:
    return f"{'writes' if access.writes else 'reads'} {access.region} of tile {access.tile}"


def _stale(order: Order, one: tuple[int, Access], other: tuple[int, Access]) -> str | None:
    """A read that comes before its own value is written, or after another value took its place."""
    for (reader, read), (writer, write) in ((one, other), (other, one)):
        if read.writes or not write.writes:
            continue
        own = (write.region, write.tile) == (read.region, read.tile)
        if own and not order.before(writer, reader):
            return f"{order.nodes[reader].who} {_does(read)} before {order.nodes[writer].who} writes it"
        if not own and order.before(writer, reader) and not _rewritten(order, (reader, read), (writer, write)):
            return f"{order.nodes[reader].who} {_does(read)} after {order.nodes[writer].who} {_does(write)} over it"
    return None


def _rewritten(order: Order, reader: tuple[int, Access], writer: tuple[int, Access]) -> bool:
    """Whether the reader's own value is written, in the cells that meet, after the other value was."""
    (read_at, read), (written_at, written) = reader, writer
    wanted = range(max(read.cells.start, written.cells.start), min(read.cells.stop, written.cells.stop))
    covers = [
        access.cells
        for index, node in enumerate(order.nodes)
        for access in node.accesses
        if access.writes and (access.space, access.region) == (read.space, read.region) and access.tile <= read.tile
        if order.before(written_at, index) and order.before(index, read_at)
    ]
    return not uncovered(wanted, covers)
