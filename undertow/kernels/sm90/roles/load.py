"""The load warp: brings every tile from global to shared memory.

Waits for empty slots, signals full ones by the bytes that arrive. The row terms travel with Q, and LSE where it is
wanted apart; K and V come with the first query tile of an item, while the one before is still being worked on: K, for
which there is a stage by then, even before the rest is prefetched. Rows beyond a sequence's end are filled with zeros
by TMA, also where another sequence follows.
"""

from __future__ import annotations

from itertools import takewhile

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from undertow.kernels.sm90.context import LoadContext
from undertow.kernels.sm90.plan import ITEM_PIPELINES
from undertow.kernels.sm90.work import Share
from undertow.kernels.sm100.bind import rows_layout
from undertow.plan.schema import Plan
from undertow.plan.steps import Copy, Wait

FIRST_TILES = 4  # of an item, that are prefetched
# Query tiles that an item still has to copy when the next one is claimed. Who claims earlier holds up others: those
# that take turns after it, and at the end of a launch those that have nothing left to claim.
CLAIM_TRIPS = 2

Steps = tuple[Wait | Copy, ...]


@cute.jit
def load(c: LoadContext):
    """Copy the query tiles of all items in order, and the keys and values with the first of each."""
    trip, number = Int32(0), Int32(0)
    exists = c.items.wait(number)
    while exists > 0:
        work = c.items.work(number)
        claim = cutlass.max(work.trips - CLAIM_TRIPS, 0)
        if claim == 0:
            c.items.release(number)
        head, tile = Int32(0), work.first_tile
        early, steps = _steps(c.plan)
        _load_trip(c, work, (trip, number), (head, tile), early)
        if number > 0:
            _prefetch(c, work)
        _load_trip(c, work, (trip, number), (head, tile), steps)
        for more in cutlass.range(1, work.trips, unroll=1):
            if more == claim:
                c.items.release(number)  # now the next one is claimed
            head, tile = work.after(head, tile)
            _load_trip(c, work, (trip + more, None), (head, tile), steps)
        trip += work.trips
        number += 1
        exists = c.items.wait(number)


@cute.jit
def _prefetch(c: LoadContext, work: Share):
    """Have the first tiles of an item in L2 when there is room for them: nobody may have read them yet."""
    _prefetch_rows(c, work, (c.maps.v, "sV"), (work.key_head, work.kv_tile))
    end = cutlass.min(work.first_tile + FIRST_TILES, work.end_tile)
    for tile in cutlass.range(work.first_tile, end, unroll=1):
        for tensor_map, region in ((c.maps.q, "sQ"), (c.maps.do, "sdO")):
            _prefetch_rows(c, work, (tensor_map, region), (work.query_head(Int32(0)), tile))


def _prefetch_rows(c: LoadContext, work: Share, what: tuple, place: tuple) -> None:
    """Have a TMA box in L2. what: tensor map and region. place: head and tile."""
    _, coordinates = _box(c, work, (*what, c.smem.pointer(what[1])), place)
    cute.prefetch(what[0], coordinates)


def _steps(plan: Plan) -> tuple[Steps, Steps]:
    """The program without what it says of items: what an item's first trip begins with, and the rest."""
    program = (step for step in plan.program("load") if isinstance(step, Wait | Copy))
    steps = [step for step in program if step.pipeline not in ITEM_PIPELINES]
    early = tuple(takewhile(lambda step: plan.pipeline(step.pipeline).per_item, steps))
    return early, tuple(steps[len(early) :])


def _load_trip(
    c: LoadContext, work: Share, at: tuple[Int32, Int32 | None], query: tuple[Int32, Int32], steps: Steps
) -> None:
    """Copy one query tile. at: its number, and that of its item if it is the first of it. query: head and tile."""
    trip, item = at
    expected = {}
    for step in steps:
        number = item if c.plan.pipeline(step.pipeline).per_item else trip
        if number is None:
            continue
        channel = c.channels[step.pipeline]
        if isinstance(step, Wait):
            channel.wait(step.side, number + step.tile)
        elif isinstance(step, Copy):
            if step.pipeline not in expected:
                expected[step.pipeline] = channel.expect(number, False)
            target = c.smem.pointer(step.region, channel.slot(number))
            _copy(c, work, (step.region, target), query, expected[step.pipeline])


def _copy(c: LoadContext, work: Share, to: tuple, query: tuple[Int32, Int32], barrier: cute.Pointer) -> None:
    """Start the copy of a tile of rows, or of numbers of its rows, that completes `barrier`. to: region and address."""
    maps = {"sQ": c.maps.q, "sK": c.maps.k, "sV": c.maps.v, "sdO": c.maps.do}
    place = (work.key_head, work.kv_tile) if to[0] in ("sK", "sV") else (work.query_head(query[0]), query[1])
    if to[0] in maps:
        _copy_rows(c, work, (maps[to[0]], *to), place, barrier)
    else:
        _copy_numbers(c, work, to, place, barrier)


def _copy_rows(c: LoadContext, work: Share, what: tuple, place: tuple, barrier: cute.Pointer) -> None:
    """One TMA box: all rows of a tile of one head. place: head and tile."""
    shared, coordinates = _box(c, work, what, place)
    cute.copy(what[0], coordinates, shared, tma_bar_ptr=barrier)


def _box(c: LoadContext, work: Share, what: tuple, place: tuple) -> tuple[cute.Tensor, cute.Tensor]:
    """Where the box of a tile of rows goes, and its coordinates. what: tensor map, region and address."""
    (tensor_map, region, pointer), (head, tile) = what, place
    rows, columns = c.plan.smem_region(region).rows, c.plan.smem_region(region).columns
    sequence = work.k if region in ("sK", "sV") else work.q
    origin = (0, tile * rows, head, work.batch)
    if c.plan.attention.packed:  # the box ends with the sequence: see `sm100.kernel.packed_view`
        origin = (0, sequence.total - sequence.used + tile * rows, sequence.first + sequence.used, head)
    box = cute.domain_offset(origin, cute.make_identity_tensor((columns, rows, 1, 1)))
    layout = rows_layout(c.plan, region)
    target = cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)
    return cpasync.tma_partition(
        tensor_map, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(box, 0, 4)
    )


def _copy_numbers(c: LoadContext, work: Share, to: tuple, place: tuple, barrier: cute.Pointer) -> None:
    """One bulk copy of the terms of all rows of a query tile, or of their LSE, by one elected lane."""
    (region, pointer), (head, tile) = to, place
    of = c.plan.smem_region(region)
    layout = cute.make_layout(of.rows * of.columns)
    numbers = c.mLSE if region == "sLSE" else c.mTerms
    part = cute.make_tensor(numbers[work.batch, head, Int64(work.workspace_tile + tile), None].iterator, layout)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), part.element_type)
    with cute.arch.elect_one():
        cute.copy(atom, part, cute.make_tensor(pointer, layout), mbar_ptr=barrier)
