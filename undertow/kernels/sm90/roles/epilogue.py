"""What the compute warps do once for every item, after its last tile: dV and dK leave the registers.

They pass through shared memory, and TMA takes them from there. A warp stages the rows of its own keys, in its part of
the stage of sdS that its next dS goes to: nobody reads that before, and no other warp writes it. The warp itself asks
whether they have been read, before it stores that dS. Tensor cores and warps share the port of shared memory, and a
compute warp has no time to spare, so it matters that it reads nothing back. Only the last rows of a sequence, where a
warp has fewer than 16 of them, are written by the warp: by whole rows of 128 bytes. This role owns the proxy fence
between its stores and the copies.

Those of a part of a group are written as they are, in fp32 and in the order of the registers, to a place of their own;
`combine` adds them up. In that order a warp writes 512 bytes in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from undertow.kernels.sm90.context import EpilogueContext
from undertow.kernels.sm90.instructions import load_words, store_matrices
from undertow.kernels.sm90.plan import HEAD_DIM, WARP_ROWS, WARPGROUP_ROWS, WARPGROUP_THREADS
from undertow.kernels.sm90.softmax import packed_pairs
from undertow.kernels.sm90.work import Share
from undertow.kernels.sm100.arguments import ELEMENT_TYPES
from undertow.kernels.sm100.bind import swizzled_rows
from undertow.kernels.sm100.instructions import opaque, store_vector
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE
from undertow.plan.schema import Plan

ROW_BYTES = 128
VECTORS = 8  # of 16 bytes in a row
ROWS_PER_STEP = 32 // VECTORS


@dataclass(frozen=True)
class Keys:
    """Where the keys of an item are. first: row of the tensor; kept, used: of the rows from there on.

    head, tile: where a group is split, those of the partial sums.
    """

    batch: Int32
    head: Int32
    first: Int32
    kept: Int32
    used: Int32
    tile: Int32 | None


def keys_of(plan: Plan, work: Share) -> Keys:
    """The keys of an item."""
    start = work.kv_tile * plan.tile_n
    rows = (work.k.first + start, work.k.kept - start, work.k.used - start)
    return Keys(work.batch, work.kv_head, *rows, work.key_tile)


@cute.jit
def epilogue(c: EpilogueContext, keys: Keys, of: tuple):
    """Write dV and dK of an item. of: the stage of sdS, and both sums."""
    stage, dv, dk = of
    if cutlass.const_expr(c.plan.attention.split):
        for place, values in enumerate((dv, dk)):
            _write_partial(c, keys, place, [values[index] for index in range(cute.size(values))])
    else:
        _stage_rows(c, stage, (dv, dk))
        first = c.owner * WARPGROUP_ROWS + c.thread // 32 * WARP_ROWS
        if first + WARP_ROWS <= keys.used:
            _copy_rows(c, keys, (stage, first))
        else:
            _write_rows(c, keys, stage)


def wait_until_read(c: EpilogueContext) -> None:
    """Wait until the rows that the warp has staged may be overwritten."""
    if not c.plan.attention.split:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


def wait_until_written(c: EpilogueContext) -> None:
    """Wait until all rows have reached global memory: the CTA may end."""
    if not c.plan.attention.split:
        cute.arch.cp_async_bulk_wait_group(0)


def staged_layout(plan: Plan) -> cute.ComposedLayout:
    """The rows of a warp as they are staged, as (columns, rows): 128 bytes under the swizzle that TMA undoes."""
    return swizzled_rows(plan.dtype, (HEAD_DIM, WARP_ROWS))


def _write_partial(c: EpilogueContext, keys: Keys, place: int, values: list[Float32]) -> None:
    """Write the sums of a part of a group. place: 0 is dV, 1 is dK."""
    tile = c.mPartial[keys.batch, keys.head, Int64(keys.tile), None].iterator + place * DQ_ACCUMULATOR_TILE
    owner, thread = opaque(c.owner), opaque(c.thread)  # no register keeps what is wanted once an item
    address = (tile + owner * (WARPGROUP_ROWS * HEAD_DIM) + thread * 4).toint()
    for group in range(len(values) // 4):
        store_vector("global", address + group * (16 * WARPGROUP_THREADS), values[4 * group : 4 * group + 4])


def _stage_rows(c: EpilogueContext, stage: Int32, of: tuple) -> None:
    """Stage dV, then dK times softmax_scale, each rounded once to 16 bits."""
    dv, dk = of
    for place, (values, scale) in enumerate(((dv, None), (dk, c.softmax_scale))):
        numbers = [values[i] if scale is None else values[i] * scale for i in range(cute.size(values))]
        _stage(c, _buffer(c, stage, place), packed_pairs(numbers, c.plan.dtype))


def _copy_rows(c: EpilogueContext, keys: Keys, at: tuple[Int32, Int32]) -> None:
    """Start to copy all rows of the warp to dV and dK, by one elected lane. at: stage, first of its rows."""
    stage, first = at
    layout = staged_layout(c.plan)
    box = cute.domain_offset(
        (0, keys.first + first, keys.head, keys.batch), cute.make_identity_tensor((HEAD_DIM, WARP_ROWS, 1, 1))
    )
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for place, store in enumerate((c.maps.dv, c.maps.dk)):
            address = _buffer(c, stage, place) + c.thread // 32 * (WARP_ROWS * ROW_BYTES)
            pointer = cute.make_ptr(ELEMENT_TYPES[c.plan.dtype], address, cute.AddressSpace.smem, assumed_align=1024)
            rows = cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)
            shared, coordinates = cpasync.tma_partition(
                store, 0, cute.make_layout(1), cute.group_modes(rows, 0, 2), cute.group_modes(box, 0, 4)
            )
            cute.copy(store, shared, coordinates)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _write_rows(c: EpilogueContext, keys: Keys, stage: Int32):
    """Write those of the staged rows that exist."""
    cute.arch.sync_warp()
    for place, target in enumerate((c.mdV, c.mdK)):
        for step in range(WARP_ROWS // ROWS_PER_STEP):
            row, vector = _at(c, step)
            address = _buffer(c, stage, place) + row * ROW_BYTES + (vector ^ (row % 8)) * 16
            _store(c, keys, target, (row, vector), load_words(address))
    cute.arch.sync_warp()


def _at(c: EpilogueContext, step: int) -> tuple[Int32, Int32]:
    """Row of the warpgroup and vector that a thread writes in a step: 8 threads a row, all rows of its warp."""
    return c.thread // 32 * WARP_ROWS + step * ROWS_PER_STEP + c.thread % 32 // VECTORS, c.thread % VECTORS


def _buffer(c: EpilogueContext, stage: Int32, place: int) -> Int32:
    """The warpgroup's rows of a panel of sdS. place: the panel, 0 or 1."""
    rows = place * 2 + c.owner
    return c.smem.address("sdS", stage) + rows * (WARPGROUP_ROWS * ROW_BYTES)


def _stage(c: EpilogueContext, buffer: Int32, words: list[Int32]) -> None:
    row = c.thread // 32 * WARP_ROWS + c.thread % WARP_ROWS
    swizzle = (c.thread % 32 // 16) ^ (c.thread % 8)
    for step in range(len(words) // 4):
        store_matrices(buffer + row * ROW_BYTES + ((2 * step) ^ swizzle) * 16, words[4 * step : 4 * step + 4])


def _store(c: EpilogueContext, keys: Keys, target: cute.Tensor, at: tuple, words: list[Int32]) -> None:
    """A vector of a row, if the row exists; zeros if the sequence does not use it."""
    row, vector = at
    key = c.owner * WARPGROUP_ROWS + row
    if c.plan.attention.packed:
        words = [Int32(cutlass.select_(key < keys.used, word, Int32(0))) for word in words]
    out = target[keys.batch, keys.first + key, keys.head, None].iterator.toint() + vector * 16
    store_vector("global", out, words, predicate=key < keys.kept)
