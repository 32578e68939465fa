"""`register-pool`: setmaxnreg against what the launch has."""

from __future__ import annotations

from tests.hazards.kernels import assert_twins, watch


def three_groups(given_up: int) -> str:
    """Warpgroup 0 shrinks, warpgroups 1 and 2 grow to 232; 384 threads start with 168 registers each."""
    return (
        "    setp.gt.u32 %p1, %warp, 3;\n    @%p1 bra $MORE;\n"
        f"    setmaxnreg.dec.sync.aligned.u32 {given_up};\n    bra $END;\n"
        "$MORE:\n    setmaxnreg.inc.sync.aligned.u32 232;\n$END:\n"
    )


def test_increases_need_what_decreases_give_back():
    """T23: 168 - 120 = 48 per lane is not 2 (232 - 168) = 128; 168 - 40 = 128 is."""
    found = assert_twins(three_groups(40), three_groups(120), "register-pool", warps=12)
    assert "168 per thread" in found.text


def test_a_warpgroup_changes_its_registers_together():
    alone = "    setp.ne.u32 %p1, %warp, 2;\n    @%p1 bra $END;\n    setmaxnreg.dec.sync.aligned.u32 40;\n$END:\n"
    assert watch(alone, warps=4).always == {"register-pool"}
    assert watch("    setmaxnreg.dec.sync.aligned.u32 40;\n", warps=4).rules == set()


def test_different_requests_within_a_warpgroup_are_advice():
    split = (
        "    setp.gt.u32 %p1, %warp, 1;\n    @%p1 bra $MORE;\n    setmaxnreg.dec.sync.aligned.u32 40;\n    bra $END;\n"
    )
    found = watch(split + "$MORE:\n    setmaxnreg.dec.sync.aligned.u32 24;\n$END:\n", warps=4)
    assert (found.rules, found.advice) == (set(), {"register-pool"})
