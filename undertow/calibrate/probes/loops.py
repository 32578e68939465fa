"""Warps that run a block of instructions again and again: throughputs, latencies of chains, cost of issuing.

A block is PTX text. It has eight 32-bit registers x0 to x7, which live from block to block, scratch t0 to t63, pairs
w0 to w3, predicates p and q, and an ADDRESS. What it computes does not matter; that none of it is optimised away
does, which tests hold against the instruction counts of the SASS.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from undertow.calibrate.probes.context import Context, clock, first_lane, held, nanoseconds, warp_index
from undertow.calibrate.settings import Block

NUM_STATE, NUM_SCRATCH = 8, 64
RESULTS = 4  # of a warp: clock and nanoseconds at the begin, clock and nanoseconds at the end


@cute.jit
def loop(s: Constexpr, c: Context, count: Int32):
    """All warps of the CTA begin together and run the block `count` times.

    Results: 4 of warp w from slot 4w on.
    """
    warp, state = warp_index(), initial_state()
    address = block_address(s, c, warp)
    run_setup(s, address)
    cute.arch.sync_threads()
    began, begin = nanoseconds(), clock()
    if warp % s.every == 0:
        for _ in cutlass.range(count, unroll=1):
            run_block(s, state, address)
    if warp % s.every == 0:
        record_span(c, warp, (begin, began), (clock(), nanoseconds()))
    keep(c, state, count)


@cute.jit
def run_meanwhile(s: Constexpr, c: Context, at: tuple[Int32, Int32], address: Int32):
    """Run the block of a `Beside` for its window, and write begin, end, and how often it ran.

    at: slot of the results, and the iterations of the warps that issue; all warps of the CTA meet first.
    """
    slot, count = at
    state, runs = initial_state(), Int64(0)
    run_setup(s.block, address)
    cute.arch.sync_threads()
    begin = clock()
    end, now = begin + Int64(count) * s.window, begin
    while now < end:
        run_block(s.block, state, address)
        runs += 1
        now = clock()
    for index, value in enumerate((begin, now, runs)):
        c.record(slot + index, value, first_lane())
    keep(c, state, count)


def record_span(c: Context, warp: Int32, begin: tuple[Int64, Int64], end: tuple[Int64, Int64]) -> None:
    """Write clock and nanoseconds of a warp's begin and end."""
    for index, value in enumerate((*begin, *end)):
        c.record(RESULTS * warp + index, value, first_lane())


def initial_state() -> cute.Tensor:
    """The registers x0 to x7, of which the compiler knows nothing."""
    state = cute.make_rmem_tensor(NUM_STATE, Int32)
    for index in range(NUM_STATE):
        state[index] = Int32(cute.arch.thread_idx()[0] + index)
    return state


def block_address(s: Block, c: Context, warp: Int32) -> Int32 | Int64:
    """The thread's ADDRESS in shared or in global memory."""
    if s.space == "global":
        within = cute.arch.block_idx()[0] * s.offset + warp * s.warp_stride + cute.arch.lane_idx() * s.lane_stride
        return c.data.iterator.toint() + Int64(within)
    return held(c.smem().toint() + s.offset + warp * s.warp_stride + cute.arch.lane_idx() * s.lane_stride)


def run_setup(s: Block, address: Int32 | Int64) -> None:
    """What comes once before the loop, by every thread."""
    if s.setup:
        cute.arch.inline_ptx(f"{{ .reg .pred p; {_text(s.setup, 0)}}}", read_only_args=[address])


def run_block(s: Block, state: cute.Tensor, address: Int32 | Int64) -> None:
    """One block, on the state in registers."""
    before = "".join(f"mov.b32 x{i}, {{$r{i}}}; " for i in range(NUM_STATE))
    after = "".join(f"mov.b32 {{$w{i}}}, x{i}; " for i in range(NUM_STATE))
    registers = f".reg .pred p; .reg .pred q; .reg .b32 x<{NUM_STATE}>; .reg .b32 t<{NUM_SCRATCH}>; .reg .b64 w<4>; "
    values = cute.arch.inline_ptx(
        f"{{ {registers}{before}{_text(s.text, NUM_STATE)}{after}}}",
        write_only_types=[Int32] * NUM_STATE,
        read_only_args=[*(state[i] for i in range(NUM_STATE)), address],
    )
    for index in range(NUM_STATE):
        state[index] = values[index]


def _text(lines: tuple[str, ...], address: int) -> str:
    return " ".join(lines).replace("ADDRESS", f"{{$r{address}}}") + " "


def keep(c: Context, state: cute.Tensor, count: Int32) -> None:
    """Make the state count, by a store that does not happen, because no count is negative."""
    total = state[0]
    for index in range(1, NUM_STATE):
        total = total ^ state[index]
    c.record(0, Int64(total), count < 0)
