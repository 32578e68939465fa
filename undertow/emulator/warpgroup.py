"""Four warps that multiply together: their asynchronous MMAs in order, and the groups that they wait for.

An MMA belongs to the warpgroup: it begins when the last of the four warps has issued it. Each warp runs on by itself,
so the machine keeps for each how many MMAs it has issued and where its groups end. The MMAs of a warpgroup complete in
the order of their issue; those of different warpgroups in any.
ASSUMPTION: first in, first out within a warpgroup. The ISA orders groups, and MMAs of one accumulator shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import ProtocolError

WARPS = 4
PARTIAL = "partial-warpgroup"
"""Rule of errors about warps of a warpgroup that do not do the same."""


@dataclass(eq=False)
class WarpgroupMma:
    """One MMA on its way: which instruction with which operands, and the warps (0 to 3) that have issued it.

    number: how many MMAs of the warpgroup came before it.
    """

    decoded: Any
    operands: tuple[int, ...]
    number: int
    warps: set[int] = field(default_factory=set)


@dataclass
class WarpProgress:
    """Of one warp: MMAs issued so far, and how many of them each committed group ends with."""

    issued: int = 0
    groups: list[int] = field(default_factory=list)

    def needed(self, limit: int) -> int:
        """How many MMAs must be complete so that at most `limit` groups are not."""
        return self.groups[-1 - limit] if len(self.groups) > limit else 0


class Warpgroup:
    """Warps 4 n to 4 n + 3 of a CTA."""

    def __init__(self, number: int):
        self.number = number
        self.warps = [WarpProgress() for _ in range(WARPS)]
        self.gathering: list[WarpgroupMma] = []
        self.complete = 0
        self.last: Any = None
        """The operation of the latest MMA: the next one comes after it."""

    def issue(self, warp: int, decoded: Any, operands: tuple[int, ...]) -> WarpgroupMma | None:
        """A warp (0 to 3) issues its next MMA; returns it if this was the last of the four.

        Raises: ProtocolError if the warps of the group issue different ones.
        """
        progress = self.warps[warp]
        place = progress.issued - (self.gathering[0].number if self.gathering else progress.issued)
        if place == len(self.gathering):
            self.gathering.append(WarpgroupMma(decoded, operands, progress.issued))
        mma = self.gathering[place]
        if mma.decoded is not decoded or mma.operands != operands:
            raise ProtocolError(
                f"wgmma.mma_async number {mma.number} of warpgroup {self.number}: warp {4 * self.number + warp} differs"
                f" from the warps before it (PTX line {mma.decoded.instruction.line}) in the instruction, a descriptor"
                " or scale-d",
                PARTIAL,
            )
        progress.issued += 1
        mma.warps.add(warp)
        if len(mma.warps) < WARPS:
            return None
        self.gathering.pop(0)
        return mma

    def commit(self, warp: int) -> None:
        """Close the warp's open group."""
        progress = self.warps[warp]
        progress.groups = [*(end for end in progress.groups if end > self.complete), progress.issued]

    def open_count(self, warp: int) -> int:
        """Committed groups of a warp that are not complete."""
        return sum(end > self.complete for end in self.warps[warp].groups)

    def check_end(self) -> None:
        """At the end of the CTA: every MMA must have been issued by all four warps.

        Raises: ProtocolError naming those that did not.
        """
        if self.gathering:
            mma = self.gathering[0]
            missing = [4 * self.number + w for w in range(WARPS) if w not in mma.warps]
            raise ProtocolError(
                f"wgmma.mma_async at PTX line {mma.decoded.instruction.line} was never executed by warps {missing} of"
                f" warpgroup {self.number}",
                PARTIAL,
            )
