"""Settings that every room shares."""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import settings

# Emulated cases have no useful deadline. "proof" draws the same examples every time, so a red run is red again.
settings.register_profile("proof", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "proof"))


def pytest_collection_finish() -> None:
    """Modules and collected tests stay until the end: garbage is looked for among what came later, and less often.

    Tracing a kernel and decoding its PTX make objects by the million, few of them in cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def compiler_stays_as_it_is(request):
    """quack, which flash-attn-4 imports, changes the compiler of its process: tests import it in another one.

    On a GPU our own choice of a forward pass imports flash-attn-4, where it is installed.
    """
    before = "quack" in sys.modules or request.node.get_closest_marker("gpu") is not None
    yield
    assert before or "quack" not in sys.modules, "this test has imported quack; the tests after it would fail"
