"""Bulk copies between shared and global memory by one thread of every CTA: one at a time, many in a row, meanwhile."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from undertow.calibrate.probes.context import Context, clock, first_lane, held, nanoseconds
from undertow.calibrate.probes.loops import record_span
from undertow.calibrate.settings import Copy

STAGES_OFFSET = 1024  # bytes; the barriers lie before
_TEXT = {
    "load": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
    "store": "cp.async.bulk.global.shared::cta.bulk_group [{$r1}], [{$r0}], {$r2};",
    "reduce": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r1}], [{$r0}], {$r2};",
}


@cute.jit
def single(s: Constexpr, c: Context, count: Int32):
    """One copy at a time.

    Results of trip t: clock before it, when it has been issued, and when it is there (load) or has been read, from
    slot 3t on.
    """
    barriers, stages = set_up(s, c, 0)
    if first_lane():
        for trip in cutlass.range(count, unroll=1):
            before = clock()
            start(s, c, (barriers, stages), trip)
            issued = clock()
            finish(s, barriers, trip, 0)
            after = clock()
            for index, value in enumerate((before, issued, after)):
                c.record(3 * trip + index, value)
        _drain(s)


@cute.jit
def stream(s: Constexpr, c: Context, count: Int32):
    """`count` copies, `depth` of them in flight.

    Results: as `loops.loop`, of one warp.
    """
    barriers, stages = set_up(s, c, 0)
    if first_lane():
        began, begin = nanoseconds(), clock()
        if cutlass.const_expr(s.kind == "load"):
            for trip in range(s.depth):
                start(s, c, (barriers, stages), Int32(trip))
            for trip in cutlass.range(count, unroll=1):
                finish(s, barriers, trip, 0)
                if trip + s.depth < count:
                    start(s, c, (barriers, stages), trip + s.depth)
        else:
            for trip in cutlass.range(count, unroll=1):
                start(s, c, (barriers, stages), trip)
                finish(s, barriers, trip, s.depth - 1)
            _drain(s)
        record_span(c, Int32(0), (begin, began), (clock(), nanoseconds()))


@cute.jit
def meanwhile(s: Constexpr, c: Context, at: tuple[Int32, Int32], places: tuple[Int32, Int32], window: Int32):
    """Copies, `depth` of them in flight, for a window of cycles.

    at: slot of the results, and the iterations of the warps that issue matrix instructions, `window` cycles each; all
    warps of the CTA meet first. Results: clock when the first is done, at the end, and how many are done by then.
    """
    slot, count = at
    done = Int64(0)
    cute.arch.sync_threads()
    if first_lane():
        for trip in range(s.depth if s.kind == "load" else s.depth - 1):
            start(s, c, places, Int32(trip))
        trip = Int32(0)
        begin = now = clock()
        end = begin + Int64(count) * window
        while now < end:
            if cutlass.const_expr(s.kind == "load"):
                finish(s, places[0], trip, 0)
                start(s, c, places, trip + s.depth)
            else:
                start(s, c, places, trip + s.depth - 1)
                finish(s, places[0], trip, s.depth - 1)
            now = clock()
            if trip == 0:
                begin = now
            trip += 1
        done = Int64(trip - 1)
        for index, value in enumerate((begin, now, done)):
            c.record(slot + index, value)
        if cutlass.const_expr(s.kind == "load"):
            for left in range(s.depth):
                finish(s, places[0], trip + left, 0)
        _drain(s)


@cute.jit
def set_up(s: Constexpr, c: Context, at: Constexpr):
    """Barriers of one arrival, and zeros in the stages behind them, from byte `at` on; addresses of both."""
    barriers = cute.recast_ptr(c.smem() + at, dtype=cutlass.Int64)
    stages = c.smem() + (at + STAGES_OFFSET)
    size = s.depth * s.size // 4
    words = cute.make_tensor(cute.recast_ptr(stages, dtype=Int32), cute.make_layout(size))
    thread, threads = cute.arch.thread_idx()[0], c.probe.threads
    for index in cutlass.range(thread, size, threads, unroll=1):
        words[index] = Int32(0)
    if thread == 0:
        for stage in range(s.depth):
            cute.arch.mbarrier_init(barriers + stage, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    return held(barriers.toint()), held(stages.toint())


def start(s: Copy, c: Context, at: tuple[Int32, Int32], trip: Int32) -> None:
    """Issue the copy of a trip. at: addresses of the barriers and of the stages."""
    barriers, stages = at
    cta, _, _ = cute.arch.block_idx()
    tile = trip % s.tiles if s.together else cta * s.tiles + trip % s.tiles
    there = c.data.iterator.toint() + Int64(tile) * s.size
    stage = trip % s.depth
    here, barrier, size = stages + stage * s.size, barriers + stage * 8, Int32(s.size)
    if s.kind == "load":
        cute.arch.inline_ptx(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[barrier, size]
        )
        cute.arch.inline_ptx(_TEXT["load"], read_only_args=[here, there, size, barrier])
    else:
        cute.arch.inline_ptx(_TEXT[s.kind], read_only_args=[here, there, size])
        cute.arch.cp_async_bulk_commit_group()


def finish(s: Copy, barriers: Int32, trip: Int32, in_flight: int) -> None:
    """Wait until the load of a trip is there, or until at most `in_flight` others have not been read."""
    if s.kind == "load":
        barrier = cute.make_ptr(Int64, barriers + trip % s.depth * 8, cute.AddressSpace.smem, assumed_align=8)
        cute.arch.mbarrier_wait(barrier, trip // s.depth & 1)
    else:
        cute.arch.cp_async_bulk_wait_group(in_flight, read=True)


def _drain(s: Copy) -> None:
    if s.kind != "load":
        cute.arch.cp_async_bulk_wait_group(0)
