"""Tensor memory of a CTA: 128 rows (TMEM lanes) by 512 columns of 32 bits, allocated in columns."""

import numpy as np

from ..errors import MemoryFault, ProtocolError

NUM_ROWS, NUM_COLUMNS = 128, 512
POISON = 0x7FC0DEAD
"""A quiet NaN as f32, and NaN-like in its upper half as bf16: uninitialised columns show up in every result."""
LIFETIME = "tmem-lifetime"
"""Rule of errors about columns that are not allocated."""


class TensorMemory:
    """The cells and the allocations, as {first column: number of columns}."""

    def __init__(self):
        self.cells = np.full((NUM_ROWS, NUM_COLUMNS), POISON, np.uint32)
        self.floats = self.cells.view(np.float32)
        self.allocations: dict[int, int] = {}
        self.may_allocate = True

    def reset(self) -> None:
        """Poison everything and drop all allocations."""
        self.cells.fill(POISON)
        self.allocations.clear()
        self.may_allocate = True

    def allocate(self, num_columns: int) -> int | None:
        """Reserve columns and return the first one, or None if there is no room now.

        Raises: ProtocolError for a size that is not a power of two in [32, 512], or after relinquish_alloc_permit.
        """
        if num_columns not in (32, 64, 128, 256, 512):
            raise ProtocolError(f"tcgen05.alloc of {num_columns} columns; allowed are powers of two from 32 to 512")
        if not self.may_allocate:
            raise ProtocolError("tcgen05.alloc after tcgen05.relinquish_alloc_permit", LIFETIME)
        for column in range(0, NUM_COLUMNS, num_columns):
            if all(column + num_columns <= c or c + n <= column for c, n in self.allocations.items()):
                self.allocations[column] = num_columns
                self.cells[:, column : column + num_columns] = POISON
                return column
        return None

    def deallocate(self, column: int, num_columns: int) -> None:
        """Give columns back.

        Raises: ProtocolError if they are not exactly one allocation.
        """
        if self.allocations.get(column) != num_columns:
            raise ProtocolError(
                f"tcgen05.dealloc of columns {column}..{column + num_columns - 1}; live: {self.describe()}", LIFETIME
            )
        del self.allocations[column]
        self.cells[:, column : column + num_columns] = POISON

    def check(self, column: int, num_columns: int, what: str) -> None:
        """Refuse columns outside every live allocation."""
        for first, size in self.allocations.items():
            if first <= column and column + num_columns <= first + size:
                return
        raise MemoryFault(
            f"{what} of TMEM columns {column}..{column + num_columns - 1} outside live allocations: {self.describe()}",
            LIFETIME,
        )

    def describe(self) -> str:
        """Live allocations in words."""
        return ", ".join(f"{c}..{c + n - 1}" for c, n in sorted(self.allocations.items())) or "none"
