"""tanh of a softcap is as exact as it says, for caps on either side of where a polynomial comes in."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.kernels_sm90 import tangent_kernel
from undertow import emulator
from undertow.emulated import program
from undertow.kernels.compile import CompiledKernel, compile_kernel
from undertow.kernels.sm90.softmax import NARROW
from undertow.plan.description import Launch, Tensor

SIZE = 2**17
LAST = 2.0**-24


@pytest.fixture(scope="module")
def kernel() -> CompiledKernel:
    return compile_kernel("tangents", None, tangent_kernel.build, "sm_90a")


def tanh(kernel: CompiledKernel, x: np.ndarray, softcap: float) -> np.ndarray:
    """By the kernel, of scores of which softmax_scale / softcap makes x."""
    scale, results = np.float32(1 / 3), np.zeros(SIZE, np.float32)
    scores = (x / np.float64(scale)).astype(np.float32)
    vectors = tuple(Tensor(array, dims=(SIZE,)) for array in (scores, results))
    blocks = SIZE // (tangent_kernel.CHUNK * tangent_kernel.THREADS)
    params = (*vectors, float(scale), softcap * math.log2(math.e))
    launch = Launch(kernel=kernel.entry, grid=(blocks, 1, 1), block=(tangent_kernel.THREADS, 1, 1), params=params)
    emulator.launch(program(kernel.ptx, kernel.entry), launch, emulator.Options("auto"))
    x[:] = scores.astype(np.float64) * np.float64(scale)
    return results.astype(np.float64)


@pytest.mark.parametrize("softcap", [0.5 * NARROW, 2 * NARROW])
def test_the_error_is_below_twelve_last_places_of_one(kernel, softcap):
    x = np.linspace(-12, 12, SIZE)
    found = tanh(kernel, x, softcap)
    assert np.abs(found - np.tanh(x)).max() <= 12 * LAST


def test_above_the_narrow_caps_it_is_relative_too(kernel):
    x = np.logspace(-30, 1.2, SIZE) * np.tile([1, -1], SIZE // 2)
    found = tanh(kernel, x, 2 * NARROW)
    assert (np.abs(found - np.tanh(x)) <= 24 * LAST * np.abs(np.tanh(x))).all()


def test_numbers_far_from_zero_give_one_and_nothing_overflows(kernel):
    x = np.tile([1e3, -1e3, 1e30, -1e30, 42.0, -42.0, 1e-30, 0.0], SIZE // 8)
    for softcap in (0.5 * NARROW, 2 * NARROW):
        found = tanh(kernel, x, softcap)
        assert np.abs(found - np.tanh(x)).max() <= 12 * LAST
