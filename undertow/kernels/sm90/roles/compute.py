"""The compute warps: two warpgroups of 64 keys each that take turns at the tensor cores.

A burst of tile t issues, in this order, the dQ that is due, dV_t, dK_t, S_{t+1} and dP_{t+1}; then the turn passes and
the warpgroup does the softmax of t + 1 while the other one has its burst. Everything between two GEMMs of a burst hides
behind the one before, which matters, because a warp that issues a wgmma stands still until the ones before it have
nearly finished. So nothing is read from shared memory here but by the tensor cores, LSE and D included. Only a softcap
needs the scores as they are: LSE then comes out of shared memory in the softmax.

dQ needs the dS of both warpgroups: that of tile t is there when warpgroup 1 has its burst t, and when warpgroup 0 has
its burst t + 1. So no warpgroup ever waits for anything but its turn, and two stages of sdS are enough. This role owns
the proxy fences between its stores to sdS and sdQ and who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from undertow.kernels.sm90.bind import arrive_of, sync_of
from undertow.kernels.sm90.context import ComputeContext
from undertow.kernels.sm90.gemms import Gemms, add_number, gemms, words
from undertow.kernels.sm90.instructions import store_matrices
from undertow.kernels.sm90.plan import (
    DS_STAGES,
    LOAD_STAGES,
    ROW_TERMS,
    TERM_UNITS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    row_term_index,
)
from undertow.kernels.sm90.softmax import (
    bounded,
    capped_exponents,
    column_of,
    hyperbolic_tangents,
    masked,
    packed_pairs,
    probabilities,
    times_slopes,
)
from undertow.kernels.sm100.instructions import store_vector
from undertow.plan.tiles import Span

CHUNK = 16  # registers of an accumulator that are worked on together: 32 query columns
EARLY_CHUNKS = 2  # of P, while dP is still being computed
VECTOR_BYTES = 16
PANEL_BYTES = 128 * 128  # of sdS: 64 query columns of all keys
TERMS_READ = 4  # 16-bit elements of a load: three terms and a zero
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
    g.s.issue(s, 0, 0, False, _start_of_s(c, g))
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
    g.s.issue(s, 0, slot, False, _start_of_s(c, g))
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
    """P and dS of a tile, into registers for dV and dK and into sdS for dQ. of: S and dP in flight; at: trip, tile.

    Under a softcap every chunk is taken from S to dS at once: there are no registers for all weights beside dP.
    """
    (s, dp), (trip, tile) = of, at
    rows = _matrix_rows(c, c.smem.address("sdS", trip % DS_STAGES))
    capped = c.plan.attention.softcap
    weights: dict[int, list[Float32]] = {}
    warpgroup.wait_group(0 if capped else 1)
    for number, start in enumerate(range(0, cute.size(s), CHUNK), start=1):
        scores = [s[start + index] for index in range(CHUNK)]
        weights[start] = _weights(c, words(r.p), scores, (trip, tile, start), is_masked)
        if capped:
            _score_gradients(c, words(r.ds), dp, rows, (start, weights.pop(start)))
        elif number == EARLY_CHUNKS:
            warpgroup.wait_group(0)
    for item in weights.items():
        _score_gradients(c, words(r.ds), dp, rows, item)
    cute.arch.fence_view_async_shared()


def _weights(c: ComputeContext, p: cute.Tensor, scores: list[Float32], at: tuple, is_masked: bool) -> list[Float32]:
    """P of a chunk into registers; returns what dP - D is multiplied with. at: trip, tile and first register."""
    trip, tile, start = at
    exponents, tanh = _exponents(c, scores, (trip, start))
    if is_masked:
        exponents = masked(bounded(exponents), start, _seen(c, tile))
    weights = probabilities(exponents)
    for index, word in enumerate(packed_pairs(weights, c.plan.dtype)):
        p[start // 2 + index] = word
    return times_slopes(weights, tanh) if tanh else weights


def _score_gradients(c: ComputeContext, ds: cute.Tensor, dp: cute.Tensor, rows: list[Int32], of: tuple) -> None:
    """dS of a chunk, into registers and into sdS. of: its first register and its weights."""
    start, weights = of
    new = packed_pairs([weight * dp[start + index] for index, weight in enumerate(weights)], c.plan.dtype)
    for index, word in enumerate(new):
        ds[start // 2 + index] = word
    for index in range(0, len(new), 4):
        panel, step = divmod((start // 2 + index) // 4, len(rows))
        store_matrices(rows[step] + panel * PANEL_BYTES, new[index : index + 4])


def _start_of_s(c: ComputeContext, g: Gemms) -> Any:
    """What S starts from: -LSE / softmax_scale, or nothing where a softcap bends the scores before LSE is taken off."""
    return None if c.plan.attention.softcap else add_number(g, c.plan, LSE)


def _exponents(c: ComputeContext, scores: list[Float32], at: tuple) -> tuple[list[Float32], list[Float32]]:
    """Base-2 logarithms of P, and the tangents of a softcap if there is one. at: trip and first register."""
    trip, start = at
    if not c.plan.attention.softcap:
        return [score * c.scalars.softmax_scale_log2 for score in scores], []
    tanh = hyperbolic_tangents(scores, c.scalars.tanh_scale)
    columns = dict.fromkeys(map(column_of, range(start, start + len(scores))))
    lse_log2 = {column: _negative_lse(c, trip, column) for column in columns}
    return capped_exponents(tanh, c.scalars.softcap_log2, start, lse_log2), tanh


def _negative_lse(c: ComputeContext, trip: Int32, column: int) -> Float32:
    """-LSE of a query column, `column` away from the thread's first; exact, as its terms are summed from the last."""
    group, within = divmod(column, 8)
    first = row_term_index(c.thread % 4 * 2 + within, LSE) + group * 8 * ROW_TERMS
    terms = cute.make_tensor(
        c.smem.pointer("sRow", trip % LOAD_STAGES) + cute.assume(first, divby=TERMS_READ), cute.make_layout(TERMS_READ)
    ).load()
    total = (terms[2].to(Float32) + terms[1].to(Float32)) + terms[0].to(Float32)
    return total * Float32(TERM_UNITS[c.plan.dtype])


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
    for group in range(cute.size(dq) // 4):
        values = [dq[4 * group + index] for index in range(4)]
        store_vector("shared", address + group * (VECTOR_BYTES * WARPGROUP_THREADS), values)


def _hand_over_dq(c: ComputeContext) -> None:
    """Let the reduce warp have the staged share; apart from the stores, for which the fence would wait."""
    cute.arch.fence_view_async_shared()
    arrive_of(c.plan, "dq_full", c.owner)


@cute.jit
def _clear_late_tile(c: ComputeContext):
    """Zeros for the dQ of the tile before the first, which warpgroup 0 computes and nobody adds.

    The proxy fence behind the dS of the first tile is one for them as well.
    """
    if c.owner == 0:
        address = c.smem.address("sdS", DS_STAGES - 1) + c.thread * VECTOR_BYTES
        for step in range(PANEL_BYTES // (VECTOR_BYTES * WARPGROUP_THREADS)):
            store_vector("shared", address + step * (VECTOR_BYTES * WARPGROUP_THREADS), [Int32(0)] * 4)


def _matrix_rows(c: ComputeContext, region: Int32) -> list[Int32]:
    """Addresses for `store_matrices`, under the 128-byte swizzle: the warp's 16 rows, of 16 columns each.

    region: rows of 128 bytes.
    """
    row = c.owner * WARPGROUP_ROWS + c.thread // 32 * 16 + c.thread % 16
    swizzle = (c.thread % 32 // 16) ^ (c.thread % 8)
    return [region + row * 128 + ((2 * step) ^ swizzle) * VECTOR_BYTES for step in range(4)]
