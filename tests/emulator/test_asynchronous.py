"""mbarriers and bulk copies, their completion modes, and deadlock reports."""

from __future__ import annotations

import numpy as np
import pytest

from undertow import emulator as emu

from .kernels import kernel, run

COMPLETIONS = ["eager", "late", ("seeded", 1), ("seeded", 2)]
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
ONE_THREAD = "setp.ne.u32 %q15, %t, 0; @%q15 bra END;"


def wait(barrier: str, parity: str) -> str:
    """The usual inline assembly: try_wait in a loop."""
    return (
        "{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, ["
        f"{barrier}], {parity}, 10000000; @P1 bra.uni DONE; bra.uni LAB_WAIT; DONE: }}"
    )


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_two_bulk_copies_share_one_expectation(completion):
    """T02: the phase flips once, when both copies are done."""
    text = kernel(
        f"""
        {ONE_THREAD}
        mbarrier.init.shared.b64 [bar], 1;
        mbarrier.arrive.expect_tx.shared.b64 %d0, [bar], 128;
        {BULK} [tile], [%p1], 64, [bar];
        {BULK} [tile+64], [%p1+64], 64, [bar];
        {wait("bar", "0")}
        ld.shared.u32 %r1, [tile+4]; ld.shared.u32 %r2, [tile+124];
        mbarrier.test_wait.parity.shared.b64 %q1, [bar], 1; selp.u32 %r3, 1, 0, %q1;
        st.global.v2.u32 [%p0], {{%r1, %r2}}; st.global.u32 [%p0+8], %r3;
        END:
        """,
        2,
        ".shared .align 8 .b64 bar; .shared .align 128 .b8 tile[128];",
    )
    out = np.zeros(4, np.uint32)
    run(text, out, np.arange(32, dtype=np.uint32), options=emu.Options(completion=completion))
    # parity 1 counts as done while the second phase (index 1) is current only if phase 1 itself is over: it is not
    assert out[:3].tolist() == [1, 31, 0]


def test_a_wrong_byte_count_is_a_reported_hang():
    """T02, second half: the sum is wrong by 16 bytes."""
    text = kernel(
        f"""
        {ONE_THREAD}
        mbarrier.init.shared.b64 [bar], 1;
        mbarrier.arrive.expect_tx.shared.b64 %d0, [bar], 80;
        {BULK} [tile], [%p0], 64, [bar];
        {wait("bar", "0")}
        END:
        """,
        1,
        ".shared .align 8 .b64 bar; .shared .align 128 .b8 tile[128];",
    )
    with pytest.raises(emu.Deadlock) as caught:
        run(text, np.zeros(32, np.uint32))
    (waiting,) = caught.value.report
    assert (waiting.kind, waiting.subject, waiting.lanes) == ("mbarrier", 1024, 1)
    assert "parity 0; now in phase 0, 0 of 1 arrivals pending, 16 bytes missing" in str(caught.value)


class Labels(emu.NumberLabels):
    """Labels as a plan would give them."""

    def role(self, warp: int) -> str:
        return ["load", "mma"][warp]

    def smem(self, offset: int) -> str:
        return {0: "load_mma_q.full[0]", 8: "load_mma_q.empty[0]"}.get(offset, f"+{offset}")

    def barrier_id(self, identifier: int) -> str:
        return "handover"


def test_deadlock_report_speaks_in_roles_and_pipelines():
    text = kernel(
        f"""
        setp.eq.u32 %q1, %t, 0; @!%q1 bra READY;
        mbarrier.init.shared.b64 [bars], 1; mbarrier.init.shared.b64 [bars+8], 1;
        READY: bar.sync 0;
        setp.lt.u32 %q2, %t, 32; @%q2 bra LOAD;
        .loc 1 77 5
        {wait("bars", "0")}
        bra END;
        LOAD: .loc 1 31 5
        bar.sync 3, 64;
        END:
        """,
        module='.extern .shared .align 1024 .b8 bars[];\n.file 1 "roles/mma.py"',
    )
    with pytest.raises(emu.Deadlock) as caught:
        run(text, block=(64,), dynamic_smem=64, kernel="k", labels=Labels())
    load, mma = (str(entry) for entry in caught.value.report)
    assert load.startswith("warp  0 load: waits for named barrier handover (32 of 64 threads arrived); PTX line ")
    assert load.endswith(", roles/mma.py:31")
    assert mma.startswith("warp  1 mma: waits for mbarrier load_mma_q.full[0] (parity 0; now in phase 0, 1 of 1 arriva")
    assert mma.endswith(", roles/mma.py:77")
    assert "deadlock: no warp can run and nothing is in flight" in str(caught.value)


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("schedule", ["fixed", 7, 8])
def test_two_stage_ring_between_two_warps(completion, schedule):
    """A producer warp copies rows, a consumer warp sums them and hands the stages back (T01, T47)."""
    text = kernel(
        f"""
        setp.eq.u32 %q1, %t, 0; @!%q1 bra READY;
        mbarrier.init.shared.b64 [full], 1; mbarrier.init.shared.b64 [full+8], 1;
        mbarrier.init.shared.b64 [empty], 1; mbarrier.init.shared.b64 [empty+8], 1;
        READY: bar.sync 0;
        mov.u32 %r1, 0; mov.u32 %r9, 0; mov.u32 %r20, full; mov.u32 %r21, empty; mov.u32 %r22, tile;
        setp.lt.u32 %q2, %t, 32; @%q2 bra PRODUCE;
        CONSUME:
        and.b32 %r2, %r1, 1; shr.u32 %r3, %r1, 1; and.b32 %r4, %r3, 1; shl.b32 %r5, %r2, 3;
        add.u32 %r6, %r20, %r5; add.u32 %r7, %r21, %r5;
        {wait("%r6", "%r4")}
        shl.b32 %r8, %r2, 7; add.u32 %r8, %r8, %r22; and.b32 %r10, %t, 31; shl.b32 %r10, %r10, 2;
        add.u32 %r8, %r8, %r10; ld.shared.u32 %r11, [%r8]; add.u32 %r9, %r9, %r11;
        bar.warp.sync -1;
        setp.eq.u32 %q3, %r10, 0; @%q3 mbarrier.arrive.shared.b64 _, [%r7];
        add.u32 %r1, %r1, 1; setp.lt.u32 %q4, %r1, 6; @%q4 bra CONSUME;
        mul.wide.u32 %d0, %r10, 1; add.s64 %d1, %p0, %d0; st.global.u32 [%d1], %r9;
        bra END;
        PRODUCE:
        @!%q1 bra END;
        LOOP:
        and.b32 %r2, %r1, 1; shr.u32 %r3, %r1, 1; and.b32 %r4, %r3, 1; xor.b32 %r4, %r4, 1; shl.b32 %r5, %r2, 3;
        add.u32 %r6, %r20, %r5; add.u32 %r7, %r21, %r5;
        {wait("%r7", "%r4")}
        mbarrier.arrive.expect_tx.shared.b64 _, [%r6], 128;
        shl.b32 %r8, %r2, 7; add.u32 %r8, %r8, %r22; mul.wide.u32 %d0, %r1, 128; add.s64 %d1, %p1, %d0;
        {BULK} [%r8], [%d1], 128, [%r6];
        add.u32 %r1, %r1, 1; setp.lt.u32 %q4, %r1, 6; @%q4 bra LOOP;
        END:
        """,
        2,
        ".shared .align 8 .b64 full[2]; .shared .align 8 .b64 empty[2]; .shared .align 128 .b8 tile[256];",
    )
    rows = np.arange(6 * 32, dtype=np.uint32).reshape(6, 32)
    out = np.zeros(32, np.uint32)
    run(text, out, rows, block=(64,), options=emu.Options(schedule=schedule, completion=completion))
    assert out.tolist() == rows.sum(0).tolist()


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("mbarrier.init.shared.b64 [bar], 0;", emu.ProtocolError, "count 0; allowed are 1 to 1048575"),  # T31
        ("mbarrier.init.shared.b64 [bar], 1048576;", emu.ProtocolError, "count 1048576"),
        ("mbarrier.init.shared.b64 [bar], 1; mbarrier.init.shared.b64 [bar], 1;", emu.ProtocolError, "is live"),
        ("mbarrier.arrive.shared.b64 %d0, [bar];", emu.ProtocolError, "no initialised mbarrier at 0x400"),
        ("mbarrier.init.shared.b64 [bar], 2; mbarrier.arrive.shared.b64 %d0, [bar], 3;", emu.ProtocolError,
         "over-arrival at mbarrier 0x400: 3 arrivals, 2 of 2 pending in phase 0"),
        ("mbarrier.init.shared.b64 [bar], 1; " + BULK + " [tile], [%p0], 24, [bar];", emu.MemoryFault,
         "bulk copy of 24 bytes"),
        ("mbarrier.init.shared.b64 [bar], 1; " + BULK + " [tile], [%p0], 4096, [bar];", emu.MemoryFault,
         "outside shared memory"),
        ("mbarrier.init.shared.b64 [bar], 1; " + BULK + " [tile], [%p0+64], 128, [bar];", emu.MemoryFault,
         "outside buffer params\\[0\\]"),
    ],
)  # fmt: skip
def test_protocol_violations(body, error, message):
    declarations = ".shared .align 8 .b64 bar; .shared .align 128 .b8 tile[256];"
    with pytest.raises(error, match=message):
        run(kernel(f"{ONE_THREAD} {body} END:", 1, declarations), np.zeros(32, np.uint32))


def test_arrivals_phases_and_tokens():
    text = kernel(
        f"""
        {ONE_THREAD}
        mbarrier.init.shared.b64 [bar], 2;
        mbarrier.arrive.shared.b64 %d1, [bar];
        mbarrier.test_wait.shared.b64 %q1, [bar], %d1; selp.u32 %r1, 1, 0, %q1;
        mbarrier.pending_count.b64 %r2, %d1;
        mbarrier.arrive_drop.release.cta.shared::cta.b64 %d2, [bar];
        mbarrier.test_wait.shared.b64 %q2, [bar], %d1; selp.u32 %r3, 1, 0, %q2;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 32;
        mbarrier.arrive.shared.b64 %d1, [bar];
        mbarrier.test_wait.parity.shared.b64 %q3, [bar], 1; selp.u32 %r4, 1, 0, %q3;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 32;
        mbarrier.try_wait.parity.shared.b64 %q3, [bar], 1; selp.u32 %r5, 1, 0, %q3;
        st.global.v4.u32 [%p0], {{%r1, %r2, %r3, %r4}}; st.global.u32 [%p0+16], %r5;
        mbarrier.inval.shared.b64 [bar]; st.shared.u64 [bar], 0;
        END:
        """,
        1,
        ".shared .align 8 .b64 bar;",
    )
    out = np.zeros(8, np.uint32)
    run(text, out)
    assert out[:5].tolist() == [0, 2, 1, 0, 1]


def test_parity_is_bit_zero_and_two_is_flagged():
    """T36."""
    text = kernel(
        f"{ONE_THREAD} mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.shared.b64 %d0, [bar];"
        "mbarrier.try_wait.parity.shared.b64 %q1, [bar], 2; selp.u32 %r1, 1, 0, %q1; st.global.u32 [%p0], %r1; END:",
        1, ".shared .align 8 .b64 bar;",
    )  # fmt: skip
    out = np.zeros(1, np.uint32)
    result = run(text, out)
    assert out[0] == 1
    assert [f.rule for f in result.findings] == ["mbarrier-parity-range"]


def test_a_peeking_try_wait_comes_back_false_when_nothing_else_can_happen():
    text = kernel(
        f"""
        {ONE_THREAD}
        mbarrier.init.shared.b64 [bar], 1;
        mbarrier.try_wait.parity.shared.b64 %q1, [bar], 0;
        @!%q1 mbarrier.arrive.shared.b64 %d0, [bar];
        {wait("bar", "0")}
        selp.u32 %r1, 1, 5, %q1; st.global.u32 [%p0], %r1;
        END:
        """,
        1,
        ".shared .align 8 .b64 bar;",
    )
    out = np.zeros(1, np.uint32)
    run(text, out)
    assert out[0] == 5


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_bulk_store_and_reduction(completion):
    text = kernel(
        f"""
        {ONE_THREAD}
        st.shared.v4.f32 [tile], {{0f3F800000, 0f40000000, 0f40400000, 0f40800000}};
        fence.proxy.async.shared::cta;
        cp.async.bulk.global.shared::cta.bulk_group [%p0], [tile], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%p0], [tile], 16;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%p0+16], [tile], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        END:
        """,
        1,
        ".shared .align 16 .f32 tile[4];",
    )
    out = np.full(8, 10, np.float32)
    run(text, out, options=emu.Options(completion=completion))
    assert out.tolist() == [2, 4, 6, 8, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("op", "dtype", "old", "new", "expected"),
    [
        ("min.s32", np.int32, -5, 3, -5), ("max.u32", np.uint32, 5, 3, 5), ("or.b32", np.uint32, 5, 3, 7),
        ("add.u64", np.uint64, 5, 3, 8), ("add.noftz.f16", np.float16, 1.5, 2, 3.5),
        ("min.f16", np.float16, 1.5, 2, 1.5),
    ],
)  # fmt: skip
def test_reducing_copies_by_type(op, dtype, old, new, expected):
    text = kernel(
        f"""
        {ONE_THREAD}
        ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%p1]; st.shared.v4.u32 [tile], {{%r1, %r2, %r3, %r4}};
        cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%p0], [tile], 16;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
        """,
        2,
        ".shared .align 16 .b8 tile[16];",
    )
    count = 16 // np.dtype(dtype).itemsize
    out, values = np.full(count, old, dtype), np.full(count, new, dtype)
    run(text, out, values)
    assert (out == dtype(expected)).all()


def test_a_whole_warp_with_equal_operands_issues_one_copy():
    text = kernel(
        """
        st.shared.f32 [tile], 0f3F800000;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%p0], [tile], 16;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
        """,
        1,
        ".shared .align 16 .f32 tile[4];",
    )
    out = np.zeros(4, np.float32)
    run(text, out)
    assert out[0] == 1


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_memory_is_poisoned_for_the_next_cta_only_when_nobody_reads_it(completion):
    """T25: each CTA ends while its bulk store may still read its shared memory, which the next CTA gets anew."""
    out = np.zeros((4, 32), np.uint32)
    text = kernel(
        """
        mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 100, %t; mul.lo.u32 %r3, %t, 4; mov.u32 %r4, tile;
        add.u32 %r4, %r4, %r3; st.shared.u32 [%r4], %r2; fence.proxy.async.shared::cta; bar.warp.sync -1;
        setp.ne.u32 %q15, %t, 0; @%q15 bra END;
        mul.wide.u32 %d1, %r1, 128; add.u64 %d1, %p0, %d1;
        cp.async.bulk.global.shared::cta.bulk_group [%d1], [tile], 128; cp.async.bulk.commit_group;
        END:
        """,
        1,
        ".shared .align 128 .b8 tile[128];",
    )
    run(text, out, grid=(4,), options=emu.Options(completion=completion))
    assert out.tolist() == [[100 * cta + thread for thread in range(32)] for cta in range(4)]
