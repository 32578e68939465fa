"""Shared memory of a CTA: bytes, and mbarriers as typed cells that ordinary accesses may not touch."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import MemoryFault, ProtocolError
from .byte_memory import ByteMemory

POISON = 0xCD
MAX_COUNT = (1 << 20) - 1


@dataclass
class Mbarrier:
    """State of one mbarrier: `phase` counts completed phases since init, so its bit 0 is the hardware's parity.

    count: arrivals that each phase expects; pending: arrivals missing in this phase; tx: bytes expected minus
    bytes completed (may be negative for a while: bytes can land before they are announced).
    """

    address: int
    count: int
    pending: int
    tx: int = 0
    phase: int = 0

    def arrive(self, count: int = 1, drop: bool = False) -> bool:
        """Count arrivals; say whether they completed the phase."""
        if count > self.pending:
            raise ProtocolError(
                f"over-arrival at mbarrier {self.address:#x}: {count} arrivals, {self.pending} of {self.count} pending"
                f" in phase {self.phase}",
                "mbarrier-over-arrival",
            )
        self.pending -= count
        if drop:
            self.count -= count
        return self._maybe_complete()

    def expect(self, num_bytes: int) -> None:
        """Announce bytes."""
        self.tx += num_bytes
        if abs(self.tx) > MAX_COUNT:
            raise ProtocolError(
                f"transaction count of mbarrier {self.address:#x} leaves its range: {self.tx} bytes", "mbarrier-bytes"
            )

    def complete(self, num_bytes: int) -> bool:
        """Count landed bytes; say whether they completed the phase."""
        self.expect(-num_bytes)
        return self._maybe_complete()

    def _maybe_complete(self) -> bool:
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.count
        return True

    def has_completed(self, parity: int) -> bool:
        """Whether the phase of that parity is over: true iff the current phase has the other parity."""
        return (self.phase & 1) != parity


class SharedMemory(ByteMemory):
    """Shared memory [base, base + size); unwritten bytes are 0xCD."""

    def __init__(self, base: int, size: int):
        self.size = size
        self.owner: Any = None
        """The CTA whose memory this is."""
        padded = -(-(base + size) // 128) * 128
        super().__init__(np.full(padded, POISON, np.uint8), base, size, "shared memory", origin=0)
        self.cells: dict[int, Mbarrier] = {}
        self._cell_words = np.zeros(padded // 8, bool)
        self._cell_range = (1 << 62, 0)
        self._ended: set[int] = set()

    def reset(self) -> None:
        """Forget everything: poison all bytes, drop all barriers."""
        self.data.fill(POISON)
        self.cells.clear()
        self._ended.clear()
        self._cell_words[:] = False
        self._cell_range = (1 << 62, 0)

    def rows(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """As in ByteMemory; also refuses accesses that touch an mbarrier."""
        low, high = self._cell_range
        if high and int(addresses.min()) < high and int(addresses.max()) + num_bytes > low:
            self._refuse_cells(addresses, num_bytes)
        return super().rows(addresses, num_bytes)

    def _refuse_cells(self, addresses: np.ndarray, num_bytes: int) -> None:
        words = np.minimum(addresses.astype(np.intp) >> 3, len(self._cell_words) - 1)
        last = np.minimum((addresses.astype(np.intp) + num_bytes - 1) >> 3, len(self._cell_words) - 1)
        touched = self._cell_words[words] | self._cell_words[last]
        if touched.any():
            bad = int(addresses[touched][0])
            raise MemoryFault(f"ordinary access of {num_bytes} bytes at {bad:#x} touches an mbarrier")

    def check_range(self, address: int, num_bytes: int) -> None:
        """Refuse a block that leaves shared memory or covers an mbarrier."""
        if address < self.base or address + num_bytes > self.end:
            raise MemoryFault(
                f"{num_bytes} bytes at {address:#x} are outside {self.label} [{self.base:#x}, {self.end:#x})"
            )
        if self.cells and num_bytes and self._cell_words[address >> 3 : (address + num_bytes + 7) >> 3].any():
            raise MemoryFault(f"a block of {num_bytes} bytes at {address:#x} covers an mbarrier")

    def init_mbarrier(self, address: int, count: int) -> None:
        """Create an mbarrier.

        Raises: ProtocolError for a count outside [1, 2^20 - 1] or a live barrier at the address; MemoryFault for a
        place that is misaligned or outside.
        """
        if not 1 <= count <= MAX_COUNT:
            raise ProtocolError(
                f"mbarrier.init at {address:#x} with count {count}; allowed are 1 to {MAX_COUNT}", "mbarrier-count"
            )
        if address % 8:
            raise MemoryFault(f"mbarrier at {address:#x} is not aligned to 8 bytes")
        if address in self.cells:
            raise ProtocolError(
                f"mbarrier.init at {address:#x}, where an mbarrier is live; mbarrier.inval it first",
                "mbarrier-reinitialised",
            )
        self.check_range(address, 8)
        self.cells[address] = Mbarrier(address, count, count)
        self._cell_words[address >> 3] = True
        low, high = self._cell_range
        self._cell_range = (min(low, address), max(high, address + 8))

    def inval_mbarrier(self, address: int) -> None:
        """End an mbarrier; its bytes are ordinary (and poison) again."""
        self.mbarrier(address)
        del self.cells[address]
        self._ended.add(address)
        self._cell_words[address >> 3] = False
        self.data[address : address + 8] = POISON

    def mbarrier(self, address: int) -> Mbarrier:
        """Find the live mbarrier at an address.

        Raises: ProtocolError if there is none.
        """
        cell = self.cells.get(address)
        if cell is None:
            raise ProtocolError(
                f"no initialised mbarrier at {address:#x}; live ones: {self._list_cells()}",
                "mbarrier-reinitialised" if address in self._ended else "race",
            )
        return cell

    def _list_cells(self) -> str:
        return ", ".join(f"{a:#x}" for a in sorted(self.cells)) or "none"
