"""Which sequence a tile belongs to, for as many sequences as take one round of a warp's search, two, and three."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np
import pytest

from tests.kernels import sequence_kernel
from tests.kernels.sequence_kernel import TILE
from undertow import emulator
from undertow.emulated import program
from undertow.kernels.compile import CompiledKernel, compile_kernel
from undertow.plan.description import Launch, Tensor


@pytest.fixture(scope="module")
def kernel() -> CompiledKernel:
    return compile_kernel("find-sequence", None, sequence_kernel.build)


def found(kernel: CompiledKernel, offsets: list[int]) -> np.ndarray:
    """Sequence and number within it of every tile that there may be, one behind the last included."""
    tiles = offsets[-1] // TILE + len(offsets)
    offsets_array, nothing, results = np.array(offsets, np.int32), np.zeros(0, np.int32), np.zeros((tiles, 2), np.int32)
    params = [Tensor(array, dims=(len(array),)) for array in (offsets_array, nothing, results)]
    launch = Launch(kernel=kernel.entry, grid=(tiles, 1, 1), block=(32, 1, 1), params=tuple(params))
    emulator.launch(program(kernel.ptx, kernel.entry), launch, emulator.Options("auto"))
    return results


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 1000, 1023, 1024, 1025, 1100])
@pytest.mark.parametrize("longest", [0, 1, 400])
def test_every_tile_is_found_in_its_sequence(kernel, count, longest):
    lengths = np.random.default_rng(count).integers(0, longest + 1, count) * (np.arange(count) % 3 > 0)
    offsets = [0, *accumulate(lengths.tolist())]
    firsts = [offset // TILE + sequence for sequence, offset in enumerate(offsets)]
    results = found(kernel, offsets)
    for tile, (sequence, within) in enumerate(results):
        wanted = bisect_right(firsts, tile) - 1
        assert (sequence, within) == (wanted, tile - firsts[wanted]), tile
