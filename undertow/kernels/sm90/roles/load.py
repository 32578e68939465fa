"""The load warp: brings every tile from global to shared memory.

Waits for empty slots, signals full ones by the bytes that arrive. The row terms travel with Q, K with the first Q tile
and V with the first dO tile. Rows beyond a sequence's end are filled with zeros by TMA, also where another sequence
follows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from undertow.kernels.sm90.context import LoadContext
from undertow.kernels.sm100.bind import rows_layout
from undertow.plan.steps import Copy, Wait


@cute.jit
def load(c: LoadContext):
    """Copy the query tiles of all trips in order, and the keys and values with the first."""
    if c.work.trips > 0:
        head, tile = Int32(0), c.work.first_tile
        _load_trip(c, 0, (head, tile))
        for trip in cutlass.range(1, c.work.trips, unroll=1):
            head, tile = c.work.after(head, tile)
            _load_trip(c, trip, (head, tile))


def _load_trip(c: LoadContext, trip: int | Int32, query: tuple[Int32, Int32]) -> None:
    """Copy one query tile, `query` being its head and tile."""
    first = isinstance(trip, int)
    expected = {}
    for step in c.plan.program("load"):
        if isinstance(step, Wait):
            c.channels[step.pipeline].wait(step.side, trip + step.tile)
        elif isinstance(step, Copy):
            channel = c.channels[step.pipeline]
            is_new = step.pipeline not in expected
            barrier = expected[step.pipeline] = channel.expect(trip, first) if is_new else expected[step.pipeline]
            target = c.smem.pointer(step.region, channel.slot(trip))
            _copy(c, step.region, target, (c.work.query_head(query[0]), query[1]), barrier)
            for region in channel.pipeline.first_also if first and is_new else ():
                _copy(c, region, c.smem.pointer(region), (c.work.kv_head, c.work.kv_tile), barrier)


def _copy(c: LoadContext, region: str, target: cute.Pointer, place: tuple[Int32, Int32], barrier: cute.Pointer) -> None:
    """Start the copy of a tile of rows, or of its row terms, that completes `barrier`. place: head and tile."""
    maps = {"sQ": c.maps.q, "sK": c.maps.k, "sV": c.maps.v, "sdO": c.maps.do}
    if region in maps:
        _copy_rows(c, maps[region], (region, target), place, barrier)
    else:
        _copy_row_terms(c, (region, target), place, barrier)


def _copy_rows(c: LoadContext, tensor_map: cute.CopyAtom, to: tuple, place: tuple, barrier: cute.Pointer) -> None:
    """One TMA box: all rows of a tile of one head."""
    (region, pointer), (head, tile) = to, place
    rows, columns = c.plan.smem_region(region).rows, c.plan.smem_region(region).columns
    sequence = c.work.k if region in ("sK", "sV") else c.work.q
    origin = (0, tile * rows, head, c.work.batch)
    if c.plan.attention.packed:  # the box ends with the sequence: see `sm100.kernel.packed_view`
        origin = (0, sequence.total - sequence.used + tile * rows, sequence.first + sequence.used, head)
    box = cute.domain_offset(origin, cute.make_identity_tensor((columns, rows, 1, 1)))
    layout = rows_layout(c.plan, region)
    target = cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)
    shared, coordinates = cpasync.tma_partition(
        tensor_map, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(box, 0, 4)
    )
    cute.copy(tensor_map, coordinates, shared, tma_bar_ptr=barrier)


def _copy_row_terms(c: LoadContext, to: tuple, place: tuple, barrier: cute.Pointer) -> None:
    """One bulk copy of the terms of all rows of a query tile, by one elected lane."""
    (region, pointer), (head, tile) = to, place
    of = c.plan.smem_region(region)
    layout = cute.make_layout(of.rows * of.columns)
    part = cute.make_tensor(c.mTerms[c.work.batch, head, Int64(c.work.workspace_tile + tile), None].iterator, layout)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), part.element_type)
    with cute.arch.elect_one():
        cute.copy(atom, part, cute.make_tensor(pointer, layout), mbar_ptr=barrier)
