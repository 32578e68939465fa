"""Global-memory layouts that several kernels share and that are not those of a torch tensor.

Standard library only: kernels, host code and tests read the same numbers.
"""

from __future__ import annotations

TILE_ROWS = 128  # query rows of one tile; workspaces are padded to whole tiles, so a tile never needs a row test
HEAD_DIM = 64

# One dQ accumulator tile, as (shape, strides) in fp32 elements over (row, (column % 4, column // 4)). It is the order
# in which the reduce warps hold the tile: a thread owns one row, and 4 columns are one 16-byte vector of it. So all
# 128 rows of 4 columns are contiguous, and each half of 32 columns is one 16 KiB block for a single bulk reduce-add.
DQ_ACCUMULATOR_SHAPE = (TILE_ROWS, (4, HEAD_DIM // 4))
DQ_ACCUMULATOR_STRIDES = (4, (1, 4 * TILE_ROWS))
DQ_ACCUMULATOR_TILE = TILE_ROWS * HEAD_DIM


def dq_accumulator_index(row: int, column: int) -> int:
    """Return the position, in fp32 elements, of dQ[row, column] within its accumulator tile.

    row: 0..127 of the tile. column: 0..63.
    """
    row_stride, (within, between) = DQ_ACCUMULATOR_STRIDES
    return row * row_stride + column % 4 * within + column // 4 * between


def padded_rows(seqlen: int) -> int:
    """Return the smallest number of rows that is at least `seqlen` and whole tiles."""
    return -(-seqlen // TILE_ROWS) * TILE_ROWS
