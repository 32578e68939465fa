"""The load warp: brings every tile from global to shared memory.

Waits for empty slots, signals full ones by the bytes that arrive. K travels with the first Q tile and V with the first
dO tile, on the same barrier. Rows beyond a sequence's end are filled with zeros by TMA.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from undertow.kernels.sm100.bind import multiple, rows_layout
from undertow.kernels.sm100.context import LoadContext
from undertow.plan.steps import Copy, Wait


@cute.jit
def load(c: LoadContext):
    """Copy all query tiles in order."""
    _load_tile(c, 0, first=True)
    for tile in cutlass.range(1, c.cta.query_tiles, unroll=1):
        _load_tile(c, tile, first=False)


def _load_tile(c: LoadContext, tile: int | Int32, first: bool) -> None:
    for step in c.plan.program("load"):
        if isinstance(step, Wait):
            c.channels[step.pipeline].wait(step.side, tile + step.tile)
        elif isinstance(step, Copy):
            channel = c.channels[step.pipeline]
            barrier = channel.expect(tile, first)
            _copy(c, step.region, tile, channel.slot(tile), barrier)
            for region in channel.pipeline.first_also if first else ():
                _copy(c, region, c.cta.kv_tile, 0, barrier)


def _copy(c: LoadContext, region: str, tile: int | Int32, slot: int | Int32, barrier: cute.Pointer) -> None:
    """Start the copy of a tile of rows, or of row statistics, that completes `barrier`."""
    maps = {"sQ": c.maps.q, "sK": c.maps.k, "sV": c.maps.v, "sdO": c.maps.do}
    if region in maps:
        _copy_rows(c, maps[region], region, tile, slot, barrier)
    else:
        _copy_statistics(c, {"sLSE": c.gLSE_log2, "sD": c.gD}[region], region, tile, slot, barrier)


def _copy_rows(c, tensor_map: cute.CopyAtom, region: str, tile: int | Int32, slot, barrier: cute.Pointer) -> None:
    """One TMA box: all rows of a tile of this head and batch."""
    rows = c.plan.smem_region(region).rows
    columns = c.plan.smem_region(region).columns
    origin = (0, tile * rows, c.cta.head, c.cta.batch)
    box = cute.domain_offset(origin, cute.make_identity_tensor((columns, rows, 1, 1)))
    layout = rows_layout(c.plan, region)
    target = cute.make_tensor(cute.recast_ptr(c.smem.pointer(region, slot), layout.inner), layout.outer)
    shared, coordinates = cpasync.tma_partition(
        tensor_map, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(box, 0, 4)
    )
    cute.copy(tensor_map, coordinates, shared, tma_bar_ptr=barrier)


def _copy_statistics(c, source: cute.Tensor, region: str, tile: int | Int32, slot, barrier: cute.Pointer) -> None:
    """One bulk copy of a float per query row, by one elected lane."""
    count = c.plan.smem_region(region).columns
    layout = cute.make_layout(count)
    target = cute.make_tensor(c.smem.pointer(region, slot), layout)
    part = cute.make_tensor(source.iterator + multiple(tile, count), layout)
    with cute.arch.elect_one():
        cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32), part, target, mbar_ptr=barrier)
