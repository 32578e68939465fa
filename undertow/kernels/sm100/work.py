"""What one CTA does, in registers: its key/value tile and head, and the trips of its tile loop.

A CTA visits all query tiles that see its keys, for every query head that shares its key/value head, in one flat loop:
trips = heads of the group x query tiles. So dK and dV of a group are summed in tensor memory like those of one head.
Ranges and order are the integer functions of `undertow.plan`, traced with registers.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from undertow.plan.grid import Grid
from undertow.plan.schema import Plan
from undertow.plan.tiles import Arithmetic, Band, Tiling

REGISTERS = Arithmetic(cutlass.min, cutlass.max, lambda condition, a, b: Int32(cutlass.select_(condition, a, b)))


@dataclass(frozen=True)
class Scalars:
    """The run-time numbers of a launch.

    left, right: bounds of the band, ignored where the plan has none. softmax_scale_log2: softmax_scale * log2(e).
    """

    seqlen_q: Int32
    left: Int32
    right: Int32
    heads_per_bundle: Int32
    softmax_scale_log2: Float32
    softmax_scale: Float32


def any_scalars() -> Scalars:
    """Numbers to compile with: all of them are parameters of the kernel."""
    return Scalars(*[Int32(1)] * 4, *[Float32(1.0)] * 2)


@dataclass(frozen=True)
class Work:
    """One CTA's share. Query heads are counted within the group, query tiles within the sequence.

    first_tile, end_tile: the query tiles of each head. first_unmasked, end_unmasked: those that need no mask.
    """

    plan: cutlass.Constexpr
    kv_tile: Int32
    kv_head: Int32
    batch: Int32
    group: Int32
    seqlen_q: Int32
    seqlen_k: Int32
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
        return tiling(self.plan, self.seqlen_q, self.seqlen_k, (self.left, self.right))


def tiling(plan: Plan, seqlen_q: Int32, seqlen_k: Int32, bounds: tuple[Int32, Int32]) -> Tiling:
    """The tiles of a sequence under the plan's mask."""
    left, right = bounds
    band = Band(left if plan.attention.left else None, right if plan.attention.right else None)
    return Tiling(seqlen_q, seqlen_k, band, plan.tile_m, plan.tile_n, REGISTERS)


def cta_work(plan: Plan, scalars: Scalars, mdK: cute.Tensor, query_heads: Int32) -> Work:
    """What this CTA does. mdK: (batch, seqlen_k, kv_heads, 64)."""
    batches, seqlen_k, kv_heads, _ = mdK.shape
    tiles = cute.ceil_div(seqlen_k, plan.tile_n)
    grid = Grid(tiles, kv_heads, batches, scalars.heads_per_bundle, plan.attention.descending, REGISTERS)
    number, _, _ = cute.arch.block_idx()
    place = grid.place(number)
    bounds = (scalars.left, scalars.right)
    described = tiling(plan, scalars.seqlen_q, seqlen_k, bounds)
    visited = described.query_tiles(place.kv_tile)
    unmasked = described.unmasked_query_tiles(place.kv_tile)
    group = query_heads // kv_heads
    return Work(plan, *place, group, scalars.seqlen_q, seqlen_k, *bounds, *visited, *unmasked)
