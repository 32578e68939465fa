"""What one CTA does, in registers: its key/value tile and head, and the trips of its tile loop.

A CTA visits all query tiles that see its keys, for every query head that shares its key/value head, in one flat loop:
trips = heads of the group x query tiles. So dK and dV of a group are summed in tensor memory like those of one head.
Ranges and order are the integer functions of `undertow.plan`, traced with registers.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from undertow.kernels.sm100.sequences import Packing, Rows, dense_rows, first_tile, packed_rows, sequence_of
from undertow.plan.grid import Grid
from undertow.plan.schema import Plan
from undertow.plan.tiles import Arithmetic, Band, Tiling

REGISTERS = Arithmetic(cutlass.min, cutlass.max, lambda condition, a, b: Int32(cutlass.select_(condition, a, b)))


@dataclass(frozen=True)
class Scalars:
    """The run-time numbers of a launch.

    seqlen_q: rows of the tensors of query rows. left, right: bounds of the band, ignored where the plan has none.
    softmax_scale_log2: softmax_scale * log2(e). softcap_log2: softcap * log2(e); tanh_scale: softmax_scale / softcap.
    """

    seqlen_q: Int32
    left: Int32
    right: Int32
    heads_per_bundle: Int32
    softmax_scale_log2: Float32
    softmax_scale: Float32
    softcap_log2: Float32
    tanh_scale: Float32


def any_scalars() -> Scalars:
    """Numbers to compile with: all of them are parameters of the kernel."""
    return Scalars(*[Int32(1)] * 4, *[Float32(1.0)] * 4)


@dataclass(frozen=True)
class Packings:
    """Packed sequences, both sides."""

    q: Packing
    k: Packing


@dataclass(frozen=True)
class Work:
    """One CTA's share. Query heads are counted within the group, tiles within the sequence.

    q, k: the rows of the sequence. workspace_tile: its first query tile in the workspaces. first_tile, end_tile: the
    query tiles of each head. first_unmasked, end_unmasked: those that need no mask.
    """

    plan: cutlass.Constexpr
    kv_tile: Int32
    kv_head: Int32
    batch: Int32
    group: Int32
    q: Rows
    k: Rows
    workspace_tile: Int32
    left: Int32
    right: Int32
    first_tile: Int32
    end_tile: Int32
    first_unmasked: Int32
    end_unmasked: Int32

    @property
    def trips(self) -> Int32:
        return self.group * (self.end_tile - self.first_tile)

    def query_head(self, head: Int32) -> Int32:
        """The query head of the tensors."""
        return self.kv_head * self.group + head

    def after(self, head: Int32, tile: Int32) -> tuple[Int32, Int32]:
        """Query head and tile of the next trip."""
        is_last = tile + 1 == self.end_tile
        return head + Int32(is_last), REGISTERS.choose(is_last, self.first_tile, tile + 1)

    def needs_mask(self, tile: Int32) -> Boolean:
        """Whether some pair of a query tile is not seen; the same for all threads."""
        return (tile < self.first_unmasked) | (tile >= self.end_unmasked)

    @property
    def tiling(self) -> Tiling:
        return tiling(self.plan, (self.q, self.k), (self.left, self.right))


def tiling(plan: Plan, rows: tuple[Rows, Rows], bounds: tuple[Int32, Int32]) -> Tiling:
    """The tiles of a sequence under the plan's mask."""
    (q, k), (left, right) = rows, bounds
    band = Band(left if plan.attention.left else None, right if plan.attention.right else None)
    return Tiling(q.used, k.used, band, plan.tile_m, plan.tile_n, REGISTERS)


def kv_tiles(plan: Plan, seqlen_k: Int32, packings: Packings | None) -> Int32:
    """Key/value tiles of a batch element; of packed sequences enough for any lengths, so that some may be empty."""
    if packings is None:
        return cute.ceil_div(seqlen_k, plan.tile_n)
    return seqlen_k // plan.tile_n + packings.k.mCu_seqlens.shape[0]


def grid_of(plan: Plan, scalars: Scalars, extents: tuple, packings: Packings | None) -> Grid:
    """The order of the key/value tiles of a launch. extents: as of `work_of`."""
    batches, seqlen_k, kv_heads = extents
    tiles = kv_tiles(plan, seqlen_k, packings)
    return Grid(tiles, kv_heads, batches, scalars.heads_per_bundle, plan.attention.descending, REGISTERS)


def cta_work(plan: Plan, scalars: Scalars, mdK: cute.Tensor, query_heads: Int32, packings: Packings | None) -> Work:
    """What this CTA does. mdK: (batch, seqlen_k, kv_heads, 64)."""
    return work_of(plan, scalars, mdK.shape[:3], query_heads, packings, None)


def work_of(
    plan: Plan, scalars: Scalars, extents: tuple, query_heads: Int32, packings: Packings | None, number: Int32 | None
) -> Work:
    """What belongs to a number in the order of `undertow.plan.grid`, that of the CTA if None.

    extents: batches, rows of the tensors of keys, key/value heads.
    """
    _, seqlen_k, kv_heads = extents
    if number is None:
        number, _, _ = cute.arch.block_idx()
    kv_tile, kv_head, batch = grid_of(plan, scalars, extents, packings).place(number)
    q, k, workspace_tile = dense_rows(scalars.seqlen_q), dense_rows(seqlen_k), Int32(0)
    if packings is not None:
        sequence, kv_tile = sequence_of(packings.k, kv_tile, plan.tile_n)
        q = packed_rows(packings.q, sequence, scalars.seqlen_q)
        k = packed_rows(packings.k, sequence, seqlen_k)
        workspace_tile = first_tile(packings.q, sequence, plan.tile_m)
    bounds = (scalars.left, scalars.right)
    described = tiling(plan, (q, k), bounds)
    visited = described.query_tiles(kv_tile)
    unmasked = described.unmasked_query_tiles(kv_tile)
    group = query_heads // kv_heads
    return Work(plan, kv_tile, kv_head, batch, group, q, k, workspace_tile, *bounds, *visited, *unmasked)
