"""Bulk copies between shared and global memory by one thread of every CTA: how long one takes, and many in a row."""

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
    barriers, stages = _set_up(s, c)
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
    barriers, stages = _set_up(s, c)
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
def _set_up(s: Constexpr, c: Context):
    """Barriers of one arrival, and zeros in the stages; addresses of both."""
    barriers = cute.recast_ptr(c.smem(), dtype=cutlass.Int64)
    stages = c.smem() + STAGES_OFFSET
    words = cute.make_tensor(cute.recast_ptr(stages, dtype=Int32), cute.make_layout(s.depth * s.size // 4))
    thread, threads = cute.arch.thread_idx()[0], c.probe.threads
    for index in cutlass.range(s.depth * s.size // 4 // threads, unroll=1):
        words[index * threads + thread] = Int32(0)
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
