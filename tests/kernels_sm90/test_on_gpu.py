"""The emulator held against a GPU: what is proved on one holds on the other."""

from __future__ import annotations

import pytest
import torch

from tools.cross_check import records

pytestmark = pytest.mark.gpu


def test_the_emulator_and_the_gpu_differ_by_roundings_alone():
    """In every element by no more than one P or dS and the sum explain, on the whole by less than either is wrong."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    for record in records("sm90", seeds=1):
        for name, apart in record["apart"].items():
            where = record["case"], name, apart
            assert apart["equal"] > 0.9 and apart["roundings"] <= 1, where
            assert apart["relative"] < record["ideal"][name] / 2, where
