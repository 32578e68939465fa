"""The compute warps: two warpgroups of 64 keys each that take turns at the tensor cores.

A burst of tile t issues, in this order, the dQ that is due, dV_t, dK_t, S_{t+1} and dP_{t+1}; then the turn passes and
the warpgroup does the softmax of t + 1 while the other one has its burst. Everything between two GEMMs of a burst hides
behind the one before, which matters, because a warp that issues a wgmma stands still until the ones before it have
nearly finished. So nothing is read from shared memory here but by the tensor cores, LSE and D included. Only a softcap
needs the scores as they are: LSE then comes out of shared memory in the softmax.

The tile t + 1 may be the first of another item, which is another key/value tile: S and dP then want other K and V, and
once dV and dK have left the registers they begin anew. The dQ that is due is still that of the item before, so that K
has two stages; V is free when the last dP is done, which it is a burst before it is wanted.

dQ needs the dS of both warpgroups: that of tile t is there when warpgroup 1 has its burst t, and when warpgroup 0 has
its burst t + 1. So no warpgroup ever waits for anything but its turn, and two stages of sdS are enough. This role owns
the proxy fences between its stores to sdS and sdQ and who reads them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from undertow.kernels.events import span
from undertow.kernels.sm90.bind import arrive_of, sync_of
from undertow.kernels.sm90.context import ComputeContext, Item, Progress, Registers
from undertow.kernels.sm90.gemms import Gemms, add_number, gemms, words
from undertow.kernels.sm90.plan import DS_STAGES, K_STAGES, LOAD_STAGES, WARPGROUP_THREADS
from undertow.kernels.sm90.roles.epilogue import epilogue, keys_of, wait_until_written
from undertow.kernels.sm90.scores import PANEL_BYTES, VECTOR_BYTES, gradients_of_scores
from undertow.kernels.sm100.instructions import store_vector
from undertow.kernels.sm100.work import Work
from undertow.plan.tiles import Span

LSE, D = 0, 1  # the numbers of a row, as `plan.row_term_index` counts them
Q, DO, K, V = "load_compute_q", "load_compute_do", "load_compute_k", "load_compute_v"
SUM_SHAPE = ((2, 2, 8), 1, 1)  # registers of dV or dK in a thread, as wgmma orders them


@cute.jit
def compute(c: ComputeContext):
    """Process all query tiles of all items in order, and write the dV and dK of each."""
    g = gemms(c.smem, c.owner)
    dv, dk = (cute.make_rmem_tensor(SUM_SHAPE, Float32) for _ in range(2))
    r = Registers(g.dv.operand(c.plan), g.dk.operand(c.plan), dv, dk)
    dv.fill(0.0)
    dk.fill(0.0)
    for operand in (r.p, r.ds):
        words(operand).fill(0)
    trip, k_before, k_earlier, number = (Int32(0) for _ in range(4))
    exists = c.items.wait(number)
    while exists > 0:
        work = c.items.work(number)
        _item(c, g, r, Item(work, trip, trip + work.trips - 1, number), Progress(trip, k_before, k_earlier))
        k_earlier = Int32(cutlass.select_(work.trips > 1, number % K_STAGES, k_before))
        k_before = number % K_STAGES
        trip += work.trips
        number += 1
        exists = c.items.wait(number)
    if trip > 0:
        _last_burst(c, g, r, Progress(trip, k_before, k_earlier))
        epilogue(c.leaving, keys_of(c.plan, c.items.work(number - 1)), (trip % DS_STAGES, r.dv, r.dk))
        sync_of(c.plan, "dq_empty", c.owner)  # the last share has been read, too: no arrival is left behind
        wait_until_written(c.leaving)


@cute.jit
def _item(c: ComputeContext, g: Gemms, r: Registers, item: Item, at: Progress):
    """S and dP of all query tiles of an item and their softmax; dQ, dV and dK of all but the last.

    The first two tiles take the loop with masks, whose body alone knows that K, V and the sums change.
    """
    work, k = item.work, item.number % K_STAGES
    trip, k_before, k_earlier = at.trip, at.k_before, at.k_earlier
    if at.trip == 0:
        _first_tile(c, g, r, item)
        trip += 1
    plain = _unmasked(c, work)
    for head in cutlass.range(work.group, unroll=1):
        first = work.first_tile + Int32((head == 0) & (at.trip == 0))
        new = cutlass.max(item.start + 2 - trip, 0)
        unmasked = cutlass.max(cutlass.min(first + new, work.end_tile), plain.first)
        for tile in cutlass.range(first, unmasked, unroll=1):
            now = Progress(trip, k_before, k_earlier)
            _next_tile(c, g, r, item, (now, tile), (True, True))
            k_earlier = k_before
            k_before = k
            trip += 1
        for tile in cutlass.range(unmasked, plain.end, unroll=1):
            _next_tile(c, g, r, item, (Progress(trip, k, k), tile), (False, False))
            trip += 1
        if cutlass.const_expr(c.plan.attention.left):
            for tile in cutlass.range(cutlass.max(unmasked, plain.end), work.end_tile, unroll=1):
                _next_tile(c, g, r, item, (Progress(trip, k, k), tile), (False, True))
                trip += 1


def _unmasked(c: ComputeContext, work: Work) -> Span:
    """The query tiles that need no mask; none where the item has keys that do not exist, which are masked too."""
    is_whole = (work.kv_tile + 1) * c.plan.tile_n <= work.k.used
    first, end = work.first_unmasked, work.end_unmasked
    return Span(*(Int32(cutlass.select_(is_whole, bound, work.end_tile)) for bound in (first, end)))


@cute.jit
def _first_tile(c: ComputeContext, g: Gemms, r: Registers, item: Item):
    """S and dP of the CTA's first tile, and its softmax."""
    _clear_late_tile(c)
    if c.owner == 1:
        arrive_of(c.plan, "turn", 1 - c.owner)
    s, dp = g.s.accumulator(), g.dp.accumulator()
    c.channels[K].wait("full", 0)
    c.channels[Q].wait("full", 0)
    g.s.issue(s, 0, 0, False, _start_of_s(c, g))
    c.channels[V].wait("full", 0)
    c.channels[DO].wait("full", 0)
    g.dp.issue(dp, 0, 0, False, add_number(g, c.plan, D))
    gradients_of_scores(c, r, item, (s, dp), (Int32(0), item.work.first_tile), (False, True))


@cute.jit
def _next_tile(c: ComputeContext, g: Gemms, r: Registers, item: Item, at: tuple[Progress, Int32], how: Constexpr):
    """The burst of the tile before, and the softmax of this one. at: progress and query tile.

    how: whether the tile may be one of the first two of its item, and whether it may need a mask.
    """
    is_special, _ = how
    now, tile = at
    trip = now.trip
    slot, before = trip % LOAD_STAGES, (trip - 1) % LOAD_STAGES
    s, dp, dq = g.s.accumulator(), g.dp.accumulator(), g.dq.accumulator()
    k = item.number % K_STAGES
    k_due = Int32(cutlass.select_(c.owner == 0, now.k_earlier, now.k_before)) if is_special else k
    _take_turn(c)
    g.dq.issue(dq, (trip + c.owner) % DS_STAGES, k_due, False)
    g.dv.issue(r.dv, r.p, before, True)
    warpgroup.wait_group(1)
    if cutlass.const_expr(is_special):
        _release_k(c, k_due, Int32(cutlass.select_(c.owner == 0, now.k_before, k)))
    _stage_dq(c, dq)
    g.dk.issue(r.dk, r.ds, before, True)
    if cutlass.const_expr(is_special):
        _wait_for_new(c, K, item, trip)
    c.channels[Q].wait("full", trip)
    warpgroup.wait_group(1)
    g.s.issue(s, k, slot, False, _start_of_s(c, g))
    c.channels[DO].arrive("empty", trip - 1)
    warpgroup.wait_group(1)
    c.channels[Q].arrive("empty", trip - 1)
    if cutlass.const_expr(is_special):
        _wait_for_new(c, V, item, trip)
    c.channels[DO].wait("full", trip)
    g.dp.issue(dp, 0, slot, False, add_number(g, c.plan, D))
    arrive_of(c.plan, "turn", 1 - c.owner)
    _hand_over_dq(c)
    if cutlass.const_expr(is_special):
        _write_sums(c, r, item, now)
    gradients_of_scores(c, r, item, (s, dp), (trip, tile), how)


@cute.jit
def _write_sums(c: ComputeContext, r: Registers, item: Item, now: Progress):
    """Write dV and dK of the item before, in the first trip of an item, and begin anew."""
    if now.trip == item.start:
        before = item.number - 1
        epilogue(c.leaving, keys_of(c.plan, c.items.work(before)), (now.trip % DS_STAGES, r.dv, r.dk))
        c.items.release(before)
        r.dv.fill(0.0)
        r.dk.fill(0.0)


@cute.jit
def _wait_for_new(c: ComputeContext, name: Constexpr, item: Item, trip: Int32):
    """Wait for K or V of an item, in its first trip."""
    if trip == item.start:
        c.channels[name].wait("full", item.number)


@cute.jit
def _release_k(c: ComputeContext, due: Int32, following: Int32):
    """Hand K back if the dQ that is complete was the last of its item: the next one is of another stage."""
    if due != following:
        c.channels[K].arrive("empty", due)


@cute.jit
def _last_burst(c: ComputeContext, g: Gemms, r: Registers, now: Progress):
    """What is left when there is no next tile; warpgroup 0 has one more dQ than that."""
    trip = now.trip
    before = (trip - 1) % LOAD_STAGES
    dq = g.dq.accumulator()
    _take_turn(c)
    k_due = Int32(cutlass.select_(c.owner == 0, now.k_earlier, now.k_before))
    g.dq.issue(dq, (trip + c.owner) % DS_STAGES, k_due, False)
    g.dv.issue(r.dv, r.p, before, True)
    g.dk.issue(r.dk, r.ds, before, True)
    warpgroup.wait_group(2)
    _release_k(c, k_due, now.k_before)
    arrive_of(c.plan, "turn", 1 - c.owner)
    _stage_dq(c, dq)
    _hand_over_dq(c)
    warpgroup.wait_group(0)
    if c.owner == 0:
        sync_of(c.plan, "turn", c.owner)
        late = g.dq.accumulator()
        g.dq.issue(late, (trip - 1) % DS_STAGES, now.k_before, False)
        warpgroup.wait_group(0)
        _stage_dq(c, late)
        _hand_over_dq(c)


def _take_turn(c: ComputeContext) -> None:
    """Wait for the tensor cores, with all that has been stored to sdS in order before what they will read.

    The fence stands beside the barrier, not behind the stores, where a loop may begin anew between the two: ptxas 13.4
    then lets a warp arrive before its fence is complete (`kernels.fences`).
    """
    cute.arch.fence_view_async_shared()
    sync_of(c.plan, "turn", c.owner)


def _start_of_s(c: ComputeContext, g: Gemms) -> Any:
    """What S starts from: -LSE / softmax_scale, or nothing where a softcap bends the scores before LSE is taken off."""
    return None if c.plan.attention.softcap else add_number(g, c.plan, LSE)


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
    """Zeros for the dQ of the tile before the first, which warpgroup 0 computes and nobody adds.

    The proxy fence behind the dS of the first tile is one for them as well.
    """
    if c.owner == 0:
        address = c.smem.address("sdS", DS_STAGES - 1) + c.thread * VECTOR_BYTES
        for step in range(PANEL_BYTES // (VECTOR_BYTES * WARPGROUP_THREADS)):
            store_vector("shared", address + step * (VECTOR_BYTES * WARPGROUP_THREADS), [Int32(0)] * 4)
