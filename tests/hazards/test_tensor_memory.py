"""Tensor memory: loads and stores in flight, allocations, lanes, the order of MMAs."""

from __future__ import annotations

import pytest

from tests.hazards.kernels import LANE_WORD, arrive, assert_twins, elected, init, own_word, role, signal, wait, watch

EAGER = (("fixed", "eager"),)
ALLOC = role(
    0,
    "    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [word], 64;\n"
    "    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n",
)
ADDRESS = "    bar.sync 0;\n    ld.shared.b32 %r40, [word];\n"
LANES = "    and.b32 %r41, %warp, 3;\n    shl.b32 %r41, %r41, 21;\n    add.u32 %r41, %r41, %r40;\n"
SETUP = ALLOC + ADDRESS + LANES
FREE = "    bar.sync 0;\n" + role(0, "    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r40, 64;\n")
STORE = "    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r41], {%thread};\n"
LOAD = "    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r42}, [%r41];\n"
WAIT_ST, WAIT_LD = "    tcgen05.wait::st.sync.aligned;\n", "    tcgen05.wait::ld.sync.aligned;\n"
FILL = STORE + WAIT_ST + "    bar.sync 0;\n"
FILL_ONE = role(1, STORE + WAIT_ST) + "    bar.sync 0;\n"


def handed_over(before: str, after: str) -> str:
    """Warp 1 does `before` and signals; warp 5, which has the same lanes, waits and does `after`."""
    return init(1) + SETUP + FILL_ONE + role(1, before + signal(0)) + role(5, wait(0, 0) + after) + FREE


def test_a_load_is_in_flight_until_its_wait():
    """T12: nobody uses the register, the columns are handed on."""
    store = STORE + WAIT_ST
    found = assert_twins(handed_over(LOAD + WAIT_LD, store), handed_over(LOAD, store), "tmem-load-not-waited", warps=8)
    assert "TMEM column 0" in found.text and "warp 1" in found.text and "warp 5" in found.text


def test_a_wait_behind_the_signal_is_too_late():
    late = (
        init(1) + SETUP + FILL_ONE + role(1, LOAD + signal(0) + WAIT_LD) + role(5, wait(0, 0) + STORE + WAIT_ST) + FREE
    )
    assert watch(late, warps=8).always == {"tmem-load-not-waited"}


def test_a_store_is_in_flight_until_its_wait():
    load = LOAD + WAIT_LD
    assert_twins(handed_over(STORE + WAIT_ST, load), handed_over(STORE, load), "tmem-store-not-waited", warps=8)


def test_no_signal_at_all_is_a_race():
    body = SETUP + FILL_ONE + role(1, LOAD + WAIT_LD) + role(5, STORE + WAIT_ST) + FREE
    assert watch(body, warps=8).always == {"race"}


def test_tmem_freed_while_others_read():
    """T16: the warp that frees waits for its own work only."""
    body = SETUP + FILL + LOAD + WAIT_LD
    early = body + role(0, "    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r40, 64;\n")
    settings = (("fixed", "eager"), ("fixed", "late"))
    assert_twins(body + FREE, early, "tmem-lifetime", warps=4, settings=settings)


def test_tmem_that_is_never_freed():
    assert_twins(SETUP + FREE, SETUP, "tmem-lifetime")


def test_columns_outside_the_allocation():
    outside = SETUP + "    add.u32 %r41, %r41, 64;\n" + STORE + FREE
    found = watch(outside)
    assert found.always == {"tmem-lifetime"} and "columns 64..64" in found.text


def test_lanes_of_another_quarter():
    """T33."""
    found = watch(SETUP + "    mov.b32 %r41, %r40;\n" + STORE + FREE)
    assert found.always == {"tmem-lane"} and "lanes 32 to 63" in found.text


def test_the_address_is_read_after_the_allocation():
    direct = ALLOC + "    ld.shared.b32 %r40, [word];\n" + FREE
    found = watch(direct, settings=EAGER)
    assert found.rules == {"race"}, found.text
    assert watch(ALLOC + ADDRESS + FREE).rules == set()


def test_registers_used_before_the_wait_are_advice_in_strict_mode():
    """T13: no race; the ISA leaves the registers undefined, compilers put packs in between."""
    use = own_word() + "    add.u32 %r42, %r42, 1;\n    st.shared.u32 [%r60], %r42;\n"
    pack = "    mov.b64 %rd3, {%r42, %r42};\n"
    early, late = SETUP + FILL + LOAD + use + WAIT_LD + FREE, SETUP + FILL + LOAD + pack + WAIT_LD + use + FREE
    assert watch(early, warps=4).rules == watch(early, warps=4).advice == set()
    strict = watch(early, warps=4, strict=True)
    assert (strict.rules, strict.advice) == (set(), {"tmem-load-not-waited"}), strict.text
    assert watch(late, warps=4, strict=True).advice == set()


DESCRIPTOR = """
    mov.u32 %r50, data;
    shr.u32 %r50, %r50, 4;
    cvt.u64.u32 %rd5, %r50;
    or.b64 %rd5, %rd5, 0x4000404000010000;
    mov.b32 %r51, 0x8080490;
    setp.ne.u32 %p1, %one, 0;
"""
OPERANDS = role(
    3,
    elected(
        "    mov.u32 %r60, data;\n    st.bulk.weak.shared::cta [%r60], 16384, 0;\n    fence.proxy.async.shared::cta;\n"
    ),
)
FRESH, MORE = "0", "1"


def mma(column: int, keep: str) -> str:
    flag = "!%p1" if keep == FRESH else "%p1"
    negate = "    not.pred %p2, %p1;\n" if flag == "!%p1" else "    mov.pred %p2, %p1;\n"
    return (
        f"{negate}    add.u32 %r52, %r40, {column};\n"
        "    tcgen05.mma.cta_group::1.kind::f16 [%r52], %rd5, %rd5, %r51, %p2;\n"
    )


def commit(barrier: int) -> str:
    return f"    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bars+{8 * barrier}];\n"


def multiply(first: str, second: str = "", end: str = "") -> str:
    """Warp 0 issues `first`, warp 1 `second`; then all are at a barrier before `end`."""
    return (
        init(1, 1) + ALLOC + OPERANDS + ADDRESS + LANES + DESCRIPTOR
        + role(0, elected(first)) + (role(1, elected(second)) if second else "") + end + FREE
    )  # fmt: skip


def test_mmas_of_one_thread_into_one_accumulator_follow_each_other_and_those_of_two_threads_do_not():
    """T28."""
    one = multiply(mma(0, FRESH) + mma(0, MORE) + commit(0), end=wait(0, 0))
    assert watch(one, warps=4).rules == set(), watch(one, warps=4).text
    assert watch(one, warps=4, strict=True).rules == set()
    two = multiply(mma(0, FRESH) + commit(0), mma(0, MORE) + commit(1), end=wait(0, 0) + wait(1, 0))
    found = watch(two, warps=4)
    assert found.always == {"race"} or "race" in found.rules, found.text


def test_mmas_into_different_accumulators_are_ordered_in_lenient_mode_only():
    """The second accumulator lies over the upper half of the first."""
    overlapping = multiply(mma(0, FRESH) + mma(16, FRESH) + commit(0), end=wait(0, 0))
    assert watch(overlapping, warps=4).rules == set(), watch(overlapping, warps=4).text
    assert watch(overlapping, warps=4, strict=True).always == {"race"}


def test_operands_of_an_mma_are_read_until_the_commit_arrives():
    """T07: the producer rewrites A before it has waited."""
    rewrite = LANE_WORD + "    st.shared.u32 [%r60], %thread;\n    fence.proxy.async.shared::cta;\n"
    product = mma(0, FRESH) + commit(0)
    good = multiply(product, end=wait(0, 0) + role(2, rewrite))
    bad = multiply(product, end=role(2, rewrite) + wait(0, 0))
    assert_twins(good, bad, "race", warps=4)


def test_a_result_is_there_when_the_commit_has_arrived():
    product = mma(0, FRESH) + commit(0)
    good = multiply(product, end=wait(0, 0) + LOAD + WAIT_LD)
    bad = multiply(product, end=LOAD + WAIT_LD + wait(0, 0))
    assert watch(good, warps=4).rules == set(), watch(good, warps=4).text
    found = watch(bad, warps=4)
    assert "race" in found.always and found.rules <= {"race", "uninitialised-read"}, found.text


@pytest.mark.parametrize(
    ("form", "fence", "clean"),
    [("", "", True), (".relaxed.cta", "", False), (".relaxed.cta", "    tcgen05.fence::after_thread_sync;\n", True)],
)
def test_a_relaxed_wait_needs_the_tcgen05_fence(form, fence, clean):
    """T15."""
    product = mma(0, FRESH) + commit(0)
    found = watch(multiply(product, end=wait(0, 0, form) + fence + LOAD + WAIT_LD), warps=4)
    assert found.rules == set() if clean else "race" in found.always, found.text


def test_a_commit_with_nothing_before_it_arrives_at_once():
    """T36."""
    assert watch(multiply(commit(0), end=wait(0, 0)), warps=4).rules == set()


def test_an_arrival_in_place_of_the_commit_does_not_wait_for_the_mma():
    found = watch(multiply(mma(0, FRESH) + arrive(0), end=wait(0, 0) + LOAD + WAIT_LD), warps=4, settings=EAGER)
    assert found.rules == {"race", "tmem-lifetime"}, found.text
    assert "warp 0 frees TMEM columns" in found.text and "tcgen05.commit" in found.text
