"""Matrix instructions and tensor memory of sm_100a: as `wgmma`, and loads and stores of tensor memory.

One thread of warp 0 issues; an instruction has 128 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32
from cutlass.cute.nvgpu import tcgen05

from undertow.calibrate.probes import copies
from undertow.calibrate.probes.context import (
    Context,
    clock,
    fill_operands,
    held,
    nanoseconds,
    warp_index,
)
from undertow.calibrate.probes.loops import (
    block_address,
    initial_state,
    keep,
    record_span,
    run_block,
    run_meanwhile,
)
from undertow.calibrate.settings import Mma
from undertow.kernels.sm100.instructions import mma, tmem_store

ROWS, K, K_STEPS = 128, 64, 4
OPERAND_BYTES = 2 * K * 2 * ROWS  # a, then b
BARRIERS_OFFSET = OPERAND_BYTES  # two, and the address of the allocation behind them
SMEM_BYTES = OPERAND_BYTES + 1024
COLUMNS = 512  # all of tensor memory
A_COLUMN, BLOCK_COLUMN = 256, 384  # of operand a in tensor memory, and of what blocks load and store
LANE = 1 << 16  # of a TMEM address
# K-major operands of 128-byte rows under the 128-byte swizzle; PTX ISA, "tcgen05 shared memory descriptor"
DESCRIPTOR = 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61


@dataclass(frozen=True)
class Issuer:
    """tmem: address of the allocation. operands: of operand a in shared memory. barriers: two, one arrival each."""

    tmem: Int32
    operands: Int32
    barriers: cute.Pointer

    def issue(self, s: Mma, trip: Int32) -> None:
        """Issue a group and commit it; the first sum begins with zero."""
        for index in range(s.group):
            self.step(s, index, trip > 0 if index == 0 else True)
        tcgen05.commit(self.barriers + (trip & 1))

    def step(self, s: Mma, index: int, accumulate: Any) -> None:
        """Issue one instruction."""
        step = index % K_STEPS
        b = self._descriptor(2 * ROWS * K, step)
        a = self.tmem + (A_COLUMN + step * 8) if s.a == "tensor" else self._descriptor(0, step)
        mma(self.tmem, a, b, 1 << 4 | 1 << 7 | 1 << 10 | (s.n >> 3) << 17 | (ROWS >> 4) << 24, accumulate)

    def wait(self, trip: Int32) -> None:
        """Until the group of a trip is done."""
        cute.arch.mbarrier_wait(self.barriers + (trip & 1), trip >> 1 & 1)

    def _descriptor(self, offset: int, step: int) -> Int64:
        high, low = divmod(DESCRIPTOR, 1 << 32)
        return Int64(high << 32) | Int64(Uint32((self.operands >> 4) + (low + (offset + step * 32 >> 4))))


@cute.jit
def set_up(c: Context, warp: Int32):
    """Operands, barriers, and all of tensor memory, whose lanes hold numbers."""
    fill_operands(c, OPERAND_BYTES)
    barriers = cute.recast_ptr(c.smem() + BARRIERS_OFFSET, dtype=cutlass.Int64)
    place = cute.recast_ptr(c.smem() + BARRIERS_OFFSET + 16, dtype=Int32)
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, place)
        cute.arch.relinquish_tmem_alloc_permit()
        with cute.arch.elect_one():
            for index in range(2):
                cute.arch.mbarrier_init(barriers + index, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tmem = held(cute.make_tensor(place, cute.make_layout(1))[0])
    if warp < 4:
        for first in (A_COLUMN, BLOCK_COLUMN, BLOCK_COLUMN + 32):
            tmem_store(tmem + warp * (32 * LANE) + first, [Int32(0x3F803F80)] * 32)
        cute.arch.fence_view_async_tmem_store()
    tcgen05_fence()
    cute.arch.sync_threads()
    return Issuer(tmem, held(c.smem().toint()), barriers)


def tcgen05_fence() -> None:
    """Order what other warps do to tensor memory before and after a barrier."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def tensor_address(i: Issuer, warp: Int32) -> Int32:
    """Where blocks load from and store to tensor memory: the warp's lanes."""
    return i.tmem + warp % 4 * (32 * LANE) + BLOCK_COLUMN


@cute.jit
def tear_down(i: Issuer, warp: Int32):
    """Free tensor memory, when all warps are done with it."""
    tcgen05_fence()
    cute.arch.sync_threads()
    if warp == 0:
        pointer = cute.make_ptr(Int32, i.tmem, cute.AddressSpace.tmem, assumed_align=16)
        cute.arch.dealloc_tmem(pointer, COLUMNS)


@cute.jit
def interval(s: Constexpr, c: Context, count: Int32):
    """Groups back to back, at most two of them in flight.

    Results: as `loops.loop`, of warp 0.
    """
    warp = warp_index()
    i = set_up(c, warp)
    if warp == 0:
        with cute.arch.elect_one():
            began, begin = nanoseconds(), clock()
            for trip in cutlass.range(count, unroll=1):
                i.issue(s, trip)
                if trip > 0:
                    i.wait(trip - 1)
            i.wait(count - 1)
            for index, value in enumerate((begin, began, clock(), nanoseconds())):
                c.record(index, value)
    tear_down(i, warp)


@cute.jit
def latency(s: Constexpr, c: Context, count: Int32):
    """One group at a time, from before its first instruction until its commit is seen.

    Results: the clock before and after trip t, in slots 2t and 2t + 1.
    """
    warp = warp_index()
    i = set_up(c, warp)
    if warp == 0:
        with cute.arch.elect_one():
            for trip in cutlass.range(count, unroll=1):
                begin = clock()
                i.issue(s, trip)
                i.wait(trip)
                end = clock()
                c.record(2 * trip, begin)
                c.record(2 * trip + 1, end)
    tear_down(i, warp)


@cute.jit
def issue(s: Constexpr, c: Context, count: Int32):
    """One group, and the clock after each of its instructions is issued.

    Results: the clock before the first, then after each.
    """
    warp = warp_index()
    i = set_up(c, warp)
    if warp == 0:
        with cute.arch.elect_one():
            clocks = [clock()]
            for index in cutlass.range_constexpr(s.group):
                i.step(s, index, index > 0)
                clocks.append(clock())
            tcgen05.commit(i.barriers)
            i.wait(Int32(0))
            for index, value in enumerate(clocks):
                c.record(index, value)
    tear_down(i, warp)


@cute.jit
def beside(s: Constexpr, c: Context, count: Int32):
    """One warp issues groups, and the warps behind the first four run a block meanwhile.

    Results: clock at the begin and after every group, in count + 1 slots; then as `wgmma.beside`.
    """
    warp = warp_index()
    i = set_up(c, warp)
    places = copies.set_up(s.copies, c, s.copies_at) if cutlass.const_expr(s.copies is not None) else (0, 0)
    if warp == 0:
        cute.arch.sync_threads()
        with cute.arch.elect_one():
            c.record(0, clock())
            for trip in cutlass.range(count, unroll=1):
                i.issue(s.mma, trip)
                if trip > 0:
                    i.wait(trip - 1)
                    c.record(trip, clock())
            i.wait(count - 1)
            c.record(count, clock())
    elif warp >= 4 and warp < 4 + s.warps:
        slot = count + 1 + (warp - 4) * 3
        at = (
            tensor_address(i, warp)
            if cutlass.const_expr(s.block.space == "tensor")
            else block_address(s.block, c, warp)
        )
        run_meanwhile(s, c, (slot, count), at)
    else:
        if cutlass.const_expr(s.copies is None):
            cute.arch.sync_threads()
        else:
            if warp >= 4:
                copies.meanwhile(s.copies, c, (count + 1 + s.warps * 3, count), places, s.window)
            else:
                cute.arch.sync_threads()
    tear_down(i, warp)


@cute.jit
def loop(s: Constexpr, c: Context, count: Int32):
    """`loops.loop` whose ADDRESS is the warp's lanes of tensor memory.

    Results: as there.
    """
    warp, state = warp_index(), initial_state()
    i = set_up(c, warp)
    address = tensor_address(i, warp)
    cute.arch.sync_threads()
    began, begin = nanoseconds(), clock()
    for _ in cutlass.range(count, unroll=1):
        run_block(s, state, address)
    record_span(c, warp, (begin, began), (clock(), nanoseconds()))
    keep(c, state, count)
    tear_down(i, warp)
