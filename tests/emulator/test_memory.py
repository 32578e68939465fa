"""Loads, stores, atomics, generic addresses, and faults that name the place."""

from __future__ import annotations

import numpy as np
import pytest

from undertow import emulator as emu

from .kernels import HEADER, kernel, run

PLACE = "mul.wide.u32 %d0, %t, 4; add.s64 %d1, %p0, %d0; add.s64 %d2, %p1, %d0;"


def test_vector_add_over_a_grid():
    text = kernel(
        """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %t;
        mul.wide.u32 %d3, %r3, 16; add.s64 %d4, %p0, %d3; add.s64 %d5, %p1, %d3; add.s64 %d6, %p2, %d3;
        ld.global.nc.v4.f32 {%f0, %f1, %f2, %f3}, [%d5];
        ld.global.L1::no_allocate.L2::128B.v4.f32 {%f4, %f5, %f6, %f7}, [%d6];
        add.f32 %f0, %f0, %f4; add.f32 %f1, %f1, %f5; add.f32 %f2, %f2, %f6; add.f32 %f3, %f3, %f7;
        st.global.v4.f32 [%d4], {%f0, %f1, %f2, %f3};
        """,
        3,
    )
    a, b = np.arange(1024, dtype=np.float32), np.arange(1024, dtype=np.float32)[::-1].copy()
    out = np.zeros(1024, np.float32)
    run(text, out, a, b, grid=(4,), block=(64,))
    assert (out == 1023).all()


def test_block_sum_through_shared_memory_and_shuffles():
    text = kernel(
        f"""
        {PLACE}
        ld.global.f32 %f0, [%d2];
        shfl.sync.bfly.b32 %f1, %f0, 16, 31, -1; add.f32 %f0, %f0, %f1;
        shfl.sync.bfly.b32 %f1, %f0, 8, 31, -1; add.f32 %f0, %f0, %f1;
        shfl.sync.bfly.b32 %f1, %f0, 4, 31, -1; add.f32 %f0, %f0, %f1;
        shfl.sync.bfly.b32 %f1, %f0, 2, 31, -1; add.f32 %f0, %f0, %f1;
        shfl.sync.bfly.b32 %f1, %f0, 1, 31, -1; add.f32 %f0, %f0, %f1;
        shr.u32 %r1, %t, 5; and.b32 %r2, %t, 31; setp.ne.u32 %q1, %r2, 0;
        mov.u32 %r3, sums; mad.lo.u32 %r4, %r1, 4, %r3;
        @!%q1 st.shared.f32 [%r4], %f0;
        bar.sync 0;
        setp.ne.u32 %q2, %t, 0;
        @%q2 bra END;
        ld.shared.v4.f32 {{%f2, %f3, %f4, %f5}}, [sums];
        add.f32 %f2, %f2, %f3; add.f32 %f4, %f4, %f5; add.f32 %f2, %f2, %f4;
        st.global.f32 [%p0], %f2;
        END:
        """,
        2,
        ".shared .align 16 .f32 sums[4];",
    )
    x, out = np.arange(128, dtype=np.float32), np.zeros(1, np.float32)
    result = run(text, out, x, block=(128,))
    assert out[0] == x.sum()
    assert result.barriers == {0: 1}


def test_narrow_loads_extend_and_narrow_stores_truncate():
    text = kernel(
        """
        ld.global.s8 %r1, [%p1]; ld.global.u8 %r2, [%p1]; ld.global.s16 %r3, [%p1]; ld.global.s8 %h1, [%p1+1];
        cvt.s32.s16 %r4, %h1;
        st.global.v4.u32 [%p0], {%r1, %r2, %r3, %r4};
        st.global.u8 [%p0+16], %r1;
        """,
        2,
    )
    out = np.zeros(32, np.int32)
    run(text, out, np.array([0x80, 0xFE], np.uint8), block=(1,))
    assert out[:4].tolist() == [-128, 128, -384, -2]
    assert out[4] == 0x80


def test_generic_addresses_reach_shared_local_parameter_and_global_memory():
    text = (
        HEADER
        + """
    .global .align 4 .u32 table[2] = {11, 22};
    .visible .entry k(.param .u64 p0, .param .u32 n) {
        .reg .b64 %d<9>; .reg .b32 %r<9>; .reg .pred %q<4>;
        .local .align 8 .b8 depot[16]; .shared .align 8 .b8 tile[16];
        ld.param.u64 %d0, [p0];
        mov.u64 %d1, depot; cvta.local.u64 %d1, %d1;
        mov.u64 %d2, tile; cvta.shared.u64 %d2, %d2;
        mov.u64 %d3, n; cvta.param.u64 %d3, %d3;
        mov.u64 %d4, table;
        st.u32 [%d1+4], 5; st.u32 [%d2+8], 6;
        ld.local.u32 %r1, [depot+4]; ld.shared.u32 %r2, [tile+8]; ld.u32 %r3, [%d3]; ld.u32 %r4, [%d4+4];
        st.v4.u32 [%d0], {%r1, %r2, %r3, %r4};
        isspacep.shared %q0, %d2; isspacep.global %q1, %d0; isspacep.local %q2, %d2;
        selp.u32 %r5, 1, 0, %q0; selp.u32 %r6, 1, 0, %q1; selp.u32 %r7, 1, 0, %q2;
        st.u32 [%d0+16], %r5; st.u32 [%d0+20], %r6; st.u32 [%d0+24], %r7;
        cvta.to.shared.u64 %d5, %d2; st.u64 [%d0+32], %d5;
        ret;
    }"""
    )
    out = np.zeros(10, np.uint32)
    emu.launch(text, emu.Launch(grid=(1,), block=(1,), params=[emu.Pointer(out), 77]))
    assert out[:7].tolist() == [5, 6, 77, 22, 1, 1, 0]
    assert out[8] >= 1024


@pytest.mark.parametrize(
    ("op", "values", "start", "expected"),
    [
        ("add.u32", range(64), 5, 5 + sum(range(64))),
        ("min.s32", [-3] * 64, 5, 2**32 - 3),
        ("max.u32", range(64), 5, 63),
        ("and.b32", [0xF0] * 64, 0xFF, 0xF0),
        ("or.b32", range(64), 0, 63),
        ("xor.b32", range(64), 7, 7),
        ("inc.u32", [9] * 64, 0, 64 % 10),
        ("dec.u32", [9] * 64, 0, (0 - 64) % 10),
        ("exch.b32", range(64), 0, 63),
    ],
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_reductions(op, values, start, expected, space):
    name = op.split(".")[0]
    target = "%p0" if space == "global" else "cell"
    call = f"atom.{space}.{op} %r9, [{target}], %r1;" if name == "exch" else f"red.{space}.{op} [{target}], %r1;"
    text = kernel(
        f"""
        {PLACE} ld.global.u32 %r1, [%d2];
        ld.global.u32 %r2, [%p0];
        st.shared.u32 [cell], %r2;
        bar.sync 0;
        {call}
        bar.sync 0;
        ld.shared.u32 %r3, [cell]; setp.eq.u32 %q1, %t, 0; @%q1 st.global.u32 [%p0+4], %r3;
        """,
        2,
        ".shared .align 4 .u32 cell;",
    )
    out = np.array([start, 0], np.uint32)
    run(text, out, np.array([v % 2**32 for v in values], np.uint32), block=(64,))
    assert out[0 if space == "global" else 1] == expected


def test_atomic_returns_old_values_and_swaps():
    text = kernel(
        """
        mul.wide.u32 %d0, %t, 4; add.s64 %d1, %p0, %d0;
        atom.global.add.u32 %r1, [%p1], 1; st.global.u32 [%d1], %r1;
        atom.acq_rel.gpu.global.cas.b32 %r2, [%p1+4], 3, 9;
        atom.shared.exch.b32 %r3, [cell], 4;
        red.global.gpu.relaxed.add.f32 [%p1+8], 0f3F000000;
        """,
        2,
        ".shared .align 4 .u32 cell;",
    )
    out, cells = np.zeros(32, np.uint32), np.array([0, 3, 0], np.uint32)
    run(text, out, cells)
    assert out.tolist() == list(range(32))
    assert cells[:2].tolist() == [32, 9]
    assert cells[2:].view(np.float32)[0] == 16


FAULTS = [
    ("ld.global.u32 %r1, [%p0+64];", "4 bytes at 0x1000000040 are outside buffer params[0]"),
    (
        "ld.global.u32 %r1, [%p0+-4];",
        "buffer params[0] [0x1000000000, 0x1000000040): they begin 4 bytes before it",
    ),
    ("ld.global.u32 %r1, [%p0+2];", "4 bytes at 0x1000000002 in buffer params[0] are not aligned"),
    ("st.global.u32 [%p1+16], %t;", "outside buffer params[1]"),
    ("ld.shared.u32 %r1, [tile+64];", "outside shared memory"),
    ("ld.shared.v4.u32 {%r1,%r2,%r3,%r4}, [tile+8];", "16 bytes at 0x408 in shared memory are not aligned"),
    ("ld.local.u32 %r1, [depot+16];", "local address"),
    ("mbarrier.init.shared.b64 [tile], 1; ld.shared.u32 %r1, [tile+4];", "touches an mbarrier"),
    ("mbarrier.init.shared.b64 [tile+4], 1;", "not aligned to 8 bytes"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS)
def test_faults_name_fact_and_place(line, message):
    text = kernel(line, 2, ".shared .align 16 .b8 tile[64]; .local .align 4 .b8 depot[16];")
    with pytest.raises(emu.MemoryFault) as caught:
        run(text, np.zeros(16, np.uint32), np.zeros(4, np.uint32), block=(1,))
    assert message in str(caught.value)
    assert "k, CTA (0, 0, 0), warp 0" in str(caught.value)
    assert line.split(";")[0] in str(caught.value)


def test_a_read_only_array_cannot_be_written():
    out = np.zeros(4, np.uint32)
    out.flags.writeable = False
    with pytest.raises(emu.MemoryFault, match="read-only on the host"):
        run(kernel("st.global.u32 [%p0], %t;", 1), out)


def test_overlapping_arrays_alias():
    packed = np.zeros(8, np.uint32)
    run(kernel("st.global.u32 [%p0], 7; ld.global.u32 %r1, [%p1]; st.global.u32 [%p1+4], %r1;", 2), packed, packed[:4])
    assert packed[:2].tolist() == [7, 7]


def test_strided_and_torch_arrays_are_not_copied():
    torch = pytest.importorskip("torch")
    text = kernel("mul.wide.u32 %d0, %t, 8; add.s64 %d1, %p0, %d0; st.global.u32 [%d1], %t;", 1)
    out = np.zeros((32, 2), np.uint32)
    run(text, out[:, 0])
    assert out[:, 0].tolist() == list(range(32)) and not out[:, 1].any()
    tensor = torch.zeros(32, 2, dtype=torch.int32)
    run(text, tensor)
    assert tensor[:, 0].tolist() == list(range(32))


def test_uninitialised_memory_is_poison():
    text = kernel(
        "ld.shared.u32 %r1, [tile]; st.global.u32 [%p0], %r1; st.global.u32 [%p0+4], %r50;", 1, ".shared .u32 tile;"
    )
    out = np.zeros(2, np.uint32)
    run(text, out, block=(1,))
    assert out.tolist() == [0xCDCDCDCD, 0xCDCDCDCD]


def test_cp_async_copies_and_zero_fills():
    text = kernel(
        """
        cp.async.ca.shared.global [tile], [%p1], 16, 8;
        cp.async.cg.shared.global [tile+16], [%p1+16], 16;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.v4.u32 {%r1,%r2,%r3,%r4}, [tile]; st.global.v4.u32 [%p0], {%r1,%r2,%r3,%r4};
        ld.shared.v4.u32 {%r1,%r2,%r3,%r4}, [tile+16]; st.global.v4.u32 [%p0+16], {%r1,%r2,%r3,%r4};
        """,
        2,
        ".shared .align 16 .b8 tile[32];",
    )
    for completion in ("eager", "late"):
        out = np.zeros(8, np.uint32)
        run(text, out, np.arange(1, 9, dtype=np.uint32), block=(1,), options=emu.Options(completion=completion))
        assert out.tolist() == [1, 2, 0, 0, 5, 6, 7, 8]


def test_movmatrix_transposes_what_the_lanes_hold():
    tile = np.arange(64, dtype=np.uint16)
    out = np.zeros(64, np.uint16)
    body = "mul.wide.u32 %d0, %t, 4; add.s64 %d1, %p1, %d0; ld.global.u32 %r1, [%d1];"
    body += "movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1; add.s64 %d1, %p0, %d0; st.global.u32 [%d1], %r2;"
    run(kernel(body, 2), out, tile)
    np.testing.assert_array_equal(out.reshape(8, 8), tile.reshape(8, 8).T)


def test_ldmatrix_and_stmatrix_transpose():
    text = kernel(
        """
        shl.b32 %r1, %t, 4; add.u32 %r2, %r1, tile; shl.b32 %r9, %t, 4;
        mul.wide.u32 %d0, %t, 16; add.s64 %d1, %p1, %d0;
        ld.global.v4.u32 {%r3,%r4,%r5,%r6}, [%d1]; st.shared.v4.u32 [%r2], {%r3,%r4,%r5,%r6};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r3,%r4,%r5,%r6}, [%r2];
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r3,%r4,%r5,%r6};
        bar.warp.sync -1;
        ld.shared.v4.u32 {%r3,%r4,%r5,%r6}, [%r2]; add.s64 %d2, %p0, %d0; st.global.v4.u32 [%d2], {%r3,%r4,%r5,%r6};
        """.replace("add.u32 %r2, %r1, tile;", "mov.u32 %r10, tile; add.u32 %r2, %r1, %r10;"),
        2,
        ".shared .align 128 .b8 tile[512];",
    )
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros_like(x)
    run(text, out, x)
    assert (out == x.transpose(0, 2, 1)).all()
