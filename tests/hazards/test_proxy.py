"""`missing-proxy-fence`: engines see ordinary stores only through a proxy fence of the threads that stored."""

from __future__ import annotations

from tests.hazards.kernels import (
    LANE_WORD,
    assert_twins,
    bulk_load,
    elected,
    expect,
    init,
    own_word,
    role,
    signal,
    wait,
    watch,
)

FENCE = "    fence.proxy.async.shared::cta;\n"
STORE = own_word() + "    st.shared.u32 [%r60], %thread;\n"
BULK_STORE = role(
    0,
    elected(
        "    cp.async.bulk.global.shared::cta.bulk_group [%y], [data], 256;\n"
        "    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group 0;\n"
    ),
)


def test_a_bulk_store_needs_the_fence_of_every_writer():
    """T09."""
    good = STORE + FENCE + "    bar.sync 0;\n" + BULK_STORE
    found = assert_twins(good, STORE + "    bar.sync 0;\n" + BULK_STORE, "missing-proxy-fence")
    assert "fence.proxy.async" in found.checks[0].errors[0].missing
    assert_twins(good, STORE + role(0, FENCE) + "    bar.sync 0;\n" + BULK_STORE, "missing-proxy-fence")


def test_a_fence_of_the_issuing_thread_behind_the_barrier_counts_in_lenient_mode_only():
    """The ISA wants the fence somewhere on the causality path; strict mode wants it from the thread that wrote."""
    late = STORE + "    bar.sync 0;\n" + FENCE + "    bar.warp.sync -1;\n" + BULK_STORE
    assert watch(late).rules == set()
    assert watch(late, strict=True).rules == {"missing-proxy-fence"}


def test_the_fence_is_missing_on_one_path_only():
    """T09: the path of an empty sequence stores zeros and forgets the fence."""
    fence_unless = "    setp.eq.u32 %p1, %thread, 40;\n    @!%p1 fence.proxy.async.shared::cta;\n"
    assert_twins(
        STORE + FENCE + "    bar.sync 0;\n" + BULK_STORE,
        STORE + fence_unless + "    bar.sync 0;\n" + BULK_STORE,
        "missing-proxy-fence",
    )


def test_an_mbarrier_that_an_engine_signals_needs_its_init_fenced():
    """T09."""
    copy = role(0, elected(expect(0, 128) + bulk_load(0, 128, 0))) + wait(0, 0)
    assert_twins(init(1) + copy, init(1, fence="") + copy, "missing-proxy-fence")
    assert watch(init(1, fence="fence.proxy.async;") + copy).rules == set()


def reload(fence: str) -> str:
    """Warp 1 loads a buffer; when it has arrived, warp 0 copies into it."""
    fill = role(0, elected(expect(0, 128) + bulk_load(0, 128, 0)))
    use = role(1, wait(0, 0) + LANE_WORD + "    ld.shared.f32 %f0, [%r60];\n" + fence + signal(1) + wait(0, 1))
    again = role(0, wait(1, 0) + elected(expect(0, 128) + bulk_load(0, 128, 0)))
    return init(1, 1) + fill + use + again


def test_a_copy_over_what_was_only_read_needs_a_fence_in_strict_mode():
    """T11. Policy: T01 has the same write after read in every ring, so lenient mode leaves it to the arrival."""
    assert watch(reload("")).rules == set()
    assert watch(reload(FENCE), strict=True).rules == set()
    assert watch(reload(""), strict=True).always == {"missing-proxy-fence"}


def test_without_any_order_it_is_a_race_and_not_a_missing_fence():
    unordered = STORE + FENCE + BULK_STORE
    assert watch(unordered).rules <= {"race", "uninitialised-read"} and "race" in watch(unordered).rules


def test_a_copy_from_global_memory_that_the_kernel_has_stored():
    store = "    mul.wide.u32 %rd1, %thread, 4;\n    add.u64 %rd1, %rd1, %x;\n    st.global.u32 [%rd1], %thread;\n"
    copy = role(0, elected(expect(0, 128) + bulk_load(0, 128, 0))) + wait(0, 0)
    fence = "    fence.proxy.async;\n"
    assert_twins(store + fence + init(1) + copy, store + init(1) + copy, "missing-proxy-fence")


def test_an_element_wise_copy_that_an_engine_reads():
    """cp.async writes through the generic proxy."""
    copy = own_word() + "    mul.wide.u32 %rd1, %thread, 4;\n    add.u64 %rd1, %rd1, %x;\n"
    copy += "    cp.async.ca.shared.global [%r60], [%rd1], 4;\n    cp.async.wait_all;\n"
    assert_twins(
        copy + FENCE + "    bar.sync 0;\n" + BULK_STORE, copy + "    bar.sync 0;\n" + BULK_STORE, "missing-proxy-fence"
    )
