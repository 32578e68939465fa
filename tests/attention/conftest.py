"""Places as fixtures; those on a GPU are skipped on a machine without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.attention.places import EMULATOR, GPU, REFERENCE, Place
from undertow.attention import prepared, reset_counts, reset_forward_counts

if TYPE_CHECKING:
    from tests.attention.launches import Launches

torch.set_num_threads(1)  # the matrices are small: threads would only wait for one another, and for other workers
ON_A_GPU = pytest.param(GPU, id="gpu", marks=pytest.mark.gpu)


def _there(request) -> Place:
    place: Place = request.param
    if place.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return place


@pytest.fixture(params=[pytest.param(REFERENCE, id="reference"), pytest.param(EMULATOR, id="emulator"), ON_A_GPU])
def place(request) -> Place:
    """All three."""
    return _there(request)


@pytest.fixture(params=[pytest.param(REFERENCE, id="reference"), ON_A_GPU])
def quick_place(request) -> Place:
    """Those where a call takes no time: what is asked is not whether the kernels are right."""
    return _there(request)


@pytest.fixture(params=[pytest.param(EMULATOR, id="emulator"), ON_A_GPU])
def kernels(request) -> Place:
    """Those where our kernels run."""
    return _there(request)


@pytest.fixture(autouse=True)
def _counted_from_zero():
    prepared.forget()
    reset_counts()
    reset_forward_counts()


@pytest.fixture
def launches(monkeypatch) -> Launches:
    """The kernels for sm100 are taken for able to compute tensors on the CPU."""
    from tests.attention.launches import able  # with the compiler, which few tests need

    return able(monkeypatch)
