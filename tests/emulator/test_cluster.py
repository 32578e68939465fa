"""Clusters of several CTAs: who is who, distributed shared memory, multicast, remote arrivals, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from undertow import emulator as emu

from .kernels import kernel, run

SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
SHARED = ".shared .align 1024 .b8 data[4096]; .shared .align 8 .b64 bar;"
WAIT = "{{ .reg .pred P1; W: mbarrier.try_wait.parity.shared.b64 P1, [bar], {}; @P1 bra D; bra W; D: }}"
RANK = "mov.u32 %r10, %cluster_ctarank;"
PEER = RANK + "xor.b32 %r11, %r10, 1;"
LEAD = "setp.ne.u32 %q1, %t, 0;"
ORDERS = [
    emu.Options(), emu.Options(completion="late"), emu.Options(schedule=1, completion=("seeded", 1)),
    emu.Options(schedule=2, completion=("seeded", 3)),
]  # fmt: skip


def place(array: int, count: int = 1) -> str:
    """%d0: this thread's `count` words of an array, over all CTAs."""
    return (
        "mov.u32 %r20, %ctaid.x; mov.u32 %r21, %ntid.x; mad.lo.u32 %r20, %r20, %r21, %t;"
        f" mul.wide.u32 %d0, %r20, {4 * count}; add.s64 %d0, %d0, %p{array};"
    )


def words(body: str, *inputs: np.ndarray, grid: int = 2, cluster: int = 2, count: int = 1, **how) -> np.ndarray:
    """Run a body that leaves `count` words per thread in %r1, ...; returns them as (CTAs, 32, count)."""
    out = np.zeros((grid, 32, count), np.uint32)
    stores = "".join(f"st.global.u32 [%d0+{4 * i}], %r{1 + i};" for i in range(count))
    text = kernel(body + place(0, count) + stores, 1 + len(inputs), "", SHARED)
    run(text, out, *inputs, grid=(grid,), cluster=(cluster, 1, 1), **how)
    return out


def init(count: int) -> str:
    """Thread 0 of each CTA makes an mbarrier; the cluster meets."""
    return (
        LEAD + f"@%q1 bra MADE; mbarrier.init.shared.b64 [bar], {count}; fence.mbarrier_init.release.cluster; MADE:"
        " bar.warp.sync -1;" + SYNC
    )


def test_who_is_who():
    names = (
        "clusterid.x", "clusterid.y", "nclusterid.x", "nclusterid.y", "cluster_ctaid.x", "cluster_ctaid.y",
        "cluster_nctaid.x", "cluster_nctaid.y", "cluster_ctarank", "cluster_nctarank", "is_explicit_cluster",
    )  # fmt: skip
    out = np.zeros((4, 6, len(names)), np.uint32)
    text = kernel(
        "mov.u32 %r0, %ctaid.y; mov.u32 %r1, %nctaid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r0, %r0, %r1, %r2;"
        f"mul.wide.u32 %d0, %r0, {4 * len(names)}; add.s64 %d0, %d0, %p0;"
        + "".join(
            f"mov.{'pred %q1' if n == 'is_explicit_cluster' else 'u32 %r3'}, %{n};"
            + ("selp.u32 %r3, 1, 0, %q1;" if n == "is_explicit_cluster" else "")
            + f"st.global.u32 [%d0+{4 * i}], %r3;"
            for i, n in enumerate(names[:-1])
        ),
        1,
    )
    run(text, out, grid=(6, 4), block=(1,), cluster=(2, 2, 1))
    for y in range(4):
        for x in range(6):
            expected = [x // 2, y // 2, 3, 2, x % 2, y % 2, 2, 2, y % 2 * 2 + x % 2, 4]
            assert out[y, x, :-1].tolist() == expected


@pytest.mark.parametrize("options", ORDERS)
def test_a_store_to_another_cta_is_there_after_the_cluster_barrier(options):
    body = (
        PEER + "mov.u32 %r12, data; mad.lo.u32 %r12, %t, 4, %r12; mapa.shared::cluster.u32 %r13, %r12, %r11;"
        "mad.lo.u32 %r14, %r10, 1000, %t; st.shared::cluster.u32 [%r13], %r14;" + SYNC + "ld.shared.u32 %r1, [%r12];"
    )
    result = words(body, options=options, grid=4)[..., 0]
    lanes = np.arange(32)
    assert (result == np.stack([1000 + lanes, lanes, 1000 + lanes, lanes])).all()


def test_generic_addresses_of_another_cta():
    body = (
        PEER + "mov.u32 %r12, data; mad.lo.u32 %r12, %t, 4, %r12; cvt.u64.u32 %d1, %r12; cvta.shared.u64 %d1, %d1;"
        "mad.lo.u32 %r14, %r10, 1000, %t; st.u32 [%d1], %r14;" + SYNC + "mapa.u64 %d2, %d1, %r11; ld.u32 %r1, [%d2];"
        "getctarank.u64 %r2, %d2; getctarank.u64 %r3, %d1;" + SYNC
    )
    result = words(body, count=3)
    assert (result[..., 0] == np.stack([1000 + np.arange(32), np.arange(32)])).all()
    assert result[:, 0, 1].tolist() == [1, 0] and result[:, 0, 2].tolist() == [0, 1]


def test_the_own_rank_gives_the_own_address():
    body = RANK + "mov.u32 %r12, data; mapa.shared::cluster.u32 %r1, %r12, %r10; sub.u32 %r1, %r1, %r12;"
    assert (words(body) == 0).all()


def test_lanes_may_name_different_ctas_at_once():
    body = (
        RANK + "mov.u32 %r12, data; mad.lo.u32 %r12, %t, 4, %r12; st.shared.u32 [%r12], %r10;" + SYNC
        + "and.b32 %r11, %t, 3; mapa.shared::cluster.u32 %r13, %r12, %r11; ld.shared::cluster.u32 %r1, [%r13];"
        + SYNC + "atom.shared::cluster.add.u32 %r2, [%r13], 16;" + SYNC + "ld.shared.u32 %r3, [%r12];" + SYNC
    )  # fmt: skip
    result = words(body, grid=4, cluster=4, count=3)
    assert (result[..., 0] == np.arange(32) % 4).all()
    old, new = result[..., 1].astype(int), result[..., 2].astype(int)
    assert (np.sort(old, 0)[:, 0] == [0, 16, 32, 48]).all()
    own = np.arange(4)[:, None] == np.arange(32) % 4
    assert (new == np.arange(4)[:, None] + 64 * own).all()


@pytest.mark.parametrize("options", ORDERS)
def test_arrivals_at_another_ctas_mbarrier(options):
    """Rank 1 writes into rank 0 and arrives there, lane by lane; rank 0 waits."""
    body = (
        init(32) + RANK + "mov.u32 %r12, data; mad.lo.u32 %r12, %t, 4, %r12; mov.u32 %r1, 0; setp.eq.u32 %q2, %r10, 0;"
        "@%q2 bra WAITS; mov.u32 %r15, 0; mapa.shared::cluster.u32 %r13, %r12, %r15; st.shared::cluster.u32 [%r13], %t;"
        "mov.u32 %r14, bar; mapa.shared::cluster.u32 %r14, %r14, %r15;"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r14]; bra DONE; WAITS:"
        + WAIT.format(0) + "ld.shared.u32 %r1, [%r12]; DONE:" + SYNC
    )  # fmt: skip
    assert words(body, options=options)[0, :, 0].tolist() == list(range(32))


@pytest.mark.parametrize("options", ORDERS)
def test_st_async_and_red_async(options):
    """Every lane of rank 1 stores two words and adds one to a third; each completes its bytes at rank 0."""
    body = (
        init(1) + RANK + "mov.u32 %r12, data; mad.lo.u32 %r13, %t, 8, %r12; mov.u32 %r1, 0; mov.u32 %r2, 0;"
        "mov.u32 %r3, 0; st.shared.u32 [data+1024], 7;" + SYNC
        + "setp.eq.u32 %q2, %r10, 0; @%q2 bra WAITS; mov.u32 %r15, 0; mapa.shared::cluster.u32 %r16, %r13, %r15;"
        "mapa.shared::cluster.u32 %r17, %r12, %r15; mov.u32 %r14, bar; mapa.shared::cluster.u32 %r14, %r14, %r15;"
        "add.u32 %r18, %t, 500;"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r16], {%t, %r18}, [%r14];"
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r17+1024], %t, [%r14];"
        "bra DONE; WAITS:" + LEAD + "@%q1 bra TOLD; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 384; TOLD:"
        + WAIT.format(0) + "ld.shared.v2.u32 {%r1, %r2}, [%r13]; ld.shared.u32 %r3, [data+1024]; DONE:" + SYNC
    )  # fmt: skip
    result = words(body, options=options, count=3)[0]
    assert result[:, 0].tolist() == list(range(32)) and result[:, 1].tolist() == list(range(500, 532))
    assert (result[:, 2] == 7 + sum(range(32))).all()


MULTICAST = "mbarrier::complete_tx::bytes.multicast::cluster"


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("mask", [0b0001, 0b0110, 0b1111])
def test_a_bulk_copy_to_several_ctas(options, mask):
    source = np.arange(64, dtype=np.uint32) + 1
    body = (
        init(1) + RANK + "mov.u32 %r1, 0; mov.u32 %r15, 1; shl.b32 %r15, %r15, %r10;"
        f"and.b32 %r15, %r15, {mask}; setp.eq.u32 %q3, %r15, 0;" + LEAD
        + "@%q1 bra TOLD; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128; setp.ne.u32 %q2, %r10, 0; @%q2 bra TOLD;"
        f"mov.b16 %h1, {mask};"
        f"cp.async.bulk.shared::cluster.global.{MULTICAST} [data], [%p1], 128, [bar], %h1; TOLD: bar.warp.sync -1;"
        "@%q3 bra NOTHING;" + WAIT.format(0) + "mov.u32 %r12, data; mad.lo.u32 %r12, %t, 4, %r12;"
        "ld.shared.u32 %r1, [%r12]; NOTHING: bar.warp.sync -1;" + SYNC
    )  # fmt: skip
    result = words(body, source, grid=4, cluster=4, options=options)[..., 0]
    for rank in range(4):
        assert result[rank].tolist() == (source[:32].tolist() if mask >> rank & 1 else [0] * 32)


def test_a_tensor_copy_to_several_ctas():
    """Half of a box from each of two CTAs, each to both."""
    source = np.arange(8 * 32, dtype=np.uint32).astype(np.float32).reshape(8, 32)
    out = np.zeros((2, 32, 8), np.float32)
    body = (
        init(1) + RANK + LEAD + "@%q1 bra TOLD; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 1024;"
        "mov.b64 %d1, tm; cvta.param.u64 %d1, %d1; mov.b16 %h1, 3; mov.u32 %r12, data;"
        "mad.lo.u32 %r12, %r10, 512, %r12; mul.lo.u32 %r13, %r10, 4;"
        f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.{MULTICAST}"
        " [%r12], [%d1, {0, %r13}], [bar], %h1; TOLD: bar.warp.sync -1;"
        + WAIT.format(0) + "mov.u32 %r14, data; mad.lo.u32 %r14, %t, 4, %r14;"
        + "".join(f"ld.shared.u32 %r{30 + i}, [%r14+{128 * i}];" for i in range(8))
        + place(0, 8) + "".join(f"st.global.u32 [%d0+{4 * i}], %r{30 + i};" for i in range(8)) + SYNC
    )  # fmt: skip
    text = kernel(body, 1, "", SHARED).replace("(.param .u64 p0)", "(.param .u64 p0, .param .align 64 .b8 tm[128])")
    tensor_map = emu.TensorMap(source, "f32", (32, 8), (128,), (32, 4), 0)
    params = [emu.Pointer(out), tensor_map]
    emu.launch(text, emu.Launch(grid=(2,), block=(32,), params=params, cluster=(2, 1, 1)))
    for rank in range(2):
        np.testing.assert_array_equal(out[rank].T, source)


@pytest.mark.parametrize(
    ("copy", "added"), [("cp.async.bulk", 0), ("cp.reduce.async.bulk", 40)], ids=["copy", "reduction"]
)
@pytest.mark.parametrize("options", ORDERS)
def test_a_bulk_copy_between_ctas(options, copy, added):
    """A reduction adds to what the receiver had there."""
    form = f"{copy}.shared::cluster.shared::cta.mbarrier::complete_tx::bytes" + (".add.u32" if added else "")
    body = (
        "mov.u32 %r12, data; mad.lo.u32 %r13, %t, 4, %r12; st.shared.u32 [%r13], %t; st.shared.u32 [%r13+1024], 40;"
        "fence.proxy.async.shared::cta;" + init(1) + RANK + "setp.eq.u32 %q2, %r10, 0; mov.u32 %r1, 0;" + LEAD
        + "@%q2 bra WAITS; @%q1 bra DONE; mov.u32 %r15, 0; add.u32 %r16, %r12, 1024;"
        "mapa.shared::cluster.u32 %r16, %r16, %r15; mov.u32 %r14, bar; mapa.shared::cluster.u32 %r14, %r14, %r15;"
        f"{form} [%r16], [%r12], 128, [%r14];"
        "bra DONE; WAITS: @%q1 bra TOLD; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128; TOLD: bar.warp.sync -1;"
        + WAIT.format(0) + "ld.shared.u32 %r1, [%r13+1024]; DONE: bar.warp.sync -1;" + SYNC
    )  # fmt: skip
    assert words(body, options=options)[0, :, 0].tolist() == [added + lane for lane in range(32)]


def pairs(expected: int) -> np.ndarray:
    """T04: in a cluster of four, both CTAs of a pair copy to the leader, whose mbarrier expects so many copies."""
    source = np.arange(32, dtype=np.uint32)
    body = (
        init(1) + RANK + "and.b32 %r15, %r10, 2; setp.ne.u32 %q2, %r10, %r15; mov.u32 %r12, data; mov.u32 %r14, bar;"
        "sub.u32 %r16, %r10, %r15; mad.lo.u32 %r12, %r16, 128, %r12; mapa.shared::cluster.u32 %r12, %r12, %r15;"
        "mapa.shared::cluster.u32 %r14, %r14, %r15; mov.u32 %r1, 0;" + LEAD
        + f"@%q1 bra COPIED; @%q2 bra COPY; mbarrier.arrive.expect_tx.shared.b64 _, [bar], {128 * expected}; COPY:"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12], [%p1], 128, [%r14];"
        "COPIED: bar.warp.sync -1; @%q2 bra DONE;" + WAIT.format(0) + "mov.u32 %r13, data;"
        "mad.lo.u32 %r13, %t, 4, %r13; ld.shared.u32 %r1, [%r13+128]; DONE: bar.warp.sync -1;" + SYNC
    )  # fmt: skip
    return words(body, source, grid=4, cluster=4)[..., 0]


def test_bytes_of_a_pair_land_on_one_mbarrier():
    """T04: the factor is the two CTAs of the pair, not the size of the cluster."""
    assert pairs(2).tolist() == [list(range(32)), [0] * 32] * 2
    with pytest.raises(emu.Deadlock, match="256 bytes missing"):
        pairs(4)


def test_ctas_run_in_turns_whatever_their_order():
    """Rank 1 spins until rank 0 has written; the second cluster comes first."""
    body = (
        RANK + "st.shared.u32 [data], 0;" + SYNC + "mov.u32 %r12, data; mov.u32 %r15, 1;"
        "mapa.shared::cluster.u32 %r13, %r12, %r15; setp.eq.u32 %q2, %r10, 1; @%q2 bra SPIN;"
        "st.release.cluster.shared::cluster.u32 [%r13], 5; bra DONE; SPIN: ld.acquire.cluster.shared::cluster.u32 %r1,"
        " [%r12]; setp.eq.u32 %q3, %r1, 0; @%q3 bra SPIN; DONE:" + SYNC
    )
    for order in (None, [3, 2, 1, 0]):
        result = words(body, grid=4, options=emu.Options(cta_order=order))
        assert (result[1::2] == 5).all()


@pytest.mark.parametrize(
    ("body", "error", "fact"),
    [
        (RANK + "mov.u32 %r12, data; mapa.shared::cluster.u32 %r1, %r12, 2;", emu.ProtocolError, "mapa to CTA rank 2"),
        (
            "mov.u32 %r12, data; add.u32 %r12, %r12, 0x9000000; ld.shared::cluster.u32 %r1, [%r12];",
            emu.ProtocolError, "CTA rank 8 in a cluster of 2",
        ),
        (
            PEER + "mov.u32 %r12, data; mapa.shared::cluster.u32 %r12, %r12, %r11; ld.shared::cluster.u32 %r1,"
            " [%r12+8192];", emu.MemoryFault, "outside shared memory",
        ),
        (
            PEER + "mov.u32 %r12, data; mapa.shared::cluster.u32 %r12, %r12, %r11; ld.shared.u32 %r2, [%r12];"
            "mbarrier.arrive.shared::cluster.b64 _, [%r12];", emu.ProtocolError, "no initialised mbarrier",
        ),
        (
            init(1) + PEER + "mov.u32 %r12, data; mapa.shared::cluster.u32 %r12, %r12, %r11; cp.async.bulk.shared::"
            "cluster.global.mbarrier::complete_tx::bytes [%r12], [%p0], 16, [bar];", emu.ProtocolError,
            "with an mbarrier of another",
        ),
        (init(1) + RANK + "setp.eq.u32 %q2, %r10, 0; @%q2 bra E;" + WAIT.format(0) + "E:", emu.Deadlock, "mbarrier"),
        (RANK + "setp.eq.u32 %q2, %r10, 0; @%q2 bra E;" + WAIT.format(0) + "E:", emu.ProtocolError, "no initialised"),
    ],
)  # fmt: skip
def test_what_goes_wrong(body, error, fact):
    with pytest.raises(error, match=fact):
        words(body)


def test_a_cta_that_has_exited_is_out_of_reach():
    """Rank 0 exits without meeting the others; whoever then reads its memory reads that of the next CTA there."""
    body = (
        RANK + "setp.eq.u32 %q2, %r10, 0; @%q2 bra END; mov.u32 %r12, data; mov.u32 %r15, 0;"
        "mapa.shared::cluster.u32 %r13, %r12, %r15; ld.shared::cluster.u32 %r1, [%r13]; END:"
    )
    with pytest.raises(emu.ProtocolError, match="CTA rank 0, which has exited") as caught:
        words(body)
    assert caught.value.rule == "cluster-exit"


@pytest.mark.parametrize(
    ("grid", "cluster", "fact"), [((3,), (2, 1, 1), "must be a multiple"), ((32,), (32, 1, 1), "up to 16 CTAs")]
)
def test_sizes_that_are_refused(grid, cluster, fact):
    with pytest.raises(emu.LaunchError, match=fact):
        run(kernel(""), grid=grid, cluster=cluster)
