"""What a compute warp does with S and dP of a tile between two bursts: P and dS, into registers and shared memory.

The arithmetic is in `softmax`; here are the order in which the two accumulators are waited for and used up, the row
terms that a softcap reads, masks by the tile's place, and the addresses of dS.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from undertow.kernels.events import span
from undertow.kernels.sm90.context import ComputeContext, Item, Registers
from undertow.kernels.sm90.gemms import words
from undertow.kernels.sm90.instructions import store_matrices
from undertow.kernels.sm90.plan import DS_STAGES, LOAD_STAGES, WARPGROUP_ROWS
from undertow.kernels.sm90.roles.epilogue import wait_until_read
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
from undertow.kernels.sm100.work import Work

CHUNK = 16  # registers of an accumulator that are worked on together: 32 query columns
EARLY_CHUNKS = 2  # of P, while dP is still being computed
EARLY_CHUNKS_CAPPED = 1  # with tanh; for a second one there are no registers, and wgmma would be serialized
VECTOR_BYTES = 16
PANEL_BYTES = 128 * 128  # of sdS: 64 query columns of all keys
V = "load_compute_v"


def gradients_of_scores(
    c: ComputeContext, r: Registers, item: Item, of: tuple, at: tuple[Int32, Int32], how: tuple[bool, bool]
) -> None:
    """P and dS of a tile, into registers for dV and dK and into sdS for dQ.

    of: S and dP in flight. at: trip and tile. how: whether the tile may be the first of its item, before which dV and
    dK were staged in sdS, and whether it may need a mask.

    Under a softcap a chunk is taken from S to dS at once: there are no registers for the weights of a tile beside what
    tanh needs.
    """
    (s, dp), (trip, tile), (is_first, is_masked) = of, at, how
    rows = _matrix_rows(c, c.smem.address("sdS", trip % DS_STAGES))
    softcap = c.plan.attention.softcap
    early = EARLY_CHUNKS_CAPPED if softcap else EARLY_CHUNKS
    weights: dict[int, list[Float32]] = {}
    warpgroup.wait_group(1)
    with span(c.plan, "softmax"):
        for number, start in enumerate(range(0, cute.size(s), CHUNK), start=1):
            scores = [s[start + index] for index in range(CHUNK)]
            weights[start] = _weights(c, words(r.p), scores, (item.work, trip, tile, start), is_masked)
            if number == early:
                warpgroup.wait_group(0)
                _release_v(c, item, trip)
                if softcap and is_first:
                    wait_until_read(c.leaving)
            if softcap and number >= early:
                _score_gradients(c, words(r.ds), dp, rows, (start, weights.pop(start)))
    if not softcap and is_first:
        wait_until_read(c.leaving)
    with span(c.plan, "dS"):
        for of_chunk in weights.items():
            _score_gradients(c, words(r.ds), dp, rows, of_chunk)


def _release_v(c: ComputeContext, item: Item, trip: Int32) -> None:
    """Hand V back after the last dP of the item."""
    c.channels[V].arrive_if("empty", item.number, (trip == item.last) & (c.thread % 32 == 0))


def _weights(c: ComputeContext, p: cute.Tensor, scores: list[Float32], at: tuple, is_masked: bool) -> list[Float32]:
    """P of a chunk into registers; returns what dP - D is multiplied with. at: work, trip, tile and first register."""
    work, trip, tile, start = at
    exponents, tanh = _exponents(c, scores, (trip, start))
    if is_masked:
        exponents = masked(bounded(exponents), start, _seen(c, work, tile))
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


def _exponents(c: ComputeContext, scores: list[Float32], at: tuple) -> tuple[list[Float32], list[Float32]]:
    """Base-2 logarithms of P, and the tangents of a softcap if there is one. at: trip and first register."""
    trip, start = at
    if not c.plan.attention.softcap:
        return [score * c.scalars.softmax_scale_log2 for score in scores], []
    lse_log2 = _negative_lse(c, trip, start)
    tanh = hyperbolic_tangents(scores, c.scalars.tanh_scale, c.scalars.softcap_log2)
    return capped_exponents(tanh, c.scalars.softcap_log2, start, lse_log2), tanh


def _negative_lse(c: ComputeContext, trip: Int32, start: int) -> dict[int, Float32]:
    """-LSE * log2(e) of the query columns of a chunk, by their distance from the thread's first column."""
    lse, first = {}, c.thread % 4 * 2
    for column in range(column_of(start), column_of(start + CHUNK), 8):
        place = cute.assume(first + column, divby=2)
        pair = cute.make_tensor(c.smem.pointer("sLSE", trip % LOAD_STAGES) + place, cute.make_layout(2)).load()
        lse[column], lse[column + 1] = pair[0], pair[1]
    return lse


def _seen(c: ComputeContext, work: Work, tile: Int32) -> tuple[Int32 | None, Int32 | None]:
    """The columns of a query tile that see the thread's first key, counted from its first column."""
    row = c.owner * WARPGROUP_ROWS + c.thread // 32 * 16 + c.thread % 32 // 4
    first_column = tile * c.plan.tile_m + c.thread % 4 * 2
    first, end = work.tiling.rows_that_see(work.kv_tile * c.plan.tile_n + row)
    return None if first is None else first - first_column, None if end is None else end - first_column


def _matrix_rows(c: ComputeContext, region: Int32) -> list[Int32]:
    """Addresses for `store_matrices`, under the 128-byte swizzle: the warp's 16 rows, of 16 columns each.

    region: rows of 128 bytes.
    """
    row = c.owner * WARPGROUP_ROWS + c.thread // 32 * 16 + c.thread % 16
    swizzle = (c.thread % 32 // 16) ^ (c.thread % 8)
    return [region + row * 128 + ((2 * step) ^ swizzle) * VECTOR_BYTES for step in range(4)]
