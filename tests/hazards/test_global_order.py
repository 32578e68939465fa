"""`global-order`: global memory between CTAs and engines; and results that must be written exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.hazards.kernels import SETTINGS, assert_twins, elected, kernel, one_lane, own_word, role, watch
from undertow import emulator as emu
from undertow.emulator.observers import Ownership

CTA = "    mov.u32 %r50, %ctaid.x;\n    setp.ne.u32 %p1, %r50, 0;\n"


def spin(form: str) -> str:
    """Wait until the first word of z is 1."""
    return f"""
$SPIN:
    {form}.u32 %r51, [%z];
    setp.eq.u32 %p2, %r51, 0;
    @%p2 bra $SPIN;
"""


def two_ctas(first: str, second: str) -> str:
    """CTA 0 does the first, CTA 1 the second."""
    return CTA + f"    @%p1 bra $SECOND;\n{first}    bra $END;\n$SECOND:\n{second}$END:\n"


STORE = "    mul.wide.u32 %rd1, %thread, 4;\n    add.u64 %rd1, %rd1, %y;\n    st.global.u32 [%rd1], %thread;\n"
LOAD = "    mul.wide.u32 %rd1, %thread, 4;\n    add.u64 %rd1, %rd1, %y;\n    ld.global.u32 %r52, [%rd1];\n"
RELEASE = "    red.release.gpu.global.add.u32 [%z], 1;\n"
ACQUIRE = "ld.acquire.gpu.global"


def flagged(release: str, acquire: str, join: str = "    bar.sync 0;\n") -> str:
    """CTA 0 stores and sets a flag; CTA 1 waits for the flag and reads."""
    first = STORE + join + role(0, one_lane(release))
    second = role(0, one_lane(spin(acquire))) + "    bar.sync 0;\n" + LOAD
    return two_ctas(first, second)


def test_a_flag_between_ctas():
    assert_twins(
        flagged(RELEASE, ACQUIRE), flagged(RELEASE.replace("release", "relaxed"), ACQUIRE), "global-order", grid=2
    )
    assert watch(flagged(RELEASE, "ld.relaxed.gpu.global"), grid=2).always == {"global-order"}
    assert watch(flagged(RELEASE, "ld.volatile.global"), grid=2).always == {"global-order"}


def test_fences_around_relaxed_accesses_do_as_well():
    fence = "    fence.acq_rel.gpu;\n"
    first = STORE + "    bar.sync 0;\n" + role(0, one_lane(fence + RELEASE.replace("release", "relaxed")))
    second = role(0, one_lane(spin("ld.relaxed.gpu.global") + fence)) + "    bar.sync 0;\n" + LOAD
    assert watch(two_ctas(first, second), grid=2).rules == set()


def test_threads_of_the_cta_are_joined_before_the_release():
    assert watch(flagged(RELEASE, ACQUIRE, join=""), grid=2).always == {"global-order"}


REDUCE = """
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%y], [data], 256;
    cp.async.bulk.commit_group;
"""
STAGE = own_word() + "    st.shared.u32 [%r60], 0;\n    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"


def locked(wait_group: str) -> str:
    """CTA 0 adds and releases a lock; CTA 1 acquires it and adds."""
    first = STAGE + role(0, elected(REDUCE + wait_group + RELEASE))
    second = STAGE + role(0, elected(spin(ACQUIRE) + REDUCE + "    cp.async.bulk.wait_group 0;\n"))
    return two_ctas(first, second)


def test_a_lock_around_bulk_reductions():
    """T37: wait_group.read says only that the source has been read."""
    found = assert_twins(
        locked("    cp.async.bulk.wait_group 0;\n"),
        locked("    cp.async.bulk.wait_group.read 0;\n"),
        "global-order",
        grid=2,
    )
    assert "does not cover the end of the first" in found.text


def test_reductions_in_any_order_do_not_race():
    """Dq is summed by CTAs in any order: no finding, and wait_group.read is enough."""
    add = STAGE + role(0, elected(REDUCE + "    cp.async.bulk.wait_group.read 0;\n"))
    assert watch(add, grid=3).rules == set()


def test_a_plain_store_among_reductions_races():
    add = STAGE + role(0, elected(REDUCE + "    cp.async.bulk.wait_group 0;\n"))
    found = watch(two_ctas(add, "    st.global.u32 [%y], %thread;\n"), warps=2, grid=2)
    assert found.always == {"global-order"}, found.text


def test_the_source_of_a_bulk_store_is_overwritten():
    store = "    cp.async.bulk.global.shared::cta.bulk_group [%y], [data], 256;\n    cp.async.bulk.commit_group;\n"
    again = "    bar.sync 0;\n" + own_word() + "    st.shared.u32 [%r60], 1;\n"
    done = role(0, elected("    cp.async.bulk.wait_group.read 0;\n"))
    assert_twins(STAGE + role(0, elected(store)) + done + again, STAGE + role(0, elected(store)) + again + done, "race")


def test_the_cta_ends_while_its_memory_is_read():
    """Where no group was ever committed it is advice: the ISA does not say what the hardware does then."""
    store = "    cp.async.bulk.global.shared::cta.bulk_group [%y], [data], 256;\n"
    commit, end = "    cp.async.bulk.commit_group;\n", "    cp.async.bulk.wait_group.read 0;\n"
    good, bad = (STAGE + role(0, elected(store + commit + rest)) for rest in (end, ""))
    found = assert_twins(good, bad, "global-order")
    assert "the CTA ends while a copy may still read" in found.text
    left = watch(STAGE + role(0, elected(store)))
    assert (left.rules, left.advice) == (set(), {"global-order"})


def test_equal_values_from_two_ctas_are_advice_and_different_ones_a_race():
    assert (watch(STORE, grid=2).rules, watch(STORE, grid=2).advice) == (set(), {"global-order"})
    different = CTA + STORE.replace("%thread;\n", "%r50;\n")
    assert watch(different, grid=2).always == {"global-order"}


@pytest.mark.parametrize(
    ("offset", "rules"), [(0, set()), (4, {"write-exactly-once"})], ids=["in its place", "one word further"]
)
def test_every_element_is_written_once(offset, rules):
    """T38: in bounds, and in the wrong place."""
    body = STORE.replace("[%rd1]", f"[%rd1+{offset}]")
    x, y, z = np.zeros(4, np.float32), np.zeros((8, 8), np.uint32), np.zeros(1, np.uint32)
    padded = np.zeros(128, np.uint32)
    y = padded[:64].reshape(8, 8)
    launch = emu.Launch(grid=(1, 1, 1), block=(64, 1, 1), params=[emu.Pointer(x), emu.Pointer(padded), emu.Pointer(z)])
    for schedule, completion in SETTINGS[:1]:
        options = emu.Options(schedule=schedule, completion=completion)
        result = emu.launch(kernel(body), launch, options, [Ownership({"y": y})])
        assert {finding.rule for finding in result.findings} == rules
        assert not rules or "1 of 64 elements of y never written: (0, 0)" in result.findings[0].message
