"""What a kernel launch means, said without a driver and without an emulator.

A launch description names the kernel, the grid, and one value per PTX `.param`, in order. The code that derives it
from a plan and real tensors is then the same whether an emulator or a GPU executes the kernel, and a person can
write one by hand for any other PTX. Arrays are NumPy arrays or torch tensors and are held, never copied. Descriptions
are plain data: whoever executes one holds it against the kernel and says what does not fit.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Tensor:
    """An address followed by the shape and the strides that are not fixed at compile time.

    Layout: u64 address, one i32 per entry of `dims`, padding to 8 bytes, one i64 per entry of `strides`.
    Units: `strides` count elements. name: what messages call the array.
    """

    array: Any
    dims: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    name: str = ""

    def pack(self, address: int) -> bytes:
        """Lay the struct out, with its array at `address`."""
        data = struct.pack("<Q", address) + struct.pack(f"<{len(self.dims)}i", *self.dims)
        data += bytes(-len(data) % 8)
        return data + struct.pack(f"<{len(self.strides)}q", *self.strides)

    @property
    def num_bytes(self) -> int:
        return len(self.pack(0))


@dataclass(frozen=True)
class Pointer:
    """A 64-bit address: where `array` begins, plus `offset_bytes`."""

    array: Any
    offset_bytes: int = 0
    name: str = ""

    @property
    def num_bytes(self) -> int:
        return 8


class Ints(tuple):
    """Consecutive i32 values, such as a shape: Ints(256, 64, 2, 1)."""

    def __new__(cls, *values: int) -> Ints:
        return super().__new__(cls, values)

    def __getnewargs__(self) -> tuple[int, ...]:
        return tuple(self)  # copies and pickles are made by the constructor above

    @property
    def num_bytes(self) -> int:
        return 4 * len(self)


@dataclass(frozen=True)
class TensorMap:
    """What a 128-byte TMA tensor map means; the bytes themselves are the driver's.

    dtype: one of u8 u16 u32 s32 u64 s64 f16 bf16 f32 f64 tf32. dims, box: extents in elements, fastest dimension
    first. strides: of dims[1:], in bytes. swizzle: bytes of one swizzled row, 0 for none. fill_nan: elements outside
    `dims` read as NaN, not 0; they are never written. offset_bytes: from the beginning of the array.
    """

    array: Any
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    fill_nan: bool = False
    offset_bytes: int = 0
    name: str = ""

    @property
    def num_bytes(self) -> int:
        return TENSOR_MAP_BYTES


@dataclass(frozen=True)
class Opaque:
    """A block of that many bytes that the kernel is handed and does not read."""

    num_bytes: int


class NumberLabels:
    """Labels of a launch without a plan: plain numbers. `plan.labels` has the ones with names."""

    def role(self, warp: int) -> str:
        """Name of a warp's role."""
        return f"warp {warp}"

    def smem(self, offset: int) -> str:
        """Name of a byte of dynamic shared memory."""
        return f"smem+{offset:#x}"

    def tmem(self, column: int) -> str:
        """Name of a TMEM column."""
        return f"column {column}"

    def barrier_id(self, identifier: int) -> str:
        """Name of a named barrier."""
        return f"barrier {identifier}"


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    params: one entry per PTX `.param`, in order: Tensor, Pointer, Ints, TensorMap, Opaque, bytes, or a plain number
    (bool or int: an integer of the parameter's size; float: f32, or f64 where the parameter has 8 bytes).
    dynamic_smem: bytes. kernel: entry name, or None where the PTX has a single entry.
    labels: names for reports (role, smem, tmem, barrier_id); numbers by default.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    params: list[Any] | tuple[Any, ...] = ()
    dynamic_smem: int = 0
    cluster: tuple[int, ...] = (1, 1, 1)
    kernel: str | None = None
    labels: Any = field(default_factory=NumberLabels)
