"""The compute warps: two warpgroups of 64 keys each that take turns at the tensor cores.

A burst of tile t issues, in this order, the dQ that is due, dV_t, dK_t, S_{t+1} and dP_{t+1}; then the turn passes and
the warpgroup does the softmax of t + 1 while the other one has its burst. Everything between two GEMMs of a burst hides
behind the one before, which matters, because a warp that issues a wgmma stands still until the ones before it have
nearly finished. So nothing is read from shared memory here but by the tensor cores, LSE and D included.

dQ needs the dS of both warpgroups: that of tile t is there when warpgroup 1 has its burst t, and when warpgroup 0 has
its burst t + 1. So no warpgroup ever waits for anything but its turn, and two stages of sdS are enough. This role owns
the proxy fences between its stores to sdS and sdQ and who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from undertow.kernels.events import span
from undertow.kernels.sm90.bind import arrive_of, sync_of
from undertow.kernels.sm90.context import ComputeContext
from undertow.kernels.sm90.gemms import Gemms, add_number, gemms, words
from undertow.kernels.sm90.instructions import store_matrices
from undertow.kernels.sm90.plan import DS_STAGES, LOAD_STAGES, WARPGROUP_ROWS, WARPGROUP_THREADS
from undertow.kernels.sm90.softmax import bounded, masked, packed_pairs, probabilities
from undertow.kernels.sm100.instructions import store_vector
from undertow.plan.tiles import Span

CHUNK = 16  # registers of an accumulator that are worked on together: 32 query columns
EARLY_CHUNKS = 2  # of P, while dP is still being computed
VECTOR_BYTES = 16
PANEL_BYTES = 128 * 128  # of sdS: 64 query columns of all keys
LSE, D = 0, 1  # the numbers of a row, as `plan.row_term_index` counts them
Q, DO = "load_compute_q", "load_compute_do"


@dataclass(frozen=True)
class Registers:
    """What a thread keeps from burst to burst. p, ds: operands of the dV and dK GEMMs; dv, dk: their sums."""

    p: cute.Tensor
    ds: cute.Tensor
    dv: cute.Tensor
    dk: cute.Tensor


@cute.jit
def compute(c: ComputeContext, dv: cute.Tensor, dk: cute.Tensor):
    """Process all query tiles in order; leaves the warpgroup's part of dV and of dK without its scale."""
    g = gemms(c.smem, c.owner)
    r = Registers(g.dv.operand(c.plan), g.dk.operand(c.plan), dv, dk)
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
            _next_tile(c, g, r, (trip, tile), True)
            trip += 1
        for tile in cutlass.range(unmasked, plain.end, unroll=1):
            _next_tile(c, g, r, (trip, tile), False)
            trip += 1
        if cutlass.const_expr(c.plan.attention.left):
            for tile in cutlass.range(cutlass.max(unmasked, plain.end), c.work.end_tile, unroll=1):
                _next_tile(c, g, r, (trip, tile), True)
                trip += 1
    _last_burst(c, g, r, trip)


def _unmasked(c: ComputeContext) -> Span:
    """The query tiles that need no mask; none where the CTA has keys that do not exist, which are masked too."""
    is_whole = (c.work.kv_tile + 1) * c.plan.tile_n <= c.work.k.used
    first, end = c.work.first_unmasked, c.work.end_unmasked
    return Span(*(Int32(cutlass.select_(is_whole, bound, c.work.end_tile)) for bound in (first, end)))


@cute.jit
def _first_tile(c: ComputeContext, g: Gemms, r: Registers):
    """S and dP of the first tile, and its softmax."""
    r.dv.fill(0.0)
    r.dk.fill(0.0)
    s, dp = g.s.accumulator(), g.dp.accumulator()
    c.channels[Q].wait("full", 0)
    g.s.issue(s, 0, 0, False, add_number(g, c.plan, LSE))
    c.channels[DO].wait("full", 0)
    g.dp.issue(dp, 0, 0, False, add_number(g, c.plan, D))
    _softmax(c, r, (s, dp), (Int32(0), c.work.first_tile), True)


@cute.jit
def _next_tile(c: ComputeContext, g: Gemms, r: Registers, at: tuple[Int32, Int32], is_masked: Constexpr):
    """The burst of the tile before, and the softmax of this one. at: trip and query tile."""
    trip, _ = at
    slot, before = trip % LOAD_STAGES, (trip - 1) % LOAD_STAGES
    s, dp, dq = g.s.accumulator(), g.dp.accumulator(), g.dq.accumulator()
    sync_of(c.plan, "turn", c.owner)
    g.dq.issue(dq, (trip + c.owner) % DS_STAGES, 0, False)
    g.dv.issue(r.dv, r.p, before, True)
    warpgroup.wait_group(1)
    _stage_dq(c, dq)
    g.dk.issue(r.dk, r.ds, before, True)
    c.channels[Q].wait("full", trip)
    warpgroup.wait_group(1)
    g.s.issue(s, 0, slot, False, add_number(g, c.plan, LSE))
    c.channels[DO].arrive("empty", trip - 1)
    warpgroup.wait_group(1)
    c.channels[Q].arrive("empty", trip - 1)
    c.channels[DO].wait("full", trip)
    g.dp.issue(dp, 0, slot, False, add_number(g, c.plan, D))
    arrive_of(c.plan, "turn", 1 - c.owner)
    _hand_over_dq(c)
    _softmax(c, r, (s, dp), at, is_masked)


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
    _hand_over_dq(c)
    warpgroup.wait_group(0)
    if c.owner == 0:
        sync_of(c.plan, "turn", c.owner)
        late = g.dq.accumulator()
        g.dq.issue(late, (trip - 1) % DS_STAGES, 0, False)
        warpgroup.wait_group(0)
        _stage_dq(c, late)
        _hand_over_dq(c)


def _softmax(c: ComputeContext, r: Registers, of: tuple, at: tuple[Int32, Int32], is_masked: bool) -> None:
    """P and dS of a tile, into registers for dV and dK and into sdS for dQ. of: S and dP in flight; at: trip, tile."""
    (s, dp), (trip, tile) = of, at
    p, ds = words(r.p), words(r.ds)
    rows = _matrix_rows(c, c.smem.address("sdS", trip % DS_STAGES))
    chunks = range(0, cute.size(s), CHUNK)
    weights: dict[int, list[Float32]] = {}
    warpgroup.wait_group(1)
    with span(c.plan, "softmax"):
        for number, start in enumerate(chunks, start=1):
            exponents = [s[register] * c.scale_log2 for register in range(start, start + CHUNK)]
            if is_masked:
                exponents = masked(bounded(exponents), start, _seen(c, tile))
            weights[start] = probabilities(exponents)
            for index, word in enumerate(packed_pairs(weights[start], c.plan.dtype)):
                p[start // 2 + index] = word
            if number == EARLY_CHUNKS:
                warpgroup.wait_group(0)
    with span(c.plan, "dS"):
        for start in chunks:
            new = packed_pairs([p * dp[start + index] for index, p in enumerate(weights[start])], c.plan.dtype)
            for index, word in enumerate(new):
                ds[start // 2 + index] = word
            for index in range(0, len(new), 4):
                panel, step = divmod((start // 2 + index) // 4, len(rows))
                store_matrices(rows[step] + panel * PANEL_BYTES, new[index : index + 4])
        cute.arch.fence_view_async_shared()


def _seen(c: ComputeContext, tile: Int32) -> tuple[Int32 | None, Int32 | None]:
    """The columns of a query tile that see the thread's first key, counted from its first column."""
    row = c.owner * WARPGROUP_ROWS + c.thread // 32 * 16 + c.thread % 32 // 4
    first_column = tile * c.plan.tile_m + c.thread % 4 * 2
    first, end = c.work.tiling.rows_that_see(c.work.kv_tile * c.plan.tile_n + row)
    return None if first is None else first - first_column, None if end is None else end - first_column


def _stage_dq(c: ComputeContext, dq: cute.Tensor) -> None:
    """Store the share of dQ in the order of the accumulator, once the one before has been read."""
    sync_of(c.plan, "dq_empty", c.owner)
    address = c.smem.address("sdQ", c.owner) + c.thread * VECTOR_BYTES
    with span(c.plan, "stage"):
        for group in range(cute.size(dq) // 4):
            values = [dq[4 * group + index] for index in range(4)]
            store_vector("shared", address + group * (VECTOR_BYTES * WARPGROUP_THREADS), values)


def _hand_over_dq(c: ComputeContext) -> None:
    """Let the reduce warp have the staged share; apart from the stores, for which the fence would wait."""
    cute.arch.fence_view_async_shared()
    arrive_of(c.plan, "dq_full", c.owner)


@cute.jit
def _clear_late_tile(c: ComputeContext):
    """Zeros for the dQ of the tile before the first, which warpgroup 0 computes and nobody adds."""
    if c.owner == 0:
        address = c.smem.address("sdS", DS_STAGES - 1) + c.thread * VECTOR_BYTES
        for step in range(PANEL_BYTES // (VECTOR_BYTES * WARPGROUP_THREADS)):
            store_vector("shared", address + step * (VECTOR_BYTES * WARPGROUP_THREADS), [Int32(0)] * 4)
        cute.arch.fence_view_async_shared()


def _matrix_rows(c: ComputeContext, region: Int32) -> list[Int32]:
    """Addresses for `store_matrices`, under the 128-byte swizzle: the warp's 16 rows, of 16 columns each.

    region: rows of 128 bytes.
    """
    row = c.owner * WARPGROUP_ROWS + c.thread // 32 * 16 + c.thread % 16
    swizzle = (c.thread % 32 // 16) ^ (c.thread % 8)
    return [region + row * 128 + ((2 * step) ^ swizzle) * VECTOR_BYTES for step in range(4)]
