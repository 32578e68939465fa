"""Global-memory layouts that several kernels share and that are not those of a torch tensor.

Standard library only: kernels, host code and tests read the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from undertow.kernels.sm100.plan import HEAD_DIM, TILE_M, dq_accumulator_index

DQ_ACCUMULATOR_TILE = TILE_M * HEAD_DIM


@dataclass(frozen=True)
class RowLayout:
    """How a main kernel wants what the kernels over query rows write and read, as shapes and strides within a tile.

    dq_shape, dq_strides: the dQ accumulator in fp32 elements over (row, column). scalar_shape, scalar_strides: LSE and
    D over the rows. negates_d: whether D has the opposite sign. name: of the layout, part of the kernels' names.
    """

    name: str
    dq_shape: Any
    dq_strides: Any
    scalar_shape: Any
    scalar_strides: Any
    negates_d: bool = False


# The affine form of `dq_accumulator_index`, which says where a single element lies; columns are (% 4, // 4).
SM100_ROWS = RowLayout(
    name="sm100",
    dq_shape=(TILE_M, (4, HEAD_DIM // 4)),
    dq_strides=(dq_accumulator_index(1, 0), (dq_accumulator_index(0, 1), dq_accumulator_index(0, 4))),
    scalar_shape=TILE_M,
    scalar_strides=1,
)

ROW_KERNEL_THREADS = 256  # of the kernels before and after the main one: 8 lanes a row, 16 rows a warp


def num_tiles(seqlen: int, tile: int) -> int:
    """Return how many tiles of `tile` rows cover `seqlen` rows."""
    return -(-seqlen // tile)


def padded_rows(seqlen: int) -> int:
    """Return the rows of the query workspaces: whole tiles, so that no kernel needs a row test to touch them."""
    return num_tiles(seqlen, TILE_M) * TILE_M
