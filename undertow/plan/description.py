"""What a kernel launch means, said without a driver and without an emulator.

A launch description names the kernel, the grid, and one value per PTX `.param`, in order. The code that derives it
from a plan and real tensors is then the same whether an emulator or a GPU executes the kernel, and a person can
write one by hand for any other PTX. Arrays are NumPy arrays or torch tensors and are held, never copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SWIZZLES = (0, 32, 64, 128)  # bytes of one swizzled row; 0 is no swizzle


class DescriptionError(ValueError):
    """A launch description that no machine could execute."""


@dataclass(frozen=True)
class Pointer:
    """A 64-bit address: where `array` begins, plus `offset_bytes`."""

    array: Any
    offset_bytes: int = 0

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return 8


@dataclass(frozen=True)
class Tensor:
    """An address followed by the shape and the strides that are not fixed at compile time.

    Layout: u64 address, one i32 per entry of `dims`, padding to 8 bytes, one i64 per entry of `strides`.
    Units: `strides` count elements.
    """

    array: Any
    dims: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def strides_offset(self) -> int:
        """Where the strides begin, in bytes from the address."""
        return -(-(8 + 4 * len(self.dims)) // 8) * 8

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return self.strides_offset + 8 * len(self.strides)


@dataclass(frozen=True, init=False)
class Ints:
    """Consecutive i32 values, such as a shape."""

    values: tuple[int, ...]

    def __init__(self, *values: int) -> None:
        object.__setattr__(self, "values", tuple(values))

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return 4 * len(self.values)


@dataclass(frozen=True)
class TensorMap:
    """What a 128-byte TMA tensor map means; the bytes themselves are the driver's.

    dims, box: extents, fastest dimension first, in elements. strides: of dims[1:], in BYTES, multiples of 16.
    swizzle: bytes of one swizzled row, 0 for none. Elements outside `dims` read as zero and are not written.
    Raises: DescriptionError naming the field that breaks a rule of the tensor map.
    """

    array: Any
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        rank = len(self.dims)
        if not 1 <= rank <= 5:
            raise DescriptionError(f"dims has {rank} entries: a tensor map has 1 to 5 dimensions")
        if len(self.box) != rank:
            raise DescriptionError(f"box has {len(self.box)} entries, dims has {rank}: one box extent per dimension")
        if len(self.strides) != rank - 1:
            raise DescriptionError(
                f"strides has {len(self.strides)} entries, dims has {rank}: give one stride in bytes for dims[1:]"
            )
        for name, extents, highest in (("dims", self.dims, 2**32), ("box", self.box, 256)):
            if not all(1 <= extent <= highest for extent in extents):
                raise DescriptionError(f"{name}={extents}: every extent must be in [1, {highest}]")
        if not all(stride >= 0 and stride % 16 == 0 and stride < 2**40 for stride in self.strides):
            raise DescriptionError(f"strides={self.strides}: bytes, multiples of 16, in [0, 2**40)")
        if self.swizzle not in SWIZZLES:
            raise DescriptionError(f"swizzle={self.swizzle}: must be one of {SWIZZLES}")

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return 128


@dataclass(frozen=True)
class Opaque:
    """A block of `size` bytes that the kernel is handed and does not read."""

    size: int


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    params: one entry per PTX `.param`, in order: Pointer, Tensor, Ints, TensorMap, Opaque, or a plain number
    (int: i32, or i64 where the parameter has 8 bytes; float: f32).
    kernel: entry name, or None where the PTX has a single entry. dynamic_smem: bytes.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: tuple[Any, ...]
    kernel: str | None = None
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_smem: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", tuple(self.params))
        for name in ("grid", "block", "cluster"):
            extents = getattr(self, name)
            if len(extents) != 3 or not all(extent >= 1 for extent in extents):
                raise DescriptionError(f"{name}={extents}: give three extents of at least 1")
        if any(grid % cluster for grid, cluster in zip(self.grid, self.cluster, strict=True)):
            raise DescriptionError(f"grid={self.grid} is not a whole number of clusters of {self.cluster}")
        if self.dynamic_smem < 0:
            raise DescriptionError(f"dynamic_smem={self.dynamic_smem}: bytes, at least 0")
