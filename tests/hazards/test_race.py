"""`race`: two accesses of shared memory that nothing orders, by warps and by engines."""

from __future__ import annotations

import pytest

from tests.hazards.kernels import (
    LANE_WORD,
    arrive,
    assert_twins,
    bulk_load,
    elected,
    expect,
    init,
    loop,
    own_word,
    role,
    signal,
    wait,
    watch,
)

RUNS_AHEAD = ("mbarrier-unobserved-phase", "mbarrier-doubled-phase", "mbarrier-over-arrival", "deadlock")
"""What a producer that does not wait may do to its barrier, besides overwriting what is being read."""
STORE = own_word() + "    st.shared.u32 [%r60], %thread;\n"
READ_NEIGHBOUR = """
    xor.b32 %r59, %thread, 32;
    mov.u32 %r58, data;
    mad.lo.u32 %r58, %r59, 4, %r58;
    ld.shared.u32 %r57, [%r58];
"""


def test_a_store_and_a_load_of_another_warp_need_a_barrier():
    found = assert_twins(STORE + "    bar.sync 0;\n" + READ_NEIGHBOUR, STORE + READ_NEIGHBOUR, "race")
    (finding,) = found.checks[0].errors
    first, second = finding.accesses
    assert {first.verb, second.verb} == {"reads", "writes"}
    assert {first.warp, second.warp} == {0, 1}
    assert all(access.line and access.buffer.startswith("data+") for access in finding.accesses)
    assert finding.missing


def test_two_warps_that_store_the_same_word_in_one_instruction_race():
    store = LANE_WORD + "    st.shared.u32 [%r60], %thread;\n"
    assert watch(store).always == {"race"}
    assert watch(store, warps=1).rules == set()


def ring(form: str, wait_for_empty: bool, rounds: int = 4) -> str:
    """Warp 0 fills two stages by bulk copies, warp 1 reads them: the pattern that vendor tools misjudge."""

    def producer() -> str:
        fill = expect(0, 256) + bulk_load(0, 256, 0) + expect(1, 256) + bulk_load(256, 256, 1)
        waits = wait(2, "%r61") + wait(3, "%r61") if wait_for_empty else ""
        return "    and.b32 %r61, %r62, 1;\n    xor.b32 %r61, %r61, 1;\n" + waits + elected(fill)

    def consumer() -> str:
        loads = "    ld.shared.f32 %f0, [%r60];\n    ld.shared.f32 %f1, [%r60+256];\n"
        return "    and.b32 %r61, %r62, 1;\n" + wait(0, "%r61") + wait(1, "%r61") + loads + signal(2) + signal(3)

    def all_rounds(one) -> str:
        if form == "rolled":
            return loop(rounds, one())
        return "".join(f"    mov.b32 %r62, {k};\n{one()}" for k in range(rounds))

    return LANE_WORD + init(1, 1, 1, 1) + role(0, all_rounds(producer)) + role(1, all_rounds(consumer))


@pytest.mark.parametrize("form", ["rolled", "unrolled"])
def test_a_bulk_copy_ring_is_silent_and_a_write_after_read_without_the_empty_wait(form):
    """T01."""
    assert watch(ring(form, True)).rules == set()
    found = watch(ring(form, False))
    assert "race" in found.rules and found.rules <= {"race", *RUNS_AHEAD}, found.text


def flipping(parity: str) -> str:
    """One barrier that flips every round: warp 0 stores and signals, warp 1 waits, reads and hands back."""
    address = LANE_WORD
    produce = "    and.b32 %r61, %r62, 1;\n    xor.b32 %r61, %r61, 1;\n" + wait(1, "%r61")
    produce += "    st.shared.u32 [%r60], %r62;\n" + signal(0)
    consume = parity + wait(0, "%r61") + "    ld.shared.u32 %r57, [%r60];\n" + signal(1)
    return address + init(1, 1) + role(0, loop(4, produce)) + role(1, loop(4, consume))


def test_waiting_for_a_phase_that_is_long_over_orders_nothing_new():
    """T05: the ring formula of three stages, used on a single barrier."""
    assert watch(flipping("    and.b32 %r61, %r62, 1;\n")).rules == set()
    found = watch(flipping("    div.u32 %r61, %r62, 3;\n    and.b32 %r61, %r61, 1;\n"))
    assert {"race", "mbarrier-missed-phase"} <= found.rules, found.text


def test_a_bulk_fill_is_a_store():
    """T08."""
    fill = role(0, elected("    mov.u32 %r60, data;\n    st.bulk.weak.shared::cta [%r60], 256, 0;\n"))
    read = role(1, LANE_WORD + "    ld.shared.u32 %r57, [%r60];\n")
    assert_twins(fill + "    bar.sync 0;\n" + read, fill + read, "race")


def test_two_buffers_over_each_other_while_both_live():
    """T18: staging written over a buffer that another warp still uses."""
    place = "    mov.u32 %r60, data;\n    mad.lo.u32 %r60, %lane, 8, %r60;\n"
    stage = role(0, place + "    st.shared.v2.u32 [%r60], {%thread, %thread};\n")
    use = role(1, STORE + "    ld.shared.u32 %r57, [%r60];\n")
    assert watch(stage.replace("[%r60]", "[%r60+4096]") + use).rules == set()
    assert watch(use + "    bar.sync 0;\n" + stage).rules == set()
    found = watch(stage + use)
    assert found.always == {"race"} == found.rules
    assert "data+0x80" in found.text


def third_party(waits: bool) -> str:
    """Warp 1 reads, warp 0 overwrites by a copy, warp 2 waits for the copy and stores: ordered through both others."""
    address = LANE_WORD
    fill = own_word() + "    st.shared.u32 [%r60], %thread;\n    bar.sync 0;\n"
    reader = role(1, address + "    ld.shared.u32 %r57, [%r60];\n" + signal(0))
    copier = role(0, wait(0, 0) + elected(expect(1, 128) + bulk_load(0, 128, 1)))
    writer = role(2, (wait(1, 0) if waits else "") + address + "    st.shared.u32 [%r60], %thread;\n")
    return init(1, 1) + fill + "    fence.proxy.async;\n    bar.sync 0;\n" + reader + copier + writer


def test_order_goes_through_a_third_party_and_its_copy():
    """T27, in one CTA; `test_cluster` has it with two."""
    good, bad = watch(third_party(True), warps=3), watch(third_party(False), warps=3)
    assert good.rules == set(), good.text
    assert bad.rules == {"race"}, bad.text


def test_a_relaxed_arrival_or_wait_orders_nothing_without_a_fence():
    """T15 for ordinary accesses; the acquire and release forms are the default."""
    read = role(
        1, "{wait}    mov.u32 %r60, data;\n    mad.lo.u32 %r60, %lane, 4, %r60;\n    ld.shared.u32 %r57, [%r60];\n"
    )
    write = role(0, STORE + "    bar.warp.sync -1;\n" + elected("{arrive}"))

    def body(arrival: str = arrive(0), waiting: str = wait(0, 0)) -> str:
        return init(1) + write.replace("{arrive}", arrival) + read.replace("{wait}", waiting)

    relaxed_wait, relaxed_arrive = wait(0, 0, ".relaxed.cta"), arrive(0, ".relaxed.cta")
    assert watch(body()).rules == set()
    assert watch(body(waiting=wait(0, 0, ".acquire.cta"), arrival=arrive(0, ".release.cta"))).rules == set()
    assert watch(body(waiting=relaxed_wait)).always == {"race"}
    assert watch(body(waiting=relaxed_wait + "    fence.acq_rel.cta;\n")).rules == set()
    assert watch(body(arrival=relaxed_arrive)).always == {"race"}
    assert watch(body(arrival="    fence.acq_rel.cta;\n" + relaxed_arrive)).rules == set()


def test_neighbouring_words_and_bytes_do_not_race():
    words = own_word() + "    st.shared.u32 [%r60], %thread;\n"
    halves = "    mov.u32 %r60, data;\n    mad.lo.u32 %r60, %thread, 2, %r60;\n    st.shared.u16 [%r60], %half;\n"
    assert watch(words).rules == set()
    assert watch("    .reg .b16 %half;\n    cvt.u16.u32 %half, %thread;\n" + halves).rules == set()
