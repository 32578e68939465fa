"""Rules of mbarriers: arrivals, bytes, phases that nobody sees, lives of a barrier word."""

from __future__ import annotations

import pytest

from tests.hazards.kernels import (
    LANE_WORD,
    assert_twins,
    bulk_load,
    elected,
    expect,
    init,
    loop,
    one_lane,
    role,
    signal,
    wait,
    watch,
)

FENCED = "fence.mbarrier_init.release.cluster;"


def two_copies(announced: int) -> str:
    fill = elected(expect(0, announced) + bulk_load(0, 256, 0) + bulk_load(256, 256, 0))
    return init(1) + role(0, fill) + role(1, wait(0, 0) + LANE_WORD + "    ld.shared.f32 %f0, [%r60+256];\n")


def test_two_copies_may_share_one_announcement_of_the_sum():
    """T02."""
    assert watch(two_copies(512)).rules == set()


def test_bytes_that_never_come_and_bytes_that_nobody_expects():
    """T02: the sum is wrong by 16 bytes."""
    too_many = watch(two_copies(528))
    assert too_many.always == too_many.rules == {"mbarrier-bytes", "deadlock"}, too_many.text
    assert "16 expected bytes never came" in too_many.text
    too_few = watch(two_copies(496))
    assert too_few.always == {"mbarrier-bytes", "deadlock"} and "16 bytes more came than were expected" in too_few.text


def test_a_copy_that_lands_in_a_later_phase():
    """Only one of two equal copies is announced: the phase ends without the other."""
    found = watch(two_copies(256), settings=(("fixed", "eager"), ("fixed", "late")))
    assert "mbarrier-bytes" in found.always and found.rules <= {"mbarrier-bytes", "race", "uninitialised-read"}, (
        found.text
    )


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_an_arrival_count_outside_its_range(count):
    """T31."""
    assert watch(init(count)).always == {"mbarrier-count"}


def test_more_arrivals_than_the_phase_expects():
    twice = "    mbarrier.arrive.shared.b64 %rd15, [bars], 2;\n"
    assert_twins(
        init(2) + role(0, elected(twice)) + role(1, wait(0, 0)),
        init(1) + role(0, elected(twice)),
        "mbarrier-over-arrival",
    )


def hand_over(producer_waits: bool, consumer_waits_every_round: bool) -> str:
    """Warp 0 signals four times; warp 1 waits every round, or every other one."""
    produce = "    and.b32 %r61, %r62, 1;\n    xor.b32 %r61, %r61, 1;\n"
    produce += (wait(1, "%r61") if producer_waits else "") + signal(0)
    consume = "    and.b32 %r61, %r62, 1;\n"
    if consumer_waits_every_round:
        consume += wait(0, "%r61")
    else:
        consume += f"    setp.ne.u32 %p1, %r61, 0;\n    @!%p1 bra $PASS;\n{wait(0, '%r61')}$PASS:\n"
    return init(1, 1) + role(0, loop(4, produce)) + role(1, loop(4, consume + signal(1)))


def test_a_phase_that_ends_unseen():
    assert watch(hand_over(True, True)).rules == set()
    found = watch(hand_over(True, False), settings=(("fixed", "eager"),))
    assert "mbarrier-unobserved-phase" in found.rules, found.text


def test_two_completions_where_the_waiters_expect_one():
    """The count is that of one group, and two groups arrive."""

    def body(count: int) -> str:
        groups = role(0, signal(0)) + role(1, signal(0))
        return init(count) + groups + "    bar.sync 0;\n" + role(2, wait(0, 0))

    good = watch(body(2), warps=3)
    assert good.rules == set(), good.text
    found = watch(body(1), warps=3)
    assert "mbarrier-doubled-phase" in found.always, found.text
    assert found.rules <= {"mbarrier-doubled-phase", "deadlock"}, found.text


def test_waiting_again_for_a_barrier_that_ends_once_is_no_miss():
    assert watch(init(1) + role(0, signal(0)) + role(1, loop(3, wait(0, 0)))).rules == set()


def test_a_parity_that_is_not_a_parity():
    """T36: the phase counter is not reduced modulo 2; bit 0 is used."""
    found = watch(init(1) + role(0, signal(0)) + role(1, wait(0, 2)))
    assert found.always == {"mbarrier-parity-range"}


def second_life(before: str, after: str, invalidate: str = "    mbarrier.inval.shared.b64 [bars];\n") -> str:
    renew = role(0, one_lane(invalidate + f"    mbarrier.init.shared.b64 [bars], 2;\n    {FENCED}\n"))

    def use() -> str:
        return role(0, signal(0)) + role(1, signal(0)) + wait(0, 0)

    return init(2) + use() + before + renew + after + use()


def test_the_second_life_of_a_barrier():
    barrier = "    bar.sync 0;\n"
    assert_twins(second_life(barrier, barrier), second_life(barrier, barrier, invalidate=""), "mbarrier-reinitialised")
    early = watch(second_life("", barrier))
    assert "mbarrier-reinitialised" in early.always, early.text
    late = watch(second_life(barrier, ""), settings=(("fixed", "eager"),))
    assert late.rules and late.rules <= {"race", "mbarrier-reinitialised", "deadlock"}, late.text


def test_a_phase_that_is_under_way_when_the_cta_ends():
    assert_twins(init(1) + role(0, signal(0)), init(2) + role(0, signal(0)), "mbarrier-leftover")


def test_use_before_init_is_ordered():
    unordered = role(0, one_lane(f"    mbarrier.init.shared.b64 [bars], 1;\n    {FENCED}\n")) + role(1, signal(0))
    assert watch(unordered).always == {"race"}
    assert watch(init(1) + role(1, signal(0))).rules == set()
