"""The engine gives back the constants: each unit by a kernel that uses nothing else, as a microbenchmark would."""

from __future__ import annotations

import numpy as np
import pytest

from tests.timing.kernels import SM90, SM100, Kind, Unit, kernel, repeated, replayed, values
from undertow.timing.constants import ConstantError
from undertow.timing.errors import TimingError
from undertow.timing.replay import replay

SHARED = ".shared .align 128 .b8 buffer[32768];"
STORE_RESULTS = "st.global.f32 [%p0], %f0; st.global.f32 [%p0+4], %f1;"


def out(count: int = 64) -> np.ndarray:
    return np.zeros(count, np.float32)


def test_a_chain_takes_its_latency_per_link():
    body = "mov.f32 %f1, 0f3F800000; ld.global.f32 %f0, [%p0];" + repeated("fma.rn.f32 %f0, %f0, %f0, %f0;", 20)
    times = replayed(kernel(f"{body} {STORE_RESULTS}", out())).times(Unit.FMA)
    assert np.diff(times).tolist() == [4.0] * 19


@pytest.mark.parametrize("instruction, unit, interval", [
    ("fma.rn.f32 %f{i}, %f{i}, %f{i}, %f{i};", Unit.FMA, 1.0),
    ("min.f32 %f{i}, %f{i}, %f31;", Unit.ALU, 2.0),
    ("ex2.approx.ftz.f32 %f{i}, %f{i};", Unit.MUFU, 8.0),
])  # fmt: skip
def test_independent_instructions_take_their_interval(instruction, unit, interval):
    loads = repeated("ld.global.f32 %f{i}, [%p0+{i}];".replace("+{i}]", "]"), 16) + "ld.global.f32 %f31, [%p0];"
    stores = repeated("st.global.f32 [%p0], %f{i};", 16)
    times = replayed(kernel(loads + repeated(instruction, 16) + stores, out()), global_bytes_per_cycle=1e6).times(unit)
    assert np.diff(times).min() == interval, "stores go in between"


def test_warps_of_one_partition_share_its_units():
    """Four warps have a partition each; eight share them two by two."""
    loads = repeated("ld.global.f32 %f{i}, [%p0];", 16)
    stores = repeated("st.global.f32 [%p0], %f{i};", 16)
    body = loads + repeated("ex2.approx.ftz.f32 %f{i}, %f{i};", 16) + stores

    def span(block: int) -> float:
        done = replayed(kernel(body, out(), block=(block,)), global_bytes_per_cycle=1e6)
        times = [t for warp in range(block // 32) for t in done.times(Unit.MUFU, warp)]
        return max(times) - min(times)

    assert span(128) == pytest.approx(15 * 8, abs=8)
    assert span(256) == pytest.approx(31 * 8, abs=8)


@pytest.mark.parametrize("access, words, passes", [
    ("st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};", 4, 4),  # 512 bytes of a warp
    ("st.shared.b32 [%r1], %r2;", 1, 1),
    ("st.shared.b32 [%r1], %r2;", 32, 32),  # all lanes in one bank
])  # fmt: skip
def test_stores_take_a_pass_per_128_bytes_and_conflict(access, words, passes):
    """8 warps, so that the port is what limits."""
    body = f"""mov.u32 %r1, buffer; mul.lo.u32 %r3, %t, {4 * words}; and.b32 %r3, %r3, 8191; add.u32 %r1, %r1, %r3;
        mov.b32 %r2, %t;"""
    given = kernel(body + repeated(access, 8) + "fence.proxy.async.shared::cta;", module=SHARED, block=(256,))
    done = replayed(given, lsu_pass_interval=1)
    assert done.run.grants["store"] == 8 * 8 * passes
    first = min(t for warp in range(8) for t in done.times(Kind.STORE, warp))
    last = max(t for warp in range(8) for t in done.times(Kind.FENCE, warp))
    assert last - first == pytest.approx(64 * passes + 26, abs=8)


def test_a_load_that_all_lanes_share_returns_two_registers_a_cycle():
    body = "mov.u32 %r1, buffer;" + repeated("ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r1];", 16)
    done = replayed(kernel(body + "st.global.b32 [%p0], %r4;", out(), module=SHARED, block=(256,)))
    assert done.run.grants["load"] == 8 * 16 * 2


def test_a_fence_waits_for_the_warps_stores():
    body = "mov.u32 %r1, buffer; mad.lo.u32 %r1, %t, 16, %r1;"
    stores = repeated("st.shared.v4.b32 [%r1], {%t, %t, %t, %t};", 4)
    done = replayed(kernel(body + stores + "fence.proxy.async.shared::cta; bar.warp.sync -1;", module=SHARED))
    last_pass = done.times(Kind.STORE)[0] + 15 * 3  # 16 passes, one every 3 cycles
    assert done.times(Kind.FENCE)[0] == pytest.approx(last_pass + 26, abs=2)
    assert done.times(Kind.WARP_SYNC)[0] - done.times(Kind.FENCE)[0] == 4


def test_a_named_barrier_lets_go_one_warp_after_another():
    """Warp 1 arrives 20 links later than the others."""
    chain = repeated("fma.rn.f32 %f0, %f0, %f0, %f0;", 20)
    body = f"""ld.global.f32 %f0, [%p0]; setp.lt.u32 %q0, %t, 32; @%q0 bra MEET; setp.gt.u32 %q1, %t, 63; @%q1 bra MEET;
        {chain} st.global.f32 [%p0], %f0; MEET: bar.sync 1, 128;"""
    done = replayed(kernel(body, out(), block=(128,)))
    left = sorted(done.times(Kind.BARRIER_SYNC, warp)[0] for warp in range(4))
    arrived = float(done.run.tokens[0])
    assert left == [arrived + 19 + i for i in range(4)]
    assert done.times(Unit.FMA, 1)[-1] < arrived


MBARRIER = ".shared .align 8 .b64 bar;"
WAIT = "{ .reg .pred P; LAB: mbarrier.try_wait.parity.shared.b64 P, [bar], 0; @P bra DONE; bra LAB; DONE: }"
READY = "setp.ne.u32 %q0, %t, 0; @%q0 bra INIT; mbarrier.init.shared.b64 [bar], 1; INIT: bar.sync 0;"


def test_an_mbarrier_wakes_who_waits():
    body = f"""{READY} setp.lt.u32 %q1, %t, 32; @%q1 bra WAITS; setp.ne.u32 %q2, %t, 32; @%q2 bra END;
        ld.global.f32 %f0, [%p0]; add.f32 %f0, %f0, %f0; st.global.f32 [%p0], %f0;
        mbarrier.arrive.shared.b64 _, [bar]; bra END; WAITS: {WAIT} END:"""
    done = replayed(kernel(body, out(), module=MBARRIER, block=(64,)))
    (arrived,), (left,) = done.times(Kind.ARRIVE, 1), done.times(Kind.WAIT)
    assert left - arrived == pytest.approx(33 + 30, abs=1)


def test_a_phase_that_is_complete_costs_the_question():
    meet = "bar.sync 0;" * 4
    body = f"{READY} @%q0 bra ARRIVED; mbarrier.arrive.shared.b64 _, [bar]; ARRIVED: {meet} {WAIT}"
    done = replayed(kernel(body, module=MBARRIER, block=(32,)))
    assert done.times(Kind.WAIT)[0] - done.times(Kind.BARRIER_SYNC)[-1] == 43


def test_a_bulk_copy_takes_its_latency_and_the_port():
    body = f"""{READY} mov.u32 %r1, buffer; @%q0 bra LOADED; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16384;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%p0], 16384, [bar]; LOADED: {WAIT}"""
    done = replayed(kernel(body, np.zeros(4096, np.float32), module=MBARRIER + SHARED))
    (issued,), (left,) = done.times(Kind.COPY), done.times(Kind.WAIT)
    assert left - issued == pytest.approx(400 + 128 + 30, abs=2)
    assert done.run.grants["tma"] == 128


@pytest.mark.parametrize(("access", "passes"), [("st", 64), ("ld", 0)])
def test_stores_wait_for_what_a_load_writes_and_loads_do_not(access, passes):
    """128 passes of a copy hold half as many of the stores that 8 warps have all the time, as the constant says."""
    many = repeated(f"{access}.shared.b32 " + {"st": "[%r1], %t;", "ld": "%r3, [%r1];"}[access], 200)
    body = f"""{READY} mov.u32 %r1, buffer; @%q0 bra WORK; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16384;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%p0], 16384, [bar];
        WORK: mad.lo.u32 %r1, %t, 4, %r1; {many} fence.proxy.async.shared::cta; {WAIT}"""
    given = kernel(body, np.zeros(4096, np.float32), module=MBARRIER + SHARED, block=(256,))
    ends = []
    for share in (0.0, 0.5):
        done = replayed(
            given,
            store_passes_per_copied_pass=share,
            lsu_pass_interval=1,
            tma_issue_cycles=1,
            mbarrier_ready_wait=1,
        )
        ends.append(max(done.times(Kind.FENCE if access == "st" else Kind.LOAD, warp)[-1] for warp in range(8)))
    assert ends[1] - ends[0] == pytest.approx(passes, abs=3)


def test_a_bulk_reduction_reads_at_its_rate():
    body = """mov.u32 %r1, buffer; mad.lo.u32 %r2, %t, 16, %r1; st.shared.v4.b32 [%r2], {%t, %t, %t, %t};
        setp.ne.u32 %q0, %t, 0; @%q0 bra END;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%p0], [%r1], 16384; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0; END:"""
    done = replayed(kernel(body, np.zeros(4096, np.float32), module=SHARED))
    (issued,), (left,) = done.times(Kind.COPY), done.times(Kind.COPY_WAIT)
    assert left - issued == pytest.approx(90 + 16384 / 16, abs=2)


def test_the_same_seed_is_the_same_run():
    body = "ld.global.f32 %f0, [%p0];" + repeated("fma.rn.f32 %f0, %f0, %f0, %f0;", 400) + "st.global.f32 [%p0], %f0;"
    given = kernel(body, out())
    same, again, other = (replayed(given, seed=seed, stall_probability=0.1).run.cycles for seed in (3, 3, 4))
    assert same == again != other


def test_a_steady_state_needs_tiles():
    done = replayed(kernel("bar.sync 0;"))
    with pytest.raises(TimingError, match="query tiles"):
        replay(done.trace, values(SM100))


def test_a_kernel_of_another_architecture_needs_its_constants():
    from tests.timing.kernels import values

    done = replayed(kernel("bar.sync 0;", arch=SM90), SM90)
    with pytest.raises(ConstantError, match="wgmma_in_flight"):
        replay(done.trace, values(SM100))
