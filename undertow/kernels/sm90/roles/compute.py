"""The compute warps: two warpgroups of 64 keys each that take turns at the tensor cores.

A burst of tile t issues, in this order, the dQ that is due, dV_t, dK_t, S_{t+1} and dP_{t+1}; then the turn passes and
the warpgroup does the softmax of t + 1 while the other one has its burst. dQ needs the dS of both warpgroups: that of
tile t is there when warpgroup 1 has its burst t, and when warpgroup 0 has its burst t + 1. So no warpgroup ever waits
for anything but its turn, and two stages of sdS are enough, because every reader of a stage has finished before the
turn passes. This role owns the proxy fences between its stores to sdS and sdQ and who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from undertow.kernels.sm100.instructions import shared_load, store_vector
from undertow.kernels.sm90.bind import arrive_of, sync_of
from undertow.kernels.sm90.context import ComputeContext
from undertow.kernels.sm90.gemms import Gemms, gemms, words
from undertow.kernels.sm90.instructions import load_matrices, store_matrices
from undertow.kernels.sm90.plan import DS_STAGES, LOAD_STAGES, WARPGROUP_THREADS
from undertow.kernels.sm90.softmax import column_of, masked, packed_pairs, probabilities, row_of, statistic_of
from undertow.plan.tiles import Span

import os
SW = dict(x.split("=") for x in os.environ.get("SW","").split(",") if x)
CHUNK = 16  # registers of an accumulator that are worked on together: 32 query columns
VECTOR = 4
PANEL = 128 * 128  # bytes of a panel of sdS
Q, DO = "load_compute_q", "load_compute_do"


@dataclass(frozen=True)
class Registers:
    """What a thread keeps from burst to burst. k: of S; p, ds: of dV and dK; dv, dk: their sums."""

    k: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    dv: cute.Tensor
    dk: cute.Tensor


@cute.jit
def compute(c: ComputeContext, dv: cute.Tensor, dk: cute.Tensor):
    """Process all query tiles in order; leaves the warpgroup's part of dV and of dK without its scale."""
    g = gemms(c.smem, c.owner)
    r = Registers(g.s.operand(c.plan), g.dv.operand(c.plan), g.dk.operand(c.plan), dv, dk)
    _clear_late_tile(c)
    if c.owner == 1:
        arrive_of(c.plan, "turn", 1 - c.owner)
    _first_tile(c, g, r)
    trip = Int32(1)
    plain = _unmasked(c)
    for head in cutlass.range(c.work.group, unroll=1):
        first = c.work.first_tile + Int32(head == 0)
        unmasked = cutlass.max(first, plain.first)
        for tile in cutlass.range(first, unmasked, unroll=1):
            _next_tile(c, g, r, trip, tile, True)
            trip += 1
        for tile in cutlass.range(unmasked, plain.end, unroll=1):
            _next_tile(c, g, r, trip, tile, False)
            trip += 1
        if cutlass.const_expr(c.plan.attention.left):
            for tile in cutlass.range(cutlass.max(unmasked, plain.end), c.work.end_tile, unroll=1):
                _next_tile(c, g, r, trip, tile, True)
                trip += 1
    _last_burst(c, g, r, trip)


def _unmasked(c: ComputeContext) -> Span:
    """The query tiles that need no mask; none where the CTA has keys that do not exist, which are masked too."""
    is_whole = (c.work.kv_tile + 1) * c.plan.tile_n <= c.work.k.used
    first, end = (Int32(cutlass.select_(is_whole, x, c.work.end_tile)) for x in (c.work.first_unmasked, c.work.end_unmasked))
    return Span(first, end)


@cute.jit
def _first_tile(c: ComputeContext, g: Gemms, r: Registers):
    """K to registers, S and dP of the first tile, and its softmax."""
    r.dv.fill(0.0)
    r.dk.fill(0.0)
    c.channels[Q].wait("full", 0)
    k = words(r.k)
    for step, address in enumerate(_matrix_rows(c, c.smem.address("sK"))):
        for index, word in enumerate(load_matrices(address)):
            k[4 * step + index] = word
    s, dp = g.s.accumulator(), g.dp.accumulator()
    c.channels[DO].wait("full", 0)
    _start_from_d(c, dp, 0)
    g.s.issue(s, r.k, 0, False)
    g.dp.issue(dp, 0, 0, "nd" not in SW)
    _softmax(c, r, (s, dp), (Int32(0), c.work.first_tile), True)


@cute.jit
def _next_tile(c: ComputeContext, g: Gemms, r: Registers, trip: Int32, tile: Int32, is_masked: Constexpr):
    """The burst of the tile before, and the softmax of `tile`."""
    slot, before = trip % LOAD_STAGES, (trip - 1) % LOAD_STAGES
    s, dp, dq = g.s.accumulator(), g.dp.accumulator(), g.dq.accumulator()
    sync_of(c.plan, "turn", c.owner)
    g.dq.issue(dq, (trip + c.owner) % DS_STAGES, 0, False)
    g.dv.issue(r.dv, r.p, before, True)
    g.dk.issue(r.dk, r.ds, before, True)
    warpgroup.wait_group(2)
    _stage_dq(c, dq)
    c.channels[Q].wait("full", trip)
    if cutlass.const_expr("sl" in SW):
        warpgroup.wait_group(0)
        g.s.issue(s, r.k, slot, False)
    elif cutlass.const_expr("sm" in SW):
        warpgroup.wait_group(1)
        g.s.issue(s, r.k, slot, False)
        warpgroup.wait_group(1)
    else:
        g.s.issue(s, r.k, slot, False)
        warpgroup.wait_group(1)
    c.channels[Q].arrive("empty", trip - 1)
    c.channels[DO].arrive("empty", trip - 1)
    c.channels[DO].wait("full", trip)
    if cutlass.const_expr("nd" not in SW):
        _start_from_d(c, dp, trip)
    g.dp.issue(dp, 0, slot, "nd" not in SW)
    arrive_of(c.plan, "turn", 1 - c.owner)
    _softmax(c, r, (s, dp), (trip, tile), is_masked)


@cute.jit
def _last_burst(c: ComputeContext, g: Gemms, r: Registers, trip: Int32):
    """What is left when there is no next tile; warpgroup 0 has one more dQ than that."""
    before = (trip - 1) % LOAD_STAGES
    dq = g.dq.accumulator()
    sync_of(c.plan, "turn", c.owner)
    g.dq.issue(dq, (trip + c.owner) % DS_STAGES, 0, False)
    g.dv.issue(r.dv, r.p, before, True)
    g.dk.issue(r.dk, r.ds, before, True)
    warpgroup.wait_group(2)
    arrive_of(c.plan, "turn", 1 - c.owner)
    _stage_dq(c, dq)
    warpgroup.wait_group(0)
    if c.owner == 0:
        sync_of(c.plan, "turn", c.owner)
        last = g.dq.accumulator()
        g.dq.issue(last, (trip + 1) % DS_STAGES, 0, False)
        warpgroup.wait_group(0)
        _stage_dq(c, last)


def _softmax(c: ComputeContext, r: Registers, of: tuple, at: tuple[Int32, Int32], is_masked: bool) -> None:
    """P and dS of a tile, into registers for dV and dK and into sdS for dQ. of: S and dP in flight; at: trip, tile."""
    (s, dp), (trip, tile) = of, at
    p, ds = words(r.p), words(r.ds)
    rows = _matrix_rows(c, c.smem.address("sdS", trip % DS_STAGES))
    chunks = range(0, cute.size(s), CHUNK)
    warpgroup.wait_group(1)
    weights = {}
    if "il" in SW:
        chunks = list(chunks)
        lead = int(SW["il"])
        for n in range(len(chunks) + lead):
            if n < len(chunks):
                start = chunks[n]
                weights[start] = _probabilities(c, s, start, (trip, tile), is_masked)
                for index, word in enumerate(packed_pairs(weights[start], c.plan.dtype)):
                    p[start // 2 + index] = word
            if n == lead - 1:
                warpgroup.wait_group(0)
            if n >= lead:
                start = chunks[n - lead]
                values = [weight * dp[start + index] for index, weight in enumerate(weights[start])]
                new = packed_pairs(values, c.plan.dtype)
                for index, word in enumerate(new):
                    ds[start // 2 + index] = word
                for index in range(0, len(new), 4):
                    panel, step = divmod((start // 2 + index) // 4, 4)
                    store_matrices(rows[step] + panel * PANEL, new[index : index + 4])
        cute.arch.fence_view_async_shared()
        return
    for start in chunks:
        weights[start] = _probabilities(c, s, start, (trip, tile), is_masked)
        for index, word in enumerate(packed_pairs(weights[start], c.plan.dtype)):
            p[start // 2 + index] = word
        if start == 0:
            warpgroup.wait_group(0)
    for start in chunks:
        if "nd" in SW:
            d = _statistics(c, "sD", trip, start)
            values = [weight * (dp[start + index] + d[statistic_of(index)]) for index, weight in enumerate(weights[start])]
        else:
            values = [weight * dp[start + index] for index, weight in enumerate(weights[start])]
        new = packed_pairs(values, c.plan.dtype)
        for index, word in enumerate(new):
            ds[start // 2 + index] = word
        for index in range(0, len(new), 4):
            panel, step = divmod((start // 2 + index) // 4, 4)
            store_matrices(rows[step] + panel * PANEL, new[index : index + 4])
    cute.arch.fence_view_async_shared()


def _probabilities(c: ComputeContext, s: cute.Tensor, start: int, at: tuple, is_masked: bool) -> list[Float32]:
    trip, tile = at
    registers = range(start, start + CHUNK)
    lse = _statistics(c, "sLSE", trip, start)
    scores = [s[register] for register in registers]
    of_each = [lse[statistic_of(register - start)] for register in registers]
    p = probabilities(scores, of_each, c.scale_log2)
    if is_masked:
        columns, rows = [column_of(register) for register in registers], [row_of(register) for register in registers]
        p = masked(p, columns, rows, _seen(c, tile))
    return p


def _seen(c: ComputeContext, tile: Int32) -> list[tuple[Int32, Int32]]:
    """For each of the thread's keys the columns that see it, counted from the thread's first column; none if absent."""
    first_column = tile * c.plan.tile_m + c.thread % 4 * 2
    out = []
    for half in range(2):
        key = c.work.kv_tile * c.plan.tile_n + c.owner * 64 + c.thread // 32 * 16 + c.thread % 32 // 4 + half * 8
        rows = c.work.tiling.rows_that_see(key)
        first = Int32(0) if rows.first is None else rows.first - first_column
        end = Int32(c.plan.tile_m) if rows.end is None else rows.end - first_column
        out.append((first, Int32(cutlass.select_(key < c.work.k.used, end, Int32(0)))))
    return out


def _start_from_d(c: ComputeContext, dp: cute.Tensor, trip: int | Int32) -> None:
    """Let the dP accumulator begin with -D, so that the GEMM leaves dP - D. The workspace holds -D."""
    for start in range(0, cute.size(dp), CHUNK):
        d = _statistics(c, "sD", trip, start)
        for index in range(CHUNK):
            dp[start + index] = d[statistic_of(index)]


def _statistics(c: ComputeContext, region: str, trip: int | Int32, start: int) -> list[Float32]:
    """LSE or D of the query columns of a chunk, in the order of `statistic_of`."""
    pointer = c.smem.pointer(region, trip % LOAD_STAGES) + cute.assume(c.thread % 4 * VECTOR, divby=VECTOR)
    out: list[Float32] = []
    for group in range(start // 8, (start + CHUNK) // 8):
        out += shared_load(pointer + group * 16, VECTOR)
    return out


def _stage_dq(c: ComputeContext, dq: cute.Tensor) -> None:
    """Hand the share of dQ over to the reduce warp, in the order of the accumulator."""
    sync_of(c.plan, "dq_empty", c.owner)
    address = c.smem.address("sdQ", c.owner) + c.thread * 16
    for group in range(0, cute.size(dq), VECTOR):
        store_vector("shared", address + group // VECTOR * 16 * WARPGROUP_THREADS, [dq[group + i] for i in range(VECTOR)])
    cute.arch.fence_view_async_shared()
    arrive_of(c.plan, "dq_full", c.owner)


@cute.jit
def _clear_late_tile(c: ComputeContext):
    """Zeros for the dQ of the tile before the first, which warpgroup 0 computes and nobody adds."""
    if c.owner == 0:
        address = c.smem.address("sdS", DS_STAGES - 1) + c.thread * 16
        zero = Int32(0)
        for step in range(8):
            store_vector("shared", address + step * 16 * WARPGROUP_THREADS, [zero] * 4)
        cute.arch.fence_view_async_shared()


def _matrix_rows(c: ComputeContext, region: Int32) -> list[Int32]:
    """Addresses for `store_matrices`: 16 rows of the warp by 16 columns each, under the 128-byte swizzle.

    region: rows of 128 bytes, and as many panels as there are columns of 64.
    """
    row = c.owner * 64 + c.thread // 32 * 16 + c.thread % 16
    swizzle = (c.thread % 32 // 16) ^ (c.thread % 8)
    start = region + row * 128
    return [start + ((2 * step) ^ swizzle) * 16 for step in range(4)]
