"""What a tensor map means: a box of up to five dimensions between global memory and packed, swizzled shared memory.

Dimensions are innermost first, as in PTX coordinates; strides are in bytes, one per dimension after the first.
"""

from dataclasses import dataclass

import numpy as np

from .descriptors import swizzle_address
from .errors import LaunchError, MemoryFault
from .memory import ByteMemory

ELEMENT_BYTES = {
    "u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u32": 4, "s32": 4, "f32": 4, "tf32": 4, "u64": 8, "s64": 8, "f64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorMapGeometry:
    """A tensor map: base address, element type, extents, byte strides, box, swizzle (0, 32, 64, 128), NaN fill."""

    base: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    fill_nan: bool = False

    @property
    def element(self) -> int:
        """Bytes per element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy moves in shared memory, out-of-bounds ones included."""
        return int(np.prod(self.box)) * self.element

    def validate(self, name: str) -> None:
        """Refuse maps that the driver would refuse.

        Raises: LaunchError naming the field.
        """
        rank = len(self.dims)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            raise LaunchError(
                f"{name}: dims {self.dims}, strides {self.strides}, box {self.box}; need 1 to 5 dims, as many box"
                " entries, one stride fewer"
            )
        if any(not 1 <= b <= 256 for b in self.box):
            raise LaunchError(f"{name}: box {self.box}; allowed are 1 to 256 per dimension")
        if any(d < 1 for d in self.dims):
            raise LaunchError(f"{name}: dims {self.dims}; allowed are 1 and more")
        if self.base % 16 or any(s % 16 for s in self.strides):
            raise LaunchError(f"{name}: base {self.base:#x} and strides {self.strides} must be multiples of 16 bytes")
        if self.swizzle not in (0, 32, 64, 128):
            raise LaunchError(f"{name}: swizzle {self.swizzle}; allowed are 0, 32, 64, 128")
        inner = self.box[0] * self.element
        if inner % 16 or (self.swizzle and inner > self.swizzle):
            raise LaunchError(
                f"{name}: inner box of {inner} bytes; must be a multiple of 16 and at most the swizzle"
                f" ({self.swizzle or 'none'})"
            )

    def window(self, coordinates: tuple[int, ...]) -> "BoxWindow":
        """Clip the box at these coordinates to the tensor."""
        starts = [max(0, -c) for c in coordinates]
        ends = [max(0, min(b, d - c)) for b, d, c in zip(self.box, self.dims, coordinates, strict=True)]
        steps = (self.element, *self.strides)
        address = self.base + sum((c + s) * t for c, s, t in zip(coordinates, starts, steps, strict=True))
        return BoxWindow(self, tuple(starts), tuple(ends), address)


@dataclass(frozen=True)
class BoxWindow:
    """The part of a box that lies inside the tensor: box positions [starts, ends), first byte at `address`."""

    map: TensorMapGeometry
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    address: int

    @property
    def is_empty(self) -> bool:
        """Whether the box lies wholly outside."""
        return any(s >= e for s, e in zip(self.starts, self.ends, strict=True))

    @property
    def row_bytes(self) -> int:
        """Valid bytes of an innermost row."""
        return (self.ends[0] - self.starts[0]) * self.map.element

    def row_addresses(self) -> np.ndarray:
        """Global address of each valid innermost row, box order."""
        addresses = np.array([self.address], np.int64)
        for start, end, stride in zip(self.starts[1:], self.ends[1:], self.map.strides, strict=True):
            addresses = (np.arange(end - start)[:, None] * stride + addresses[None, :]).ravel()
        return addresses

    def box_slices(self) -> tuple[slice, ...]:
        """Where the window sits in a byte array shaped (box reversed, innermost in bytes)."""
        element = self.map.element
        outer = [slice(s, e) for s, e in zip(self.starts[1:], self.ends[1:], strict=True)]
        return (*reversed(outer), slice(self.starts[0] * element, self.ends[0] * element))

    def view(self, region: ByteMemory) -> np.ndarray:
        """The window as a strided byte view of a global region.

        Raises: MemoryFault if the tensor map reaches past the buffer.
        """
        extents = [e - s for s, e in zip(self.starts[1:], self.ends[1:], strict=True)]
        last = self.address + sum((n - 1) * s for n, s in zip(extents, self.map.strides, strict=True)) + self.row_bytes
        if self.address < region.base or last > region.end:
            raise MemoryFault(
                f"tensor copy of [{self.address:#x}, {last:#x}) leaves {region.label}"
                f" [{region.base:#x}, {region.end:#x}): the map's dims or strides do not fit the buffer"
            )
        shape = (*reversed(extents), self.row_bytes)
        strides = (*reversed(self.map.strides), 1)
        return np.lib.stride_tricks.as_strided(region.data[self.address - region.base :], shape, strides)


def box_shape(tensor_map: TensorMapGeometry) -> tuple[int, ...]:
    """Shape of a box as bytes: outermost dimension first, innermost in bytes."""
    return (*reversed(tensor_map.box[1:]), tensor_map.box[0] * tensor_map.element)


_CHUNKS: dict[tuple[int, int, int], np.ndarray] = {}


def chunk_index(address: int, num_bytes: int, swizzle: int) -> np.ndarray:
    """16-byte chunk numbers of a packed box at a shared address, in box order, after the swizzle."""
    key = (address, num_bytes, swizzle)
    if key not in _CHUNKS:
        linear = address + 16 * np.arange(num_bytes // 16, dtype=np.int64)
        _CHUNKS[key] = swizzle_address(linear, swizzle) >> 4
    return _CHUNKS[key]
