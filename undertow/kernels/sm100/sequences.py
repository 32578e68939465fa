"""Where the rows of a sequence lie, in registers: a dense tensor has one sequence per batch element, a packed one many.

Packed sequences follow one another along the rows of a single batch element. Everything that works on tiles of rows
numbers them so that no tile has rows of two sequences: sequence b begins with tile cu_seqlens[b] // 128 + b, which
leaves room for every tile of the sequences before it, whatever their lengths. The rows behind the last sequence are
one more sequence without a used row, so that every row of a tensor belongs to exactly one tile.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32

LANES = 32


@dataclass(frozen=True)
class Packing:
    """One side, queries or keys, of packed sequences.

    mCu_seqlens: (sequences + 1) i32, the row at which each begins, and where the last one ends. mSeqused: (sequences)
    i32, how many of its rows hold data, or of length 0 if all do.
    """

    mCu_seqlens: cute.Tensor
    mSeqused: cute.Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of one sequence in a tensor of `total` rows: it begins at `first`, has room for `kept`, uses `used`."""

    first: Int32
    kept: Int32
    used: Int32
    total: Int32


def dense_rows(seqlen: Int32) -> Rows:
    """The rows of a sequence that has a batch element of its own."""
    return Rows(Int32(0), seqlen, seqlen, seqlen)


@cute.jit
def packed_rows(packing: Packing, sequence: Int32, total: Int32) -> Rows:
    """The rows of a packed sequence, or of what lies behind the last one. Offsets beyond the tensor are cut off."""
    sequences = packing.mCu_seqlens.shape[0] - 1
    first = packing.mCu_seqlens[sequence]
    end, used = total, Int32(0)
    if sequence < sequences:
        end = cutlass.min(packing.mCu_seqlens[sequence + 1], total)
        used = end - first
        if packing.mSeqused.shape[0] > 0:
            used = cutlass.min(packing.mSeqused[sequence], used)
    return Rows(first, cutlass.max(end - first, 0), cutlass.max(used, 0), total)


@cute.jit
def sequence_of(packing: Packing, tile: Int32, rows: Constexpr) -> tuple[Int32, Int32]:
    """The sequence that a tile of `rows` rows belongs to, and the tile's number within it.

    All lanes of a warp must ask together, for one tile: in a round each tries one sequence, so that two rounds, one
    load behind the other, find it among 1023.
    """
    found, left = Int32(0), packing.mCu_seqlens.shape[0] - 1  # sequences behind `found` that may be it
    while left > 0:
        apart = (left + LANES - 1) // LANES
        tried, begins = (cute.arch.lane_idx() + 1) * apart, Boolean(False)
        if tried <= left:
            begins = first_tile(packing, found + tried, rows) <= tile
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(begins)) * apart
        found += passed
        left = cutlass.min(left - passed, apart - 1)
    return found, tile - first_tile(packing, found, rows)


def first_tile(packing: Packing, sequence: Int32, rows: int) -> Int32:
    """The number of a sequence's first tile."""
    return packing.mCu_seqlens[sequence] // rows + sequence


@dataclass(frozen=True)
class QueryTile:
    """One tile of query rows, as the kernels before and after the main one own it.

    tile: its number in the workspaces. first: the tensor's row at which it begins; kept, used: how many of its rows
    the tensor has, and hold data (zero or less where the tile lies behind them).
    """

    batch: Int32
    head: Int32
    tile: Int32
    first: Int32
    kept: Int32
    used: Int32


def query_tile(workspace: cute.Tensor, seqlen: Int32, packing: Packing | None, rows: int) -> QueryTile:
    """The tile of this CTA. workspace: (batch, heads, tiles, ...); seqlen: rows of the tensors of query rows."""
    _, heads, tiles, *_ = workspace.shape
    number, _, _ = cute.arch.block_idx()
    tile, rest = number % tiles, number // tiles
    described, within = dense_rows(seqlen), tile
    if packing is not None:
        sequence, within = sequence_of(packing, tile, rows)
        described = packed_rows(packing, sequence, seqlen)
    start = within * rows
    first, kept, used = described.first + start, described.kept - start, described.used - start
    return QueryTile(rest // heads, rest % heads, tile, first, kept, used)
