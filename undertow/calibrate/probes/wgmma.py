"""Matrix instructions of sm_90: their interval, their latency, and what other warps get of the SM beside them."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from undertow.calibrate.probes import copies
from undertow.calibrate.probes.context import (
    ONES,
    Context,
    clock,
    fill_operands,
    first_lane,
    held,
    nanoseconds,
    warp_index,
)
from undertow.calibrate.probes.loops import block_address, record_span, run_meanwhile
from undertow.calibrate.settings import Mma

WARPGROUP_WARPS, WARPGROUP_THREADS = 4, 128
ROWS, K = 64, 64  # of an operand tile of one warpgroup: four instructions of k = 16
K_STEPS = 4
OPERAND_BYTES = 2 * K * (2 * ROWS + 128)  # a of two warpgroups, then b


@dataclass(frozen=True)
class Operands:
    """A warpgroup's accumulator and fragments of a and b."""

    mma: cute.TiledMma
    d: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor

    def issue(self, count: int) -> None:
        """Issue `count` instructions as one group."""
        warpgroup.fence()
        for index in range(count):
            self.step(index)
        warpgroup.commit_group()

    def step(self, index: int) -> None:
        """Issue one instruction."""
        atom, step = cute.make_mma_atom(self.mma.op), index % K_STEPS
        atom.set(warpgroup.Field.ACCUMULATE, True)
        cute.gemm(atom, self.d, self.a[None, None, step], self.b[None, None, step], self.d)


def operands(s: Mma, c: Context, owner: Int32) -> Operands:
    """The operands of a warpgroup: a from row 64 * owner on."""
    in_registers = s.a == "registers"
    source = warpgroup.OperandSource.RMEM if in_registers else warpgroup.OperandSource.SMEM
    major = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (ROWS, s.n, 16), source, major, major)
    mma = cute.make_tiled_mma(op, (2, 1, 1))
    own = mma.get_slice(owner * WARPGROUP_THREADS)
    d = cute.make_rmem_tensor(mma.partition_shape_C((2 * ROWS, s.n)), Float32)
    d.fill(0.0)
    b = own.make_fragment_B(own.partition_B(_rows(c, 2 * ROWS * K * 2, s.n)))
    if in_registers:
        a = cute.make_rmem_tensor(mma.partition_shape_A((2 * ROWS, K)), BFloat16)
        words = cute.recast_tensor(a, Int32)
        for index in range(cute.size(words)):
            words[index] = held(Int32(ONES) + cute.arch.thread_idx()[0] + index)
    else:
        a = own.make_fragment_A(own.partition_A(_rows(c, 0, 2 * ROWS)))
    return Operands(mma, d, a[None, None, None], b[None, None, None])


def _rows(c: Context, offset: int, rows: int) -> cute.Tensor:
    """Rows of 128 swizzled bytes."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    layout = cute.tile_to_shape(atom, (rows, K), order=(0, 1))
    start = cute.recast_ptr(c.smem() + offset, layout.inner, dtype=BFloat16)
    return cute.make_tensor(start, layout.outer)


@cute.jit
def interval(s: Constexpr, c: Context, count: Int32):
    """Groups back to back by all warpgroups of the CTA, one awaited before the next.

    Results: as `loops.loop`.
    """
    warp = warp_index()
    fill_operands(c, OPERAND_BYTES)
    o = operands(s, c, warp // WARPGROUP_WARPS)
    cute.arch.sync_threads()
    began, begin = nanoseconds(), clock()
    for _ in cutlass.range(count, unroll=1):
        o.issue(s.group)
        warpgroup.wait_group(0)
    record_span(c, warp, (begin, began), (clock(), nanoseconds()))
    _keep_sums(c, o, count)


@cute.jit
def latency(s: Constexpr, c: Context, count: Int32):
    """One group at a time, from before its first instruction until it is done, by one warpgroup.

    Results: the clock before and after trip t by warp 0, in slots 2t and 2t + 1.
    """
    warp = warp_index()
    fill_operands(c, OPERAND_BYTES)
    o = operands(s, c, warp // WARPGROUP_WARPS)
    for trip in cutlass.range(count, unroll=1):
        cute.arch.sync_threads()
        begin = clock()
        o.issue(s.group)
        warpgroup.wait_group(0)
        end = clock()
        is_first = (warp == 0) & first_lane()
        c.record(2 * trip, begin, is_first)
        c.record(2 * trip + 1, end, is_first)
    _keep_sums(c, o, count)


@cute.jit
def issue(s: Constexpr, c: Context, count: Int32):
    """One group, and the clock after each of its instructions is issued, by one warpgroup.

    Results: the clock of warp 0 before the first, then after each.
    """
    warp = warp_index()
    fill_operands(c, OPERAND_BYTES)
    o = operands(s, c, warp // WARPGROUP_WARPS)
    cute.arch.sync_threads()
    warpgroup.fence()
    clocks = [clock()]
    for index in cutlass.range_constexpr(s.group):
        o.step(index)
        clocks.append(clock())
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    for index, value in enumerate(clocks):
        c.record(index, value, (warp == 0) & first_lane())
    _keep_sums(c, o, count)


@cute.jit
def beside(s: Constexpr, c: Context, count: Int32):
    """Two warpgroups issue groups, and the warps behind them run a block meanwhile, for less time than the groups take.

    Results: clock at the begin and after every group by warpgroup w, from slot w * (count + 1) on; then of every other
    warp its begin, its end, and how often it ran the block; then of the warp that copies, as `copies.meanwhile`.
    """
    warp = warp_index()
    fill_operands(c, OPERAND_BYTES)
    issuing = s.mma.issuers * WARPGROUP_WARPS
    places = copies.set_up(s.copies, c, s.copies_at) if cutlass.const_expr(s.copies is not None) else (0, 0)
    if warp < issuing:
        o = operands(s.mma, c, warp // WARPGROUP_WARPS)
        is_first = (warp % WARPGROUP_WARPS == 0) & first_lane()
        slot = warp // WARPGROUP_WARPS * (count + 1)
        cute.arch.sync_threads()
        c.record(slot, clock(), is_first)
        for trip in cutlass.range(count, unroll=1):
            o.issue(s.mma.group)
            warpgroup.wait_group(0)
            c.record(slot + 1 + trip, clock(), is_first)
        _keep_sums(c, o, count)
    else:
        slot = s.mma.issuers * (count + 1) + (warp - issuing) * 3
        if warp < issuing + s.warps:
            run_meanwhile(s, c, (slot, count), block_address(s.block, c, warp))
        elif cutlass.const_expr(s.copies is not None):
            copies.meanwhile(s.copies, c, (slot, count), places, s.window)


def _keep_sums(c: Context, o: Operands, count: Int32) -> None:
    total = Float32(0.0)
    for index in range(cute.size(o.d)):
        total += o.d[index]
    c.record(0, Int64(total.to(Int32)), count < 0)
