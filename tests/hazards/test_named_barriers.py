"""Named barriers: counts, and ids that two groups share."""

from __future__ import annotations

from tests.hazards.kernels import LANE_WORD, assert_twins, own_word, role, watch

EXCHANGE = """
    st.shared.u32 [%r60], %thread;
    bar.sync {barrier}, 64;
    xor.b32 %r59, %thread, 32;
    mov.u32 %r58, data;
    mad.lo.u32 %r58, %r59, 4, %r58;
    ld.shared.u32 %r57, [%r58];
"""


def groups(barrier: str) -> str:
    """Warps 0-1 and warps 2-3 exchange words, each group by a barrier of 64 threads; %r50 is the group."""
    return own_word() + "    shr.u32 %r50, %warp, 1;\n    add.u32 %r51, %r50, 3;\n" + EXCHANGE.format(barrier=barrier)


def test_an_id_for_two_groups():
    """T20: rounds of one group may be completed by the other."""
    good, bad = watch(groups("%r51"), warps=4), watch(groups("3"), warps=4)
    assert good.rules == set(), good.text
    assert "named-barrier-shared" in bad.always, bad.text
    assert bad.rules <= {"named-barrier-shared", "race", "uninitialised-read", "deadlock"}


def test_two_groups_may_use_an_id_one_after_the_other():
    turns = role(0, "    bar.sync 3, 64;\n") + role(1, "    bar.sync 3, 64;\n") + "    bar.sync 0;\n"
    turns += role(2, "    bar.sync 3, 64;\n") + role(3, "    bar.sync 3, 64;\n")
    assert watch(turns, warps=4).rules == set()


def test_counts_that_differ_within_a_round():
    def body(count: int) -> str:
        return role(0, "    bar.sync 3, 64;\n") + role(1, f"    bar.sync 3, {count};\n")

    found = assert_twins(body(64), body(96), "named-barrier-count")
    assert "barrier 3" in found.text


def pair(wait_for: str) -> str:
    """Warp 0 stores and arrives without waiting, warp 1 waits and reads."""
    read = role(1, wait_for + LANE_WORD + "    ld.shared.u32 %r57, [%r60];\n")
    return role(0, own_word() + "    st.shared.u32 [%r60], %thread;\n    bar.arrive 3, 64;\n") + read


def test_an_arrival_without_waiting_orders_what_was_before_it():
    assert watch(pair("    bar.sync 3, 64;\n")).rules == set()
    late = pair("    bar.sync 3, 64;\n").replace(
        "    st.shared.u32 [%r60], %thread;\n    bar.arrive 3, 64;\n",
        "    bar.arrive 3, 64;\n    st.shared.u32 [%r60], %thread;\n",
    )
    found = watch(late)
    assert found.always <= {"race"} and "race" in found.rules and found.rules <= {"race", "uninitialised-read"}


def test_an_arrival_that_nobody_waits_for_is_told_of():
    """Advice: the ISA does not say what becomes of it when the CTA ends."""
    arrived = role(0, "    bar.arrive 3, 64;\n")
    left, matched = watch(arrived), watch(arrived + role(1, "    bar.sync 3, 64;\n"))
    assert left.rules == set() and left.advice == {"named-barrier-leftover"}
    assert "named barrier 3" in left.text and "32 of 64 threads have arrived, of warps 0" in left.text
    assert matched.text == ""
