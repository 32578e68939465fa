"""Global-memory layouts that several kernels share and that are not those of a torch tensor.

Standard library only: kernels, host code and tests read the same numbers.
"""

from __future__ import annotations

from undertow.kernels.sm100.plan import HEAD_DIM, TILE_M, dq_accumulator_index

# One dQ accumulator tile, as (shape, strides) in fp32 elements over (row, (column % 4, column // 4)): the affine form
# of `dq_accumulator_index`, which says where a single element lies.
DQ_ACCUMULATOR_SHAPE = (TILE_M, (4, HEAD_DIM // 4))
DQ_ACCUMULATOR_STRIDES = (dq_accumulator_index(1, 0), (dq_accumulator_index(0, 1), dq_accumulator_index(0, 4)))
DQ_ACCUMULATOR_TILE = TILE_M * HEAD_DIM

ROW_KERNEL_THREADS = 256  # of the kernels before and after the main one: 8 lanes a row, 16 rows a warp


def num_tiles(seqlen: int, tile: int) -> int:
    """Return how many tiles of `tile` rows cover `seqlen` rows."""
    return -(-seqlen // tile)


def padded_rows(seqlen: int) -> int:
    """Return the rows of the query workspaces: whole tiles, so that no kernel needs a row test to touch them."""
    return num_tiles(seqlen, TILE_M) * TILE_M
