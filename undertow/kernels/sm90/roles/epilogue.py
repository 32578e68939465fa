"""What the compute warps do once, after their last tile: dV and dK leave the registers.

They pass through shared memory that no GEMM reads any more, so that whole rows of 128 bytes are written at a time.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from undertow.kernels.sm90.bind import sync_of
from undertow.kernels.sm90.context import EpilogueContext
from undertow.kernels.sm90.instructions import load_words, store_matrices
from undertow.kernels.sm90.plan import DS_STAGES, WARPGROUP_ROWS
from undertow.kernels.sm90.softmax import packed_pairs
from undertow.kernels.sm100.instructions import store_vector

ROW_BYTES = 128
VECTORS = 8  # of 16 bytes in a row


@cute.jit
def epilogue(c: EpilogueContext, dv: cute.Tensor, dk: cute.Tensor):
    """Write dV, then dK times softmax_scale, each rounded once to 16 bits."""
    for place, (values, scale) in enumerate(((dv, None), (dk, c.softmax_scale))):
        numbers = [values[i] if scale is None else values[i] * scale for i in range(cute.size(values))]
        _stage(c, place, packed_pairs(numbers, c.plan.dtype))
    sync_of(c.plan, "own", c.owner)
    for place, target in enumerate((c.mdV, c.mdK)):
        _write(c, target, place)


@cute.jit
def write_zeros(c: EpilogueContext):
    """Write the dK and dV of a tile that no query row sees."""
    for target in (c.mdV, c.mdK):
        for step in range(WARPGROUP_ROWS // 16):
            _store(c, target, (step * 16 + c.thread // VECTORS, c.thread % VECTORS), [Int32(0)] * 4)


def _buffer(c: EpilogueContext, place: int) -> Int32:
    """A share of the stage of sdS that the last tile does not use. place: 0 or 1."""
    rows = place * 2 + c.owner
    return c.smem.address("sdS", c.work.trips % DS_STAGES) + rows * (WARPGROUP_ROWS * ROW_BYTES)


def _stage(c: EpilogueContext, place: int, words: list[Int32]) -> None:
    row = c.thread // 32 * 16 + c.thread % 16
    swizzle = (c.thread % 32 // 16) ^ (c.thread % 8)
    for step in range(len(words) // 4):
        address = _buffer(c, place) + row * ROW_BYTES + ((2 * step) ^ swizzle) * 16
        store_matrices(address, words[4 * step : 4 * step + 4])


def _write(c: EpilogueContext, target: cute.Tensor, place: int) -> None:
    """Store rows that exist, 8 threads a row."""
    vector = c.thread % VECTORS
    for step in range(WARPGROUP_ROWS // 16):
        row = step * 16 + c.thread // VECTORS
        address = _buffer(c, place) + row * ROW_BYTES + (vector ^ (row % 8)) * 16
        _store(c, target, (row, vector), load_words(address))


def _store(c: EpilogueContext, target: cute.Tensor, at: tuple, words: list[Int32]) -> None:
    """A vector of a row, if the row exists; zeros if the sequence does not use it."""
    row, vector = at
    key = c.work.kv_tile * c.plan.tile_n + c.owner * WARPGROUP_ROWS + row
    if c.plan.attention.packed:
        words = [Int32(cutlass.select_(key < c.work.k.used, word, Int32(0))) for word in words]
    out = target[c.work.batch, c.work.k.first + key, c.work.kv_head, None].iterator.toint() + vector * 16
    store_vector("global", out, words, predicate=key < c.work.k.kept)
