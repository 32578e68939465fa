"""Collectives, divergence, barriers, schedules: what warps do together."""

from __future__ import annotations

import numpy as np
import pytest

from undertow import emulator as emu

from .kernels import kernel, run

STORE = "mul.wide.u32 %d0, %t, 4; add.s64 %d1, %p0, %d0; st.global.u32 [%d1], %r1;"
LANES = np.arange(32)


def collect(body: str, block: int = 32, declarations: str = "", **keywords) -> list[int]:
    """Run a body that leaves its result in %r1 and return one value per thread."""
    out = np.zeros(block, np.uint32)
    run(kernel(f"{body}\n{STORE}", 1, declarations), out, block=(block,), **keywords)
    return out.tolist()


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("shfl.sync.idx.b32 %r1, %t, 5, 31, -1;", [5] * 32),
        ("shfl.sync.idx.b32 %r1, %t, 1, 0x181f, -1;", (LANES // 8 * 8 + 1).tolist()),
        ("shfl.sync.up.b32 %r1, %t, 1, 0, -1;", [0, *range(31)]),
        ("shfl.sync.down.b32 %r1, %t, 2, 31, -1;", [*range(2, 32), 30, 31]),
        ("shfl.sync.bfly.b32 %r1|%q1, %t, 3, 31, -1;", (LANES ^ 3).tolist()),
        ("setp.lt.u32 %q1, %t, 3; vote.sync.ballot.b32 %r1, %q1, -1;", [7] * 32),
        ("setp.lt.u32 %q1, %t, 3; vote.sync.any.pred %q2, %q1, -1; selp.u32 %r1, 1, 0, %q2;", [1] * 32),
        ("setp.lt.u32 %q1, %t, 3; vote.sync.all.pred %q2, %q1, -1; selp.u32 %r1, 1, 0, %q2;", [0] * 32),
        ("and.b32 %r2, %t, 1; match.any.sync.b32 %r1, %r2, -1;", [0x55555555, 0xAAAAAAAA] * 16),
        ("redux.sync.add.u32 %r1, %t, -1;", [496] * 32),
        ("redux.sync.max.s32 %r1, %t, -1;", [31] * 32),
        (
            "cvt.rn.f32.u32 %f1, %t; neg.f32 %f1, %f1; redux.sync.min.f32 %f2, %f1, -1; cvt.rzi.s32.f32 %r1, %f2;",
            [2**32 - 31] * 32,
        ),
        (
            "cvt.rn.f32.u32 %f1, %t; neg.f32 %f1, %f1; redux.sync.max.abs.f32 %f2, %f1, -1; cvt.rzi.s32.f32 %r1, %f2;",
            [31] * 32,
        ),
        ("elect.sync %r1|%q1, -1; selp.u32 %r1, 7, %r1, %q1;", [7] + [0] * 31),
        ("mov.u32 %r1, %lanemask_lt;", [(1 << i) - 1 for i in range(32)]),
    ],
)
def test_collectives(instruction, expected):
    assert collect(instruction) == expected


def test_the_highest_lane_may_be_elected():
    body = "elect.sync %r1|%q1, -1; selp.u32 %r1, 7, %r1, %q1;"
    assert collect(body, options=emu.Options(elected="highest")) == [31] * 31 + [7]
    for options in (emu.Options(elected="any"), emu.Options(elected="highest", backend="compiled")):
        with pytest.raises(emu.LaunchError, match="elected: "):
            collect(body, options=options)


def test_divergent_lanes_meet_again():
    body = """
    and.b32 %r2, %t, 3; setp.eq.u32 %q1, %r2, 0; setp.eq.u32 %q2, %r2, 1;
    mov.u32 %r1, 0;
    @%q1 bra A; @%q2 bra B;
    add.u32 %r1, %r1, 100; bra MEET;
    A: add.u32 %r1, %r1, 1; bra MEET;
    B: activemask.b32 %r1;
    MEET: shfl.sync.idx.b32 %r3, %r1, 2, 31, -1; add.u32 %r1, %r1, %r3;
    """
    expected = [1, 0x22222222, 100, 100] * 8
    assert collect(body) == [v + 100 for v in expected]


@pytest.mark.parametrize("backend", ["numpy", "compiled"])
def test_a_branch_to_where_the_others_fall_through_loses_no_lane(backend):
    body = "setp.lt.u32 %q1, %t, 3; @%q1 bra NEXT; NEXT: activemask.b32 %r1;"
    assert collect(body, options=emu.Options(backend=backend)) == [0xFFFFFFFF] * 32


def test_lanes_at_a_collective_and_lanes_that_wait_forever_are_a_deadlock():
    """Lane 0 waits; the others may not do bar.warp.sync without it, so it is not their fault that nobody can go on."""
    body = """
    setp.ne.u32 %q1, %t, 0; @%q1 bra MEET;
    mbarrier.init.shared.b64 [m], 1;
    WAIT: mbarrier.try_wait.parity.shared.b64 %q2, [m], 0; @!%q2 bra WAIT;
    MEET: bar.warp.sync -1; mov.u32 %r1, 1;
    """
    with pytest.raises(emu.Deadlock, match="nothing is in flight"):
        collect(body, declarations=".shared .align 8 .b8 m[8];")


def test_loop_with_a_trip_count_per_lane():
    body = "mov.u32 %r1, 0; mov.u32 %r2, 0; TOP: setp.ge.u32 %q1, %r2, %t; @%q1 bra OUT;" \
           "add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1; bra TOP; OUT:"  # fmt: skip
    assert collect(body, 64) == [t * (t - 1) // 2 for t in range(64)]


def test_branch_table():
    body = """
    and.b32 %r2, %t, 3;
    T: .branchtargets L0, L1, L2, L0;
    brx.idx %r2, T;
    L0: mov.u32 %r1, 10; bra END;
    L1: mov.u32 %r1, 11; bra END;
    L2: mov.u32 %r1, 12;
    END:
    """
    assert collect(body) == [10, 11, 12, 10] * 8


def test_a_block_that_ends_in_part_of_a_warp():
    assert collect("mov.u32 %r1, %t; bar.sync 0;", 40) == list(range(40))
    assert collect("activemask.b32 %r1;", 40)[32:] == [0xFF] * 8


def test_partial_warp_at_a_collective_is_an_error():
    body = "setp.lt.u32 %q1, %t, 8; @%q1 bra SKIP; shfl.sync.idx.b32 %r1, %t, 0, 31, -1; SKIP:"
    with pytest.raises(emu.ProtocolError, match="member mask 0xffffffff reached by lanes 0xffffff00 of warp 0 only"):
        collect(body)


def test_shuffle_among_the_named_lanes_only():
    body = """
    mov.u32 %r1, 0; setp.lt.u32 %q1, %t, 8; @!%q1 bra SKIP;
    shfl.sync.idx.b32 %r1, %t, 7, 31, 0xff; SKIP:
    """
    assert collect(body) == [7] * 8 + [0] * 24


def test_named_barriers_let_groups_meet_apart():
    body = """
    shr.u32 %r2, %t, 6; add.u32 %r3, %r2, 1; mov.u32 %r9, cells;
    shl.b32 %r4, %t, 2; add.u32 %r4, %r4, %r9; st.shared.u32 [%r4], %t;
    bar.sync %r3, 64;
    xor.b32 %r5, %t, 32; shl.b32 %r5, %r5, 2; add.u32 %r5, %r5, %r9; ld.shared.u32 %r1, [%r5];
    """
    declarations = ".shared .align 4 .u32 cells[128];"
    for schedule in ("fixed", 1, 2, 3):
        options = emu.Options(schedule=schedule)
        assert collect(body, 128, declarations, options=options) == [t ^ 32 for t in range(128)]


def test_producer_arrives_consumer_syncs():
    body = """
    setp.ge.u32 %q1, %t, 32; mov.u32 %r1, 0;
    @%q1 bra CONSUMER;
    st.shared.u32 [cell], 9; bar.arrive 3, 64; bra END;
    CONSUMER: bar.sync 3, 64; ld.shared.u32 %r1, [cell];
    END:
    """
    for schedule in ("fixed", 5, 6):
        got = collect(body, 64, ".shared .align 4 .u32 cell;", options=emu.Options(schedule=schedule))
        assert got == [0] * 32 + [9] * 32


def test_collectives_under_a_guard_that_differs_between_warps():
    body = """
    mov.u32 %r1, 7; setp.ge.u32 %q1, %t, 32; setp.lt.u32 %q2, %t, 64;
    @%q1 shfl.sync.idx.b32 %r1, %t, 3, 31, -1;
    @!%q1 elect.sync %r2|%q3, -1;
    @%q2 bar.sync 1, 64;
    @%q1 bar.red.popc.u32 %r3, 2, 64, %q2;
    @%q1 add.u32 %r1, %r1, %r3;
    """
    for schedule in ("fixed", 1, 2):
        got = collect(body, 96, options=emu.Options(schedule=schedule))
        assert got == [7] * 32 + [35 + 32] * 32 + [67 + 32] * 32


def test_barrier_reductions():
    assert collect("setp.lt.u32 %q1, %t, 40; bar.red.popc.u32 %r1, 0, %q1;", 64) == [40] * 64
    assert collect("setp.lt.u32 %q1, %t, 40; bar.red.and.pred %q2, 0, %q1; selp.u32 %r1, 1, 0, %q2;", 64) == [0] * 64
    assert (
        collect("setp.lt.u32 %q1, %t, 40; bar.red.or.pred %q2, 1, 64, !%q1; selp.u32 %r1, 1, 0, %q2;", 64) == [1] * 64
    )


def test_cluster_barrier_of_one_cta():
    body = (
        "barrier.cluster.arrive.release.aligned; mov.u32 %r1, %cluster_ctarank; barrier.cluster.wait.acquire.aligned;"
    )
    assert collect(body, 64) == [0] * 64


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 1, 33;", "barrier 1 for 33 threads"),
        ("bar.sync 16;", "barrier 16; allowed are 0 to 15"),
        ("setp.lt.u32 %q1, %t, 8; @%q1 bra S; bar.sync 0; S:", "barrier reached by lanes 0xffffff00 of warp 0 only"),
        ("setmaxnreg.dec.sync.aligned.u32 20;", "setmaxnreg to 20 registers"),
        ("trap;", "trap executed"),
    ],
)
def test_protocol_errors(body, message):
    with pytest.raises(emu.ProtocolError, match=message):
        collect(f"mov.u32 %r1, 0; {body}")


def test_two_warps_with_different_counts_at_one_barrier():
    body = "mov.u32 %r1, 0; setp.lt.u32 %q1, %t, 32; @%q1 bra A; bar.sync 1, 64; bra END; A: bar.sync 1, 96; END:"
    with pytest.raises(emu.ProtocolError, match=r"barrier 1: warp . expects .. threads, warps already there expect"):
        collect(body, 64)


def test_ctas_wait_for_each_other_through_global_memory():
    """CTA 0 spins until CTA 2 has written: a CTA that only polls gives way to others."""
    text = kernel(
        """
        mov.u32 %r1, %ctaid.x;
        setp.ne.u32 %q1, %r1, 0; @%q1 bra WRITE;
        SPIN: ld.acquire.gpu.global.u32 %r2, [%p0]; setp.lt.u32 %q2, %r2, 64; @%q2 bra SPIN;
        st.global.u32 [%p0+4], %r2; bra END;
        WRITE: red.release.gpu.global.add.u32 [%p0], 1;
        END:
        """,
        1,
    )
    for schedule in ("fixed", 3):
        cells = np.zeros(2, np.uint32)
        run(text, cells, grid=(3,), options=emu.Options(schedule=schedule))
        assert cells.tolist() == [64, 64]


def test_a_lock_taken_by_compare_and_swap():
    text = kernel(
        """
        setp.ne.u32 %q1, %t, 0; @%q1 bra END;
        TAKE: atom.acquire.gpu.global.cas.b32 %r1, [%p0], 0, 1; setp.ne.u32 %q2, %r1, 0; @%q2 bra TAKE;
        ld.global.u32 %r2, [%p0+4]; add.u32 %r2, %r2, 1; st.global.u32 [%p0+4], %r2;
        atom.release.gpu.global.exch.b32 %r1, [%p0], 0;
        END:
        """,
        1,
    )
    cells = np.zeros(2, np.uint32)
    run(text, cells, grid=(5,))
    assert cells.tolist() == [0, 5]


def test_execution_counts():
    text = kernel("setp.lt.u32 %q1, %t, 16; @%q1 bra SKIP; add.u32 %r1, %t, 1; SKIP: bar.sync 0;", 0)
    result = run(text, block=(64,), grid=(2,))
    assert result.executions.tolist() == [4, 4, 4, 4, 4, 4]
    assert result.instructions == 24
    assert result.barriers == {0: 2}
