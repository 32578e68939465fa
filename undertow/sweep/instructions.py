"""What a tile costs in instructions: executions of a kernel, given to the roles that execute them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from undertow.emulator import Finding, Launch, Program
from undertow.emulator.events import InstructionExecuted
from undertow.mutate.profile import loops_of


class Roles:
    """An observer: how often the warps of each role executed each instruction of a kernel that has a plan.

    A wait that has to be tried again is seen again, so that these are shares, not counts.
    """

    subscriptions: ClassVar[tuple[type, ...]] = (InstructionExecuted,)

    def __init__(self) -> None:
        self.seen: dict[str, np.ndarray] = {}
        self._of_warp: list[np.ndarray] = []

    def start(self, program: Program, launch: Launch) -> None:
        """Take the names of the roles from the launch."""
        warps = range(-(-int(np.prod(launch.block)) // 32))
        names = [launch.labels.role(warp) for warp in warps]
        self.seen = {name: np.zeros(len(program.code), np.int64) for name in names}
        self._of_warp = [self.seen[name] for name in names]

    def observe(self, event: Any) -> None:
        """Count one instruction of some warps."""
        for warp in event.lanes.warps:
            self._of_warp[warp][event.decoded.index] += 1

    def finish(self) -> list[Finding]:
        """Return no findings: this is not a verdict."""
        return []


def per_tile(executions: np.ndarray, roles: Roles, tiles: int) -> dict[str, float]:
    """Warp instructions of each role, divided by the trips of the tile loop.

    executions: of `emulator.Result`, from a run like the one that `roles` has seen.
    """
    everybody = np.maximum(sum(roles.seen.values()), 1)
    return {
        name: round(float((executions * seen / everybody).sum()) / max(1, tiles), 2)
        for name, seen in roles.seen.items()
    }


def inside_loops(program: Program) -> np.ndarray:
    """Which PTX instructions are in a loop, over tiles or over heads, and so not done once for a CTA."""
    inside = np.zeros(len(program.code), bool)
    for loop in loops_of(program):
        inside[loop.start : loop.stop] = True
    return inside
