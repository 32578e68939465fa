"""The MMA warp's derived program equals the two orders of the article, written out by hand here.

A line is one step. `wait P.full 0` waits for tile t's full phase of pipeline P; `QK 1` issues the GEMM of tile t + 1;
`commit` arrives when everything issued so far is done. Neighbouring commits have no order among themselves: sorted.
"""

from __future__ import annotations

import pytest

from undertow.kernels.sm100.plan import plan
from undertow.plan.schedule import mma_program
from undertow.plan.steps import Issue, Signal, Step, Wait

START_NEXT = """
    wait load_mma_q.full 1
    QK 1
    commit mma_compute_s.full 1
    wait load_mma_do.full 1
    dP 1
    commit mma_compute_dp.full 1
"""

ALIASED_PROLOGUE = (
    START_NEXT
    + """
    wait mma_compute_s.empty 1
    PdO 1
    commit load_mma_do.empty 1
"""
)

# QK needs no wait for S: PdO_t, which read P over S, was issued before it into the same in-order pipe.
ALIASED_BODY = """
    wait load_mma_q.full 1
    QK 1
    commit mma_compute_s.full 1
    wait compute_mma_ds.full 0
    dK 0
    commit load_mma_q.empty 0
    dQ 0
    commit compute_mma_ds.empty 0
    commit mma_reduce_dq.full 0
    wait load_mma_do.full 1
    wait mma_reduce_dq.empty 0
    dP 1
    commit mma_compute_dp.full 1
    wait mma_compute_s.empty 1
    PdO 1
    commit load_mma_do.empty 1
"""

ALIASED_TAIL = """
    commit mma_epilogue_dv.full 0
    wait compute_mma_ds.full 0
    dK 0
    commit mma_epilogue_dk.full 0
    dQ 0
    commit mma_reduce_dq.full 0
"""

SPLIT_BODY = """
    wait load_mma_q.full 1
    wait mma_compute_s.empty 0
    QK 1
    commit mma_compute_s.full 1
    wait compute_mma_p.full 0
    PdO 0
    commit compute_mma_p.empty 0
    commit load_mma_do.empty 0
    wait compute_mma_ds.full 0
    dK 0
    commit load_mma_q.empty 0
    dQ 0
    commit compute_mma_ds.empty 0
    commit mma_reduce_dq.full 0
    wait load_mma_do.full 1
    wait mma_reduce_dq.empty 0
    dP 1
    commit mma_compute_dp.full 1
"""

SPLIT_TAIL = """
    wait compute_mma_p.full 0
    PdO 0
    commit mma_epilogue_dv.full 0
    wait compute_mma_ds.full 0
    dK 0
    commit mma_epilogue_dk.full 0
    dQ 0
    commit mma_reduce_dq.full 0
"""

EXPECTED = {
    "aliased": (ALIASED_PROLOGUE, ALIASED_BODY, ALIASED_TAIL),
    "signals": (ALIASED_PROLOGUE, ALIASED_BODY, ALIASED_TAIL),
    "slots": (START_NEXT, SPLIT_BODY, SPLIT_TAIL),
    "split": (START_NEXT, SPLIT_BODY, SPLIT_TAIL),
}


def lines(steps: tuple[Step, ...]) -> list[str]:
    """Steps in the notation above."""
    out: list[str] = []
    commits: list[str] = []
    for step in steps:
        if isinstance(step, Signal):
            commits.append(f"commit {step.pipeline}.{step.side} {step.tile}")
            continue
        out += sorted(commits)
        commits = []
        if isinstance(step, Wait):
            out.append(f"wait {step.pipeline}.{step.side} {step.tile}")
        elif isinstance(step, Issue):
            out.append(f"{step.mma} {step.tile}")
        else:
            raise AssertionError(f"{step} is no step of an MMA warp")
    return out + sorted(commits)


@pytest.mark.parametrize("schedule", EXPECTED)
@pytest.mark.parametrize("part", ["prologue", "body", "tail"])
def test_derived_program_is_the_published_order(schedule: str, part: str) -> None:
    derived = lines(getattr(mma_program(plan(schedule)), part))
    expected = EXPECTED[schedule][("prologue", "body", "tail").index(part)]
    assert derived == [line.strip() for line in expected.split("\n") if line.strip()]


@pytest.mark.parametrize("schedule", EXPECTED)
def test_every_tile_is_issued_once_by_every_gemm(schedule: str) -> None:
    """Prologue, bodies and tail together issue each GEMM exactly once per tile, whatever the number of tiles."""
    program = mma_program(plan(schedule))
    for tiles in (1, 2, 5):
        issued = [
            (step.mma, trip + step.tile)
            for trip in range(-1, tiles)
            for step in (program.prologue if trip < 0 else program.body if trip < tiles - 1 else program.tail)
            if isinstance(step, Issue)
        ]
        assert sorted(issued) == sorted((op.name, tile) for op in plan(schedule).mmas for tile in range(tiles))
