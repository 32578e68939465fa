"""Clusters: accesses to another CTA's shared memory, and the edges that order them."""

from __future__ import annotations

from tests.hazards.kernels import Outcome, assert_twins, elected, expect, own_word, role, wait, watch

ARRIVE, AWAIT = (
    "    barrier.cluster.arrive.release.aligned;\n", "    barrier.cluster.wait.acquire.aligned;\n"
)  # fmt: skip
SYNC = ARRIVE + AWAIT
RANK = "    mov.u32 %r40, %cluster_ctarank;\n    xor.b32 %r41, %r40, 1;\n    setp.eq.u32 %p8, %r40, 0;\n"
FENCE = "    fence.proxy.async;\n"
INIT_FENCE = "    fence.mbarrier_init.release.cluster;\n"


def twins(good: str, bad: str, rule: str) -> Outcome:
    """`assert_twins` for two CTAs of one cluster, two warps each."""
    return assert_twins(good, bad, rule, grid=2, cluster=2, target="sm_90a")


def outcome_of(body: str) -> Outcome:
    return watch(body, grid=2, cluster=2, target="sm_90a")


def peer(register: str, source: str, rank: str = "%r41") -> str:
    """The address in another CTA of an address of one's own."""
    return f"    mapa.shared::cluster.u32 {register}, {source}, {rank};\n"


def on_rank(rank: int, body: str) -> str:
    """Only this CTA executes the body."""
    label = f"$RANK{rank}x{abs(hash(body))}"
    guard = "@!%p8" if rank == 0 else "@%p8"
    return f"    {guard} bra {label};\n{body}{label}:\n"


STORE = RANK + own_word() + peer("%r42", "%r60") + "    st.shared::cluster.u32 [%r42], %thread;\n"
LOAD = "    ld.shared.u32 %r10, [%r60];\n"
KEPT = "    st.shared.u32 [%r60], 0;\n"


def test_a_store_to_another_cta_needs_the_cluster_barrier():
    """bar.sync joins the threads of one CTA only."""
    begin = own_word() + KEPT + SYNC
    found = twins(begin + STORE + SYNC + LOAD + SYNC, begin + STORE + "    bar.sync 0;\n" + LOAD + SYNC, "race")
    assert "of CTA (" in found.text and "barrier.cluster" in found.checks[0].errors[0].missing


def test_a_load_from_another_cta_must_be_over_before_it_writes_again():
    load = RANK + own_word() + KEPT + SYNC + peer("%r42", "%r60") + "    ld.shared::cluster.u32 %r10, [%r42];\n"
    again = "    st.shared.u32 [%r60], 1;\n"
    twins(load + SYNC + again + SYNC, load + again + SYNC, "race")


def test_an_arrival_without_release_orders_nothing():
    relaxed = "    barrier.cluster.arrive.relaxed.aligned;\n" + AWAIT
    begin = own_word() + KEPT + SYNC
    twins(begin + STORE + SYNC + LOAD + SYNC, begin + STORE + relaxed + LOAD + SYNC, "race")


def test_between_arrival_and_wait_nothing_is_ordered():
    """A split barrier: what is read before the wait is not yet ordered."""
    begin = own_word() + KEPT + SYNC + STORE
    twins(begin + ARRIVE + AWAIT + LOAD + SYNC, begin + ARRIVE + LOAD + AWAIT + SYNC, "race")


def init(count: int, sync: str = SYNC) -> str:
    """Warp 0 of each CTA makes mbarriers 0 and 1; the cluster meets."""
    make = "".join(f"    mbarrier.init.shared.b64 [bars+{8 * i}], {count};\n" for i in range(2))
    return role(0, elected(make + INIT_FENCE)) + sync


def remote_arrive(order: str) -> str:
    """Every thread of rank 1 stores into rank 0 and arrives there."""
    to_zero = "    mov.u32 %r43, 0;\n    mov.u32 %r44, bars;\n" + peer("%r44", "%r44", "%r43")
    return on_rank(
        1, STORE + to_zero + f"    mbarrier.arrive.{order}.cluster.shared::cluster.b64 _, [%r44];\n"
    )  # fmt: skip


def test_an_arrival_at_another_ctas_mbarrier_hands_over():
    begin = RANK + own_word() + KEPT + init(64)
    read = on_rank(0, wait(0, 0) + LOAD)
    twins(begin + remote_arrive("release") + read + SYNC, begin + remote_arrive("relaxed") + read + SYNC, "race")


def test_an_mbarrier_of_another_cta_must_be_known_to_be_initialised():
    """A barrier of the own CTA says nothing of the other one's; the schedule decides whether the machine stops."""
    begin = RANK + own_word() + KEPT
    rest = remote_arrive("release") + on_rank(0, wait(0, 0) + LOAD) + SYNC
    assert outcome_of(begin + init(64) + rest).rules == set()
    assert outcome_of(begin + init(64, "    bar.sync 0;\n") + rest).rules & {"race", "missing-proxy-fence"}


def third_party(waits: str, last: str) -> str:
    """Rank 0 reads a buffer and tells rank 1, which copies to both of them; rank 0 waits for the bytes and reads again.

    waits: by rank 1, before it copies; last: by rank 0, before it reads.
    """
    tell = "    mov.u32 %r43, 1;\n    mov.u32 %r44, bars;\n" + peer("%r44", "%r44", "%r43")
    tell += "    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r44];\n"
    copy = (
        "    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [data], [%x], 256, [bars+8], 3;\n"
    )
    make = "    mbarrier.init.shared.b64 [bars], 64;\n    mbarrier.init.shared.b64 [bars+8], 1;\n"
    begin = RANK + own_word() + KEPT + FENCE + role(0, elected(make + INIT_FENCE)) + SYNC
    first = on_rank(0, role(0, elected(expect(1, 256))) + LOAD + tell + last + LOAD)
    second = on_rank(1, role(0, elected(expect(1, 256))) + waits + role(0, elected(copy)) + wait(1, 0) + LOAD)
    return begin + first + second + SYNC


def test_order_may_go_through_a_copy_of_another_cta():
    """T27: arrival, wait, multicast, its bytes, wait; each twin lacks one wait of that chain."""
    good = third_party(wait(0, 0), wait(1, 0))
    twins(good, third_party("", wait(1, 0)), "race")
    twins(good, third_party(wait(0, 0), ""), "race")


def test_words_of_another_cta_that_synchronise():
    """A release store to another CTA's word and an acquire load there; with relaxed ones the data is unordered."""
    begin = RANK + own_word() + KEPT + role(0, elected("    st.shared.u32 [word], 0;\n")) + SYNC
    to_zero = "    mov.u32 %r43, 0;\n    mov.u32 %r44, word;\n" + peer("%r44", "%r44", "%r43")

    def body(store: str, load: str) -> str:
        write = role(0, STORE + "    bar.warp.sync -1;\n" + to_zero + elected(f"    {store} [%r44], 1;\n"))
        spin = f"$SPIN:\n    {load} %r45, [word];\n    setp.eq.u32 %p7, %r45, 0;\n    @%p7 bra $SPIN;\n"
        return begin + on_rank(1, write) + on_rank(0, role(0, spin + LOAD)) + SYNC

    good = body("st.release.cluster.shared::cluster.u32", "ld.acquire.cluster.shared.u32")
    twins(good, body("st.relaxed.cluster.shared::cluster.u32", "ld.relaxed.cluster.shared.u32"), "race")
