"""`uninitialised-read`: bytes and columns that nobody has written."""

from __future__ import annotations

import numpy as np

from tests.hazards.kernels import LANE_WORD, assert_twins, elected, kernel, own_word, role, watch
from undertow import emulator as emu
from undertow.emulator.observers import UninitialisedRead

STORE = own_word() + "    st.shared.u32 [%r60], %thread;\n"
BULK_STORE = role(
    0,
    elected(
        "    cp.async.bulk.global.shared::cta.bulk_group [%y], [data], 256;\n"
        "    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group 0;\n"
    ),
)
END = "    fence.proxy.async.shared::cta;\n    bar.sync 0;\n"


def test_a_load_of_a_word_that_nobody_stored():
    load = LANE_WORD + "    ld.shared.u32 %r57, [%r60];\n"
    found = assert_twins(role(0, STORE + load), role(0, load), "uninitialised-read")
    assert "reads data+0x0, which nobody has written" in found.text


def test_a_hole_in_the_source_of_a_bulk_store():
    hole = "    setp.eq.u32 %p1, %thread, 37;\n" + own_word() + "    @!%p1 st.shared.u32 [%r60], %thread;\n"
    found = assert_twins(STORE + END + BULK_STORE, hole + END + BULK_STORE, "uninitialised-read")
    assert f"data+{4 * 37:#x}" in found.text


def test_a_workspace_starts_unwritten_and_other_buffers_do_not():
    load = "    ld.global.u32 %r57, [%y];\n    ld.global.u32 %r58, [%x];\n"
    arrays = [np.zeros(64, np.uint32) for _ in range(3)]
    launch = emu.Launch(grid=(1, 1, 1), block=(32, 1, 1), params=[emu.Pointer(a) for a in arrays])
    for body, expected in ((load, ["uninitialised-read"]), ("    st.global.u32 [%y], 1;\n" + load, [])):
        observers = [UninitialisedRead(workspaces=[arrays[1]])]
        result = emu.launch(kernel(body), launch, observers=observers)
        assert [finding.rule for finding in result.findings] == expected
        assert not expected or "params[1]" in result.findings[0].message


def test_tmem_columns_that_nobody_wrote():
    alloc = role(0, "    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [word], 32;\n")
    address = "    bar.sync 0;\n    ld.shared.b32 %r40, [word];\n"
    address += "    shl.b32 %r41, %warp, 21;\n    add.u32 %r41, %r41, %r40;\n"
    store = (
        "    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r41], {%thread, %thread};\n    tcgen05.wait::st.sync.aligned;\n"
    )
    load = (
        "    tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2, %r3, %r4}, [%r41];\n    tcgen05.wait::ld.sync.aligned;\n"
    )
    free = "    bar.sync 0;\n" + role(0, "    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r40, 32;\n")
    begin = alloc + address
    more = store.replace("[%r41]", "[%r41+2]")
    found = assert_twins(begin + store + more + load + free, begin + store + load + free, "uninitialised-read")
    assert "TMEM column 2" in found.text
    assert watch(begin + free).rules == set()
