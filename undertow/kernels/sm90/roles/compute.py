"""The compute warps: two warpgroups of 64 keys each that take turns at the tensor cores.

A burst of tile t issues, in this order, the dQ that is due, dV_t, dK_t, S_{t+1} and dP_{t+1}; then the turn passes and
the warpgroup does the softmax of t + 1 while the other one has its burst. Everything between two GEMMs of a burst hides
behind the one before, which matters, because a warp that issues a wgmma stands still until the ones before it have
nearly finished. So nothing is read from shared memory here but by the tensor cores, LSE and D included. Only a softcap
needs the scores as they are: LSE then comes out of shared memory in the softmax.

The tile t + 1 may be the first of another item, which is another key/value tile: S and dP then want other K and V, and
once dV and dK have left the registers they begin anew. The dQ that is due is still that of the item before, so that K
has two stages; V is free when the last dP is done, which it is a burst before it is wanted. Such a burst begins before
anybody has asked whether there is another item: what has to be read and compared for it would keep the tensor cores
waiting between two items, and hides behind dQ.

dQ needs the dS of both warpgroups: that of tile t is there when warpgroup 1 has its burst t, and when warpgroup 0 has
its burst t + 1. So no warpgroup ever waits for anything but its turn, and two stages of sdS are enough. This role owns
the proxy fences between its stores to sdS and sdQ and who reads them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from undertow.kernels.events import span
from undertow.kernels.sm90.bind import arrive_of, sync_of
from undertow.kernels.sm90.context import ComputeContext, Item, Registers
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
    exists = c.items.wait(Int32(0))
    if exists > 0:
        _items(c)


@cute.jit
def _items(c: ComputeContext):
    """All items of a CTA that has one.

    A burst begins alike whether there is another item or not: only behind its first GEMM is it asked for, and read.
    """
    g = gemms(c.smem, c.owner)
    r = _no_sums(c, g)
    item = _item(c, Int32(0), Int32(0))
    _first_tile(c, g, r, item)
    are_left, k_earlier = Int32(1), Int32(0)
    while are_left > 0:
        trip, k_earlier = _other_tiles(c, g, r, item, k_earlier)
        number, k_before = item.number + 1, stage_of_k(item.number)
        dq, k_due = g.dq.accumulator(), _due(c, k_earlier, k_before)
        _take_turn(c)
        g.dq.issue(dq, stage_of_ds(trip + c.owner), k_due, False)
        exists = c.items.wait(number)
        g.dv.issue(r.dv, r.p, slot_of(trip - 1), True)
        if exists > 0:
            item = _item(c, number, trip)
            warpgroup.wait_group(1)
            _release_k(c, k_due, _due(c, k_before, stage_of_k(number)))
            _scores(c, g, r, item, (dq, trip, item.work.first_tile), (True, True))
            k_earlier = k_before
        else:
            _last_burst(c, g, r, (dq, trip), (k_due, k_before))
            epilogue(c.leaving, keys_of(c.plan, c.items.work(number - 1)), (stage_of_ds(trip), r.dv, r.dk))
            sync_of(c.plan, "dq_empty", c.owner)  # the last share has been read, too: no arrival is left behind
            wait_until_written(c.leaving)
            are_left = Int32(0)


def _no_sums(c: ComputeContext, g: Gemms) -> Registers:
    """The registers of a CTA that has no tile yet whose dV and dK are due."""
    dv, dk = (cute.make_rmem_tensor(SUM_SHAPE, Float32) for _ in range(2))
    r = Registers(g.dv.operand(c.plan), g.dk.operand(c.plan), dv, dk)
    dv.fill(0.0)
    dk.fill(0.0)
    for operand in (r.p, r.ds):
        words(operand).fill(0)
    return r


def _item(c: ComputeContext, number: Int32, start: Int32) -> Item:
    """What an item is, and which of its tiles take the loop with masks: the second of all, and those that need one."""
    work = c.items.work(number)
    plain, second = _unmasked(c, work), cutlass.min(work.first_tile + 2, work.end_tile)
    second_is_of_other_head = work.first_tile + 1 == work.end_tile
    return Item(
        work,
        start,
        start + work.trips - 1,
        number,
        cutlass.max(second, plain.first),
        Int32(cutlass.select_(second_is_of_other_head, work.end_tile, plain.first)),
        *plain,
    )


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
def _other_tiles(c: ComputeContext, g: Gemms, r: Registers, item: Item, k_earlier: Int32) -> tuple[Int32, Int32]:
    """The tiles of an item behind its first. Returns the trip after them, and whose K the last but one of all had.

    The second one takes the loop with masks, whose body alone knows that the dQ that is due may be of the item before.
    """
    work, k = item.work, stage_of_k(item.number)
    trip, first, masked, masked_next = item.start + 1, work.first_tile + 1, item.masked_end, item.masked_end_next
    heads, is_left = work.group, Int32(1)  # there is a first one, so that nothing is asked before it
    while is_left > 0:
        heads -= 1
        is_left = Int32(heads > 0)
        for tile in cutlass.range(first, masked, unroll=1):
            _next_tile(c, g, r, item, (trip, tile), (k_earlier, True))
            k_earlier = k
            trip += 1
        for tile in cutlass.range(masked, item.plain_end, unroll=1):
            _next_tile(c, g, r, item, (trip, tile), (None, False))
            trip += 1
        if cutlass.const_expr(c.plan.attention.left):
            for tile in cutlass.range(cutlass.max(masked, item.plain_end), work.end_tile, unroll=1):
                _next_tile(c, g, r, item, (trip, tile), (None, True))
                trip += 1
        first, masked, masked_next = work.first_tile, masked_next, item.plain_first
    return trip, k_earlier


def _next_tile(c: ComputeContext, g: Gemms, r: Registers, item: Item, at: tuple[Int32, Int32], how: tuple) -> None:
    """The burst of the tile before, and the softmax of this one, which is not the first of its item. at: trip and tile.

    how: K's stage of the last tile but one, if that may be of the item before; and whether it may need a mask.
    """
    (trip, tile), (k_earlier, is_masked) = at, how
    k = stage_of_k(item.number)
    dq, k_due = g.dq.accumulator(), k if k_earlier is None else _due(c, k_earlier, k)
    _take_turn(c)
    g.dq.issue(dq, stage_of_ds(trip + c.owner), k_due, False)
    g.dv.issue(r.dv, r.p, slot_of(trip - 1), True)
    warpgroup.wait_group(1)
    if k_earlier is not None:
        _release_k(c, k_due, k)
    _scores(c, g, r, item, (dq, trip, tile), (False, is_masked))


def _scores(c: ComputeContext, g: Gemms, r: Registers, item: Item, at: tuple, how: tuple[bool, bool]) -> None:
    """The burst from the moment when dQ is complete, and the softmax of its new tile. at: dQ, trip and tile.

    how: whether the tile is the first of its item, and whether it may need a mask.
    """
    (dq, trip, tile), (is_first, _) = at, how
    slot, before = slot_of(trip), slot_of(trip - 1)
    s, dp = g.s.accumulator(), g.dp.accumulator()
    _stage_dq(c, dq)
    g.dk.issue(r.dk, r.ds, before, True)
    if is_first:
        c.channels[K].wait("full", item.number)
    c.channels[Q].wait("full", trip)
    warpgroup.wait_group(1)
    g.s.issue(s, stage_of_k(item.number), slot, False, _start_of_s(c, g))
    c.channels[DO].arrive("empty", trip - 1)
    warpgroup.wait_group(1)
    c.channels[Q].arrive("empty", trip - 1)
    if is_first:
        c.channels[V].wait("full", item.number)
    c.channels[DO].wait("full", trip)
    g.dp.issue(dp, 0, slot, False, add_number(g, c.plan, D))
    arrive_of(c.plan, "turn", 1 - c.owner)
    _hand_over_dq(c)
    if is_first:
        _write_sums(c, r, item)
    gradients_of_scores(c, r, item, (s, dp), (trip, tile), how)


def _write_sums(c: ComputeContext, r: Registers, item: Item) -> None:
    """Write dV and dK of the item before, and begin anew."""
    before = item.number - 1
    epilogue(c.leaving, keys_of(c.plan, c.items.work(before)), (stage_of_ds(item.start), r.dv, r.dk))
    c.items.release(before)
    r.dv.fill(0.0)
    r.dk.fill(0.0)


def _due(c: ComputeContext, earlier: Int32, before: Int32) -> Int32:
    """Of what two tiles have, what the one has whose dQ is due: warpgroup 0 is one tile late."""
    return Int32(cutlass.select_(c.owner == 0, earlier, before))


def _release_k(c: ComputeContext, due: Int32, following: Int32) -> None:
    """Hand K back if the dQ that is complete was the last of its item: the next one is of another stage."""
    c.channels[K].arrive_if("empty", due, (due != following) & (c.thread % 32 == 0))


@cute.jit
def _last_burst(c: ComputeContext, g: Gemms, r: Registers, at: tuple, k: tuple[Int32, Int32]):
    """What is left of a burst when there is no next tile; warpgroup 0 has one more dQ than that. at: dQ, trip.

    k: the stages of sK of that dQ, and of the last tile.
    """
    (dq, trip), (k_due, k_before) = at, k
    g.dk.issue(r.dk, r.ds, slot_of(trip - 1), True)
    warpgroup.wait_group(2)
    _release_k(c, k_due, k_before)
    arrive_of(c.plan, "turn", 1 - c.owner)
    _stage_dq(c, dq)
    _hand_over_dq(c)
    warpgroup.wait_group(0)
    if c.owner == 0:
        sync_of(c.plan, "turn", c.owner)
        late = g.dq.accumulator()
        g.dq.issue(late, stage_of_ds(trip - 1), k_before, False)
        warpgroup.wait_group(0)
        _stage_dq(c, late)
        _hand_over_dq(c)


def stage_of_k(number: Int32) -> Int32:
    """The stage of sK of an item."""
    return number & (K_STAGES - 1)


def stage_of_ds(tile: Int32) -> Int32:
    """The stage of sdS of a tile, by the trip that computes its scores."""
    return tile & (DS_STAGES - 1)


def slot_of(trip: Int32) -> Int32:
    """The stage of sQ and sdO that a trip uses."""
    return trip & (LOAD_STAGES - 1)


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
