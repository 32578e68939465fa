"""Deadlocks, told as a circle of waits; and errors of the machine, told as findings."""

from __future__ import annotations

from tests.hazards.kernels import assert_twins, init, role, signal, wait, watch


def crossed(first: str, second: str) -> str:
    """Two warps that hand over to each other twice."""
    return (
        init(1, 1)
        + role(0, signal(0) + wait(1, 0))
        + role(1, wait(0, 0) + signal(1))
        + role(0, first)
        + role(1, second)
    )


def test_a_circle_of_two_warps():
    good = crossed(signal(0) + wait(1, 1), wait(0, 1) + signal(1))
    bad = crossed(wait(1, 1) + signal(0), wait(0, 1) + signal(1))
    found = assert_twins(good, bad, "deadlock")
    (finding,) = found.checks[0].errors
    assert "warp 0" in finding.message and "warp 1" in finding.message
    assert "waits for bars+0x8" in finding.message and "waits for bars+0x0" in finding.message
    assert finding.hint


def test_a_wait_that_nobody_answers_is_no_circle():
    found = watch(init(1) + role(1, wait(0, 0)))
    assert found.always == {"deadlock"} and "without a circle" in found.text


def test_findings_before_the_end_are_kept():
    """The race comes first, the deadlock last."""
    body = "    st.shared.u32 [data], %thread;\n" + init(1) + role(1, wait(0, 0))
    check = watch(body, settings=(("fixed", "eager"),)).checks[0]
    assert [finding.rule for finding in check.errors] == ["race", "deadlock"]
    assert check.error is not None and not check.clean
