"""Flat bytes that many lanes gather from and scatter to at once."""

import numpy as np

from ..errors import MemoryFault

UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


class ByteMemory:
    """`size` legal bytes at addresses [base, base + size) over a byte array whose first element has address `origin`.

    label: words for errors, such as "shared memory" or a buffer's name.
    """

    def __init__(self, data: np.ndarray, base: int, size: int, label: str, origin: int | None = None):
        self.data = data
        self.base = base
        self.end = base + size
        self.label = label
        self.origin = base if origin is None else origin
        self._views: dict[tuple[int, int], np.ndarray] = {}

    def view(self, size: int, count: int) -> np.ndarray:
        """The memory as rows of `count` unsigned integers of `size` bytes (a tail that fills no row is left out)."""
        key = (size, count)
        if key not in self._views:
            row = size * count
            whole = self.data[: len(self.data) // row * row]
            self._views[key] = whole.view(UNSIGNED[size]).reshape(-1, count)
        return self._views[key]

    def rows(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """Turn addresses of aligned `num_bytes` accesses into row numbers of `view`.

        Raises: MemoryFault if any access is out of bounds or misaligned.
        """
        low, high = int(addresses.min()), int(addresses.max())
        if low < self.base or high + num_bytes > self.end:
            bad = low if low < self.base else high
            raise MemoryFault(f"{num_bytes} bytes at {bad:#x} are outside {self.label} [{self.base:#x}, {self.end:#x})")
        offsets = addresses.astype(np.intp) - self.origin if self.origin else addresses.astype(np.intp)
        if num_bytes > 1:
            if int(np.bitwise_or.reduce(addresses)) & (num_bytes - 1):
                bad = int(addresses[(addresses & addresses.dtype.type(num_bytes - 1)) != 0][0])
                raise MemoryFault(f"{num_bytes} bytes at {bad:#x} in {self.label} are not aligned to their size")
            offsets >>= num_bytes.bit_length() - 1
        return offsets

    def gather(self, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        """Read `count` elements of `size` bytes at each address: array (count, lanes)."""
        return self.view(size, count)[self.rows(addresses, size * count)].T

    def scatter(self, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        """Write values (count, lanes) at each address; the last lane wins where lanes collide."""
        count = len(values)
        rows = self.rows(addresses, size * count)
        if count == 1:
            self.view(size, 1)[rows, 0] = values[0]
        else:
            self.view(size, count)[rows] = values.T
