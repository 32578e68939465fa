"""How many passes shared memory needs for each access: bank conflicts by count, not by eye.

Shared memory has 32 banks of 4 bytes; one pass serves one word of each bank, and any number of lanes may share a word
(CUDA programming guide, "Shared Memory"). 8-byte accesses are taken to go by half warps and 16-byte ones by quarter
warps, so that 256 and 512 bytes need 2 and 4 passes at best: assumed, the guide does not say it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..events import MemoryAccess
from .base import Finding

NUM_BANKS = 32
BANK_BYTES = 4
WARP_LANES = 32


@dataclass
class Passes:
    """Of one PTX instruction: warp executions, passes needed, and the fewest that the same lanes and size allow."""

    executions: int = 0
    passes: int = 0
    fewest: int = 0

    @property
    def extra(self) -> int:
        """Passes lost to bank conflicts."""
        return self.passes - self.fewest


class BankPasses:
    """Counts by PTX instruction index, in `instructions`. Engines are left out: their reads are not by lanes."""

    subscriptions: ClassVar[tuple[type, ...]] = (MemoryAccess,)

    def __init__(self):
        self.instructions: dict[int, Passes] = defaultdict(Passes)

    def start(self, program: Any, launch: Any) -> None:
        """Forget earlier launches."""
        self.instructions.clear()

    def observe(self, event: MemoryAccess) -> None:
        """Count the passes of each warp of an access to shared memory."""
        if event.space != "shared" or event.operation is not None or event.which is None or event.home is not None:
            return
        lanes = event.lanes.index[event.which]
        count = self.instructions[event.decoded.index]
        for warp in np.unique(lanes // WARP_LANES):
            mine = lanes // WARP_LANES == warp
            needed, fewest = passes(event.addresses[mine], lanes[mine] % WARP_LANES, event.size)
            count.executions += 1
            count.passes += needed
            count.fewest += fewest

    def finish(self) -> list[Finding]:
        """Return no findings: a conflict costs time, not results."""
        return []


def passes(addresses: np.ndarray, lanes: np.ndarray, size: int) -> tuple[int, int]:
    """Passes that one warp's access needs, and the fewest for as many lanes. size: bytes of each lane."""
    words_per_lane = max(1, size // BANK_BYTES)
    lanes_together = WARP_LANES // words_per_lane
    needed = fewest = 0
    for group in np.unique(lanes // lanes_together):
        first = addresses[lanes // lanes_together == group] // BANK_BYTES
        words = np.unique(first[:, None] + np.arange(words_per_lane))
        needed += int(np.bincount(words % NUM_BANKS).max())
        fewest += 1
    return needed, fewest
