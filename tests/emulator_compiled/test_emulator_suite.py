"""Every test of the emulator again, each launch on both back ends: same memory, same counts, same errors."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest

from tests.emulator import (
    test_asynchronous,
    test_cluster,
    test_conversions,
    test_launch,
    test_memory,
    test_scalar_tables,
    test_tcgen05,
    test_warps,
    test_wgmma,
)
from tests.emulator_compiled.differential import launch_on_both
from undertow import emulator as emu

RACES = {
    "test_warps_two_warps_with_different_counts_at_one_barrier",  # either warp may be the one that notices
    "test_warps_ctas_wait_for_each_other_through_global_memory",  # how often a CTA polls is a matter of schedule
    "test_cluster_ctas_run_in_turns_whatever_their_order",  # likewise
    "test_cluster_bytes_of_a_pair_land_on_one_mbarrier",  # how many are at the cluster barrier when one begins to wait
}


@pytest.fixture(autouse=True)
def both_back_ends(monkeypatch, request):
    exact = request.node.originalname not in RACES
    monkeypatch.setattr(emu, "launch", partial(launch_on_both, exact=exact))


def collect(module: ModuleType) -> None:
    """Make the tests of another room tests of this one."""
    room = module.__name__.rpartition("test_")[2]
    for name, value in vars(module).items():
        if name.startswith("test_") and name != "test_documented_examples":  # those import `launch` by themselves
            globals()[f"test_{room}_{name.removeprefix('test_')}"] = value


for _module in (
    test_asynchronous,
    test_cluster,
    test_conversions,
    test_launch,
    test_memory,
    test_scalar_tables,
    test_tcgen05,
    test_warps,
    test_wgmma,
):
    collect(_module)
