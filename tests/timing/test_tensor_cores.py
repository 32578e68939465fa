"""MMAs on the engine: rates, fill and tail, one pipe for all, and the shared-memory port."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.wgmma_kernels import descriptor
from tests.timing.kernels import SM90, SM100, Kind, Replayed, kernel, repeated, replayed
from undertow.cases import Kernel
from undertow.timing.trace import ENGINES

TILES = ".extern .shared .align 1024 .b8 tiles[];"
MBARRIER = ".shared .align 8 .b64 bar;"
SMEM = 65536


def wgmma(n: int, count: int, a_in_registers: bool = False, warpgroups: int = 1, beside: str = "") -> Kernel:
    """Warpgroups that issue `count` MMAs and wait; `beside` is what one more warpgroup does meanwhile."""
    a = "{%a0, %a1, %a2, %a3}" if a_in_registers else "%d1"
    transposes = "0" if a_in_registers else "0, 0"
    accumulators = "{" + ", ".join(f"%acc{i}" for i in range(n // 2)) + "}"
    mma = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {accumulators}, {a}, %d2, %q1, 1, 1, {transposes};"
    body = f"""mov.b64 %d1, {descriptor(2048, 16, 1024, 128)}; mov.b64 %d2, {descriptor(16384, 16, 1024, 128)};
        setp.eq.u32 %q1, %t, %t; mov.u32 %r1, tiles; setp.ge.u32 %q2, %t, {128 * warpgroups};
        {repeated("mov.b32 %a{i}, %t;", 4)} {repeated("mov.b32 %acc{i}, %t;", n // 2)} @%q2 bra OTHER;
        wgmma.fence.sync.aligned; {repeated(mma, count)} wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0; {repeated("st.global.b32 [%p0], %acc{i};", n // 2)} bra END;
        OTHER: {beside} END:"""
    declarations = f".reg .b32 %acc<{n // 2}>, %a<4>;"
    threads = 128 * (warpgroups + bool(beside))
    return kernel(body, np.zeros(1024, np.int32), arch=SM90, declarations=declarations, module=TILES, block=(threads,),
                  dynamic_smem=SMEM)  # fmt: skip


def from_issue_to_wait(done: Replayed) -> float:
    return max(done.times(Kind.WGMMA_WAIT, w)[0] for w in range(4)) - done.run.operations[0, 0]


@pytest.mark.parametrize("n, cycles", [(64, 32), (128, 64)])
@pytest.mark.parametrize("a_in_registers, more", [(False, 63), (True, 48)])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_chain_of_mmas_takes_their_cycles_and_fill_and_tail(n, cycles, a_in_registers, more, count):
    """As measured on an H200: 32 k + 63, 64 k + 63; 48 with A in registers."""
    assert from_issue_to_wait(replayed(wgmma(n, count, a_in_registers), SM90)) == pytest.approx(
        cycles * count + more, abs=2
    )


def test_two_warpgroups_share_the_tensor_cores():
    done = replayed(wgmma(128, 8, warpgroups=2), SM90)
    assert done.run.operations[:, 2].max() - done.run.operations[:, 1].min() == pytest.approx(2 * 8 * 64, abs=2)
    gaps = np.diff(done.trace.operations[np.argsort(done.run.operations[:, 1]), 1])
    assert (gaps != 0).sum() > 10, "they take turns"


STORES = "mad.lo.u32 %r1, %t, 16, %r1;" + repeated("st.shared.v4.b32 [%r1], {%t, %t, %t, %t};", 128)


def test_stores_and_operands_share_the_port():
    """An MMA with n = 64 and both operands in shared memory takes the whole port: 32 passes in 32 cycles."""
    given = wgmma(64, 64, beside=STORES)
    alone = from_issue_to_wait(replayed(wgmma(64, 64), SM90))
    shared = from_issue_to_wait(replayed(given, SM90))
    own = from_issue_to_wait(replayed(given, SM90, mma_shares_port=0))
    assert own == pytest.approx(alone, rel=0.01)
    assert shared == pytest.approx(alone * 4 / 3, rel=0.05), "three grants of four, as the constant says"


def test_stores_have_what_operands_leave():
    """n = 128 leaves 16 of 64 cycles, with A in registers 32."""
    for a_in_registers, share in ((False, 16 / 64), (True, 32 / 64)):
        given = wgmma(128, 64, a_in_registers, beside=STORES)
        done = replayed(given, SM90, lsu_pass_interval=1)
        times = [t for warp in range(4, 8) for t in done.times(Kind.STORE, warp)]
        begin, end = done.run.operations[:, 1].min(), done.run.operations[:, 2].max()
        inside = sum(begin <= t < end for t in times)
        assert inside * 4 / (end - begin) == pytest.approx(share, rel=0.35)


def test_loads_are_held_to_their_share_beside_mmas():
    loads = "mad.lo.u32 %r1, %t, 4, %r1;" + repeated("ld.shared.b32 %r2, [%r1]; st.global.b32 [%p0], %r2;", 64)
    held = replayed(wgmma(128, 64, True, beside=loads), SM90, load_share_beside_mma=0.02, global_bytes_per_cycle=1e6)
    free = replayed(wgmma(128, 64, True, beside=loads), SM90, load_share_beside_mma=1, global_bytes_per_cycle=1e6)
    assert max(held.times(Kind.LOAD, 4)) > 1.5 * max(free.times(Kind.LOAD, 4))


REDUCTION = """setp.ne.u32 %q0, %t, 128; @%q0 bra END;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%p0], [%r1], 4096; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;"""


@pytest.mark.parametrize(("share", "cycles"), [(0.5, 32 / 0.125), (0.25, 32 / 0.0625)])
def test_bulk_reductions_read_in_a_share_of_what_operands_leave(share, cycles):
    """n = 128 leaves a quarter of the cycles; a reduction that could read 32 passes in 32 gets its share of them."""
    done = replayed(
        wgmma(128, 64, beside=REDUCTION),
        SM90,
        bulk_reduce_bytes_per_cycle=128,
        bulk_read_share_beside_mma=share,
        bulk_reduce_latency=200,
    )
    (of,) = [i for i, engine in enumerate(done.trace.operations[:, 0]) if engine == ENGINES.index("bulk_reduce")]
    _, begun, ended = done.run.operations[of]
    assert ended - begun == pytest.approx(cycles, rel=0.1)
    alone = from_issue_to_wait(replayed(wgmma(128, 64), SM90))
    assert from_issue_to_wait(done) == pytest.approx(alone, rel=0.01), "operands come first"


def test_a_warp_stands_still_at_the_next_mma():
    """With two in flight the third is issued when the first is done."""
    done = replayed(wgmma(128, 6), SM90)
    issued = done.times(Kind.WGMMA)
    assert issued[2] == pytest.approx(done.run.operations[0, 2], abs=1)
    assert np.diff(issued[2:]).tolist() == [64.0] * 3


def tcgen05(count: int) -> Kernel:
    """One thread issues `count` MMAs of 128 x 128 x 16 and commits; all wait, then one warp loads 32 columns."""
    mma = "tcgen05.mma.cta_group::1.kind::f16 [%r3], %d1, %d2, %r4, %q1;"
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (128 >> 3) << 17 | (128 >> 4) << 24
    operand = 16384 >> 4 | 1 << 16 | (1024 >> 4) << 32 | 1 << 46 | 2 << 61
    registers = "{" + ", ".join(f"%x{i}" for i in range(32)) + "}"
    body = f"""setp.ne.u32 %q0, %t, 0; @%q0 bra INIT; mbarrier.init.shared.b64 [bar], 1; INIT:
        mov.u32 %r1, where; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 128; bar.sync 0;
        ld.shared.b32 %r3, [%r1]; mov.b64 %d1, {operand}; mov.b64 %d2, {operand}; mov.b32 %r4, {idesc};
        setp.eq.u32 %q1, %t, 99; @%q0 bra WAITS; {repeated(mma, count)}
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
        WAITS: {{ .reg .pred P; LAB: mbarrier.try_wait.parity.shared.b64 P, [bar], 0; @P bra DONE; bra LAB; DONE: }}
        tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers}, [%r3]; tcgen05.wait::ld.sync.aligned;
        {repeated("st.global.b32 [%p0], %x{i};", 32)}
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 128;"""
    module = MBARRIER + ".shared .align 4 .b32 where;" + TILES
    return kernel(body, np.zeros(1024, np.int32), declarations=".reg .b32 %x<32>;", module=module, dynamic_smem=SMEM)


@pytest.mark.parametrize("count", [1, 4, 12])
def test_tcgen05_takes_its_cycles_and_fill_tail_and_wake(count):
    """64 cycles each; fill 40, tail 66 and wake 30 are the 136 that were published."""
    done = replayed(tcgen05(count), SM100, mma_multiply_adds_per_cycle=4096)
    assert done.times(Kind.WAIT)[0] - done.times(Kind.MMA)[0] == pytest.approx(64 * count + 136, abs=2)


def test_a_tensor_memory_load_takes_its_latency_and_registers():
    done = replayed(tcgen05(1), SM100, mma_multiply_adds_per_cycle=4096)
    assert done.times(Kind.TMEM_WAIT_LOAD)[0] - done.times(Kind.TMEM_LOAD)[0] == 60 + 32 / 2
