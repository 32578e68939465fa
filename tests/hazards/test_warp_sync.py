"""`warp-sync`: lanes of a warp are threads; only bar.warp.sync and barriers order their memory accesses."""

from __future__ import annotations

from tests.hazards.kernels import LANE_WORD, arrive, assert_twins, elected, init, one_lane, own_word, role, wait, watch

STORE = own_word() + "    st.shared.u32 [%r60], %thread;\n"
NEIGHBOUR = """
    xor.b32 %r59, %thread, 1;
    mov.u32 %r58, data;
    mad.lo.u32 %r58, %r59, 4, %r58;
    ld.shared.u32 %r57, [%r58];
"""
SYNC = "    bar.warp.sync -1;\n"


def test_lanes_exchange_through_shared_memory():
    assert_twins(STORE + SYNC + NEIGHBOUR, STORE + NEIGHBOUR, "warp-sync", warps=1)


def test_a_lane_may_do_with_its_own_word_what_it_likes():
    assert watch(STORE + "    ld.shared.u32 %r57, [%r60];\n    st.shared.u32 [%r60], %r57;\n").rules == set()


def test_shuffles_and_votes_order_no_memory():
    """Policy: the CUDA programming guide promises no memory ordering of them, only of __syncwarp."""
    shuffle = "    shfl.sync.idx.b32 %r50, %thread, 0, 31, -1;\n"
    assert watch(STORE + shuffle + NEIGHBOUR, warps=1).always == {"warp-sync"}


def test_an_elected_arrival_speaks_for_the_others_only_after_a_join():
    def body(join: str) -> str:
        sender = role(0, STORE + join + elected(arrive(0)))
        return init(1) + sender + role(1, wait(0, 0) + LANE_WORD + "    ld.shared.u32 %r57, [%r60];\n")

    assert_twins(body(SYNC), body(""), "warp-sync")


def test_which_lane_is_elected_is_open_by_the_letter_of_the_isa():
    """Lane 0 stores; whether the elected lane is another one shows in strict mode."""

    def body(join: str) -> str:
        sender = role(0, one_lane(STORE) + join + elected(arrive(0)))
        return init(1) + sender + role(1, wait(0, 0) + "    ld.shared.u32 %r57, [data];\n")

    assert watch(body("")).rules == set()
    assert_twins(body(SYNC), body(""), "warp-sync", strict=True)


def test_arrivals_of_all_lanes_need_no_join():
    sender = role(0, STORE + arrive(0))
    assert (
        watch(init(32) + sender + role(1, wait(0, 0) + LANE_WORD + "    ld.shared.u32 %r57, [%r60];\n")).rules == set()
    )


def test_what_one_lane_waited_for_the_others_learn_by_a_join():
    def body(join: str) -> str:
        receiver = role(1, elected(wait(0, 0)) + join + LANE_WORD + "    ld.shared.u32 %r57, [%r60];\n")
        return init(1) + role(0, STORE + SYNC + elected(arrive(0))) + receiver

    good, bad = watch(body(SYNC)), watch(body(""))
    assert good.rules == set(), good.text
    assert bad.rules == {"race"}, bad.text


def test_a_join_of_half_a_warp_joins_that_half():
    half = "    setp.lt.u32 %p1, %lane, 16;\n    @!%p1 bra $REST;\n    bar.warp.sync 0xffff;\n{}$REST:\n"
    assert watch(STORE + half.format(NEIGHBOUR), warps=1).rules == set()
    crossed = NEIGHBOUR.replace("%thread, 1", "%thread, 16")
    assert watch(STORE + half.format(crossed), warps=1).always == {"warp-sync"}
