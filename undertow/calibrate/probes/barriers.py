"""Signals from warp to warp: through an mbarrier, and at a named barrier."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64

from undertow.calibrate.probes.context import WARP, Context, clock, first_lane, held, warp_index
from undertow.calibrate.settings import Release

BARRIER = 1  # id of the named barrier; sync_threads has 0
VARIED = 64  # cycles by which a delay varies at most


@cute.jit
def hand_off(s: Constexpr, c: Context, count: Int32):
    """In every trip the first warps arrive, lane 0 of each, and the others wait with all lanes.

    Results: clock before the arrival, or after the wait, of warp w in trip t in slot t * warps + w.
    """
    warp, warps = warp_index(), s.arriving + s.waiting
    ready = cute.recast_ptr(c.smem(), dtype=cutlass.Int64)
    address = held(ready.toint())
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(ready, s.arriving)
        cute.arch.mbarrier_init_fence()
    for trip in cutlass.range(count, unroll=1):
        cute.arch.sync_threads()
        if warp < s.arriving:
            wait_until(clock() + s.delay + warp * s.skew + trip * s.varied % VARIED)
            before = clock()
            arrive(address, first_lane())
            c.record(trip * warps + warp, before, first_lane())
        else:
            if cutlass.const_expr(s.hinted):
                cute.arch.mbarrier_wait(ready, trip & 1)
            else:
                wait_without_hint(address, trip & 1)
            c.record(trip * warps + warp, clock(), first_lane())


def arrive(address: Int32, when: Boolean) -> None:
    """Arrive at an mbarrier, without a branch."""
    cute.arch.inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[address], predicate=when)


def wait_without_hint(address: Int32, parity: Int32) -> None:
    """Try again and again."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; @!p bra AGAIN; }",
        read_only_args=[address, parity],
    )


@cute.jit
def release(s: Constexpr, c: Context, count: Int32):
    """In every trip the warps come to the barrier one after another, and then need a word from shared memory.

    A warp does not stop at a barrier but at the next instruction that may not pass it, so the clock alone would be read
    before the release; what the word costs is known from the same without a barrier.
    Results: clock before the barrier and after the word, of warp w in trip t, from slot 2 * (t * warps + w) on.
    """
    warp, address = warp_index(), held(c.smem().toint() + cute.arch.thread_idx()[0] * 4)
    for trip in cutlass.range(count, unroll=1):
        cute.arch.sync_threads()
        wait_until(clock() + s.delay + warp * s.skew)
        before = clock()
        need_word(s, address)
        after = clock()
        slot = 2 * (trip * s.warps + warp)
        c.record(slot, before, first_lane())
        c.record(slot + 1, after, first_lane())


def need_word(s: Release, address: Int32) -> None:
    """Pass the barrier, load a word, and wait for it."""
    barrier = f"barrier.cta.sync.aligned {BARRIER}, {s.warps * WARP}; " if s.barrier else ""
    cute.arch.inline_ptx(
        f"{{ .reg .b32 t; .reg .pred p; {barrier}"
        "ld.volatile.shared.b32 t, [{$r0}]; setp.eq.b32 p, t, 0x5eed5eed; @p trap; }",
        read_only_args=[address],
    )


@cute.jit
def wait_until(then: Int64):
    """Spin on the clock."""
    now = clock()
    while now < then:
        now = clock()
