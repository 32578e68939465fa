"""What the bodies of the probes read: plain values, one class per kind of probe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """A block of instructions, in PTX: see `probes.loops`. setup: what every thread executes once before.

    lane_stride, warp_stride: bytes from lane to lane and from warp to warp of ADDRESS, which begins at `offset`
    of shared memory. space: of ADDRESS; `tensor`: the warp's lanes of tensor memory; `global`: the CTA's part of the
    buffer, `offset` bytes long. every: only every so manieth warp runs it.
    """

    text: tuple[str, ...]
    setup: tuple[str, ...] = ()
    lane_stride: int = 0
    warp_stride: int = 0
    offset: int = 0
    space: str = "shared"
    every: int = 1


@dataclass(frozen=True)
class HandOff:
    """Warps that arrive at an mbarrier, and warps that wait for it.

    delay: cycles from the common start to the first arrival. skew: from one arriving warp to the next. varied: by how
    many cycles the delay is longer from trip to trip, modulo 64. hinted: the waiting warps tell how long it may be
    suspended, as the DSL's waits do.
    """

    arriving: int
    waiting: int
    delay: int = 400
    skew: int = 0
    hinted: bool = True
    varied: int = 0


@dataclass(frozen=True)
class Release:
    """Warps that come to a named barrier, `skew` cycles apart; without it where `barrier` is False."""

    warps: int
    skew: int
    barrier: bool
    delay: int = 400


@dataclass(frozen=True)
class Mma:
    """Matrix instructions of 16-bit operands, k = 16 each, issued in groups.

    n: columns. a: where operand a is: `shared`, `registers` (wgmma) or `tensor` (tcgen05). group: instructions between
    two waits. issuers: warpgroups that issue (wgmma).
    """

    n: int
    a: str
    group: int
    issuers: int = 1


@dataclass(frozen=True)
class Copy:
    """Bulk copies between shared and global memory. kind: `load`, `store` or `reduce`. size: bytes of one.

    depth: how many are in flight. tiles: how many different ones a CTA goes through. together: all CTAs go through the
    same ones.
    """

    kind: str
    size: int
    depth: int
    tiles: int = 4
    together: bool = False


@dataclass(frozen=True)
class Beside:
    """A block that more warps run in a loop while matrix instructions are issued, for `window` cycles an iteration.

    copies: what one warp behind them copies meanwhile, from byte `copies_at` of shared memory on.
    """

    mma: Mma
    block: Block
    warps: int
    window: int
    copies: Copy | None = None
    copies_at: int = 0
