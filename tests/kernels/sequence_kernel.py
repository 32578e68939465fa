"""A kernel that asks for each tile of packed rows which sequence it belongs to, one warp a tile."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from undertow.kernels.sm100.arguments import packing_argument
from undertow.kernels.sm100.sequences import Packing, sequence_of

TILE = 128


def build() -> tuple[Any, tuple[Any, ...]]:
    found = make_fake_tensor(cutlass.Int32, (cute.sym_int32(), 2), stride=(2, 1), assumed_align=4)
    return find, (packing_argument(), found)


@cute.jit
def find(packing: Packing, mFound: cute.Tensor):
    find_kernel(packing, mFound).launch(grid=(mFound.shape[0], 1, 1), block=(32, 1, 1))


@cute.kernel
def find_kernel(packing: Packing, mFound: cute.Tensor):
    """mFound: (tiles, 2) i32, the sequence of a tile and the tile's number within it."""
    tile, _, _ = cute.arch.block_idx()
    sequence, within = sequence_of(packing, tile, TILE)
    if cute.arch.lane_idx() == 31:  # every lane has to know
        mFound[tile, 0] = sequence
        mFound[tile, 1] = within
