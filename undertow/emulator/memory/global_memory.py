"""Global memory: the user's arrays at synthetic device addresses far apart, so that no stray access hits a neighbour.

Arrays are never copied. Arrays that overlap on the host (slices of one packed tensor) share a region, so that they
alias for the kernel exactly as they do for the user.
"""

import bisect
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import LaunchError, MemoryFault
from .byte_memory import ByteMemory

FIRST_ADDRESS = 0x10_0000_0000
SPACING = 0x10_0000_0000


@dataclass(frozen=True)
class HostSpan:
    """The bytes of one host array: [pointer, pointer + num_bytes), and `first`, where its first element lies."""

    pointer: int
    num_bytes: int
    writable: bool
    name: str
    owner: Any
    first: int


def host_span(array: Any, name: str) -> HostSpan:
    """Find the bytes that a NumPy array or CPU torch tensor spans, first to last element.

    Raises: LaunchError for anything else.
    """
    if isinstance(array, np.ndarray):
        pointer, strides, shape, element = array.ctypes.data, array.strides, array.shape, array.itemsize
        writable = array.flags.writeable
    elif hasattr(array, "data_ptr") and hasattr(array, "element_size"):
        if str(array.device) != "cpu":
            raise LaunchError(f"{name}: a tensor on {array.device}; the emulator needs CPU memory")
        pointer, element, shape = array.data_ptr(), array.element_size(), tuple(array.shape)
        strides = tuple(s * element for s in array.stride())
        writable = True
    else:
        raise LaunchError(f"{name}: {type(array).__name__} is neither a NumPy array nor a CPU torch tensor")
    if 0 in shape:
        return HostSpan(pointer, 0, writable, name, array, pointer)
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    return HostSpan(pointer + low, high - low + element, writable, name, array, pointer)


class Region(ByteMemory):
    """One device buffer: device addresses [base, end) over host memory at `pointer`."""

    def __init__(self, pointer: int, num_bytes: int, base: int, label: str, writable: bool, owners: list):
        buffer = (ctypes.c_ubyte * max(num_bytes, 1)).from_address(pointer) if num_bytes else bytearray(1)
        data = np.frombuffer(memoryview(buffer), np.uint8, num_bytes)
        super().__init__(data, base, num_bytes, label)
        self.pointer = pointer
        self.num_bytes = num_bytes
        self.writable = writable
        self.owners = owners


class GlobalMemory:
    """All regions of a launch, ordered by device address."""

    def __init__(self, spans: list[HostSpan]):
        self.regions: list[Region] = []
        for group in _overlapping_groups(spans):
            pointer = min(s.pointer for s in group)
            end = max(s.pointer + s.num_bytes for s in group)
            label = "buffer " + ", ".join(dict.fromkeys(s.name for s in group))
            base = FIRST_ADDRESS + len(self.regions) * SPACING
            writable = any(s.writable for s in group)
            self.regions.append(Region(pointer, end - pointer, base, label, writable, [s.owner for s in group]))
        self._bases = [r.base for r in self.regions]
        self._last: Region | None = None

    def device_address(self, span: HostSpan) -> int:
        """Translate the address of the array's first element."""
        for region in self.regions:
            if region.pointer <= span.pointer and span.pointer + span.num_bytes <= region.pointer + region.num_bytes:
                return region.base + span.first - region.pointer
        raise AssertionError(f"span {span.name} was never registered")

    def region(self, address: int, num_bytes: int) -> Region:
        """Find the region that holds an access.

        Raises: MemoryFault naming the nearest buffer.
        """
        place = bisect.bisect_right(self._bases, address) - 1
        region = self.regions[place] if place >= 0 else None
        if region is not None and address + num_bytes <= region.end:
            return region
        raise MemoryFault(f"{num_bytes} bytes at {address:#x} are outside {self._nearest(place, address, num_bytes)}")

    def _nearest(self, place: int, address: int, num_bytes: int) -> str:
        """Describe the buffer closest to an address: the one below (regions[place]) or the one above."""
        below = self.regions[place] if place >= 0 else None
        above = self.regions[place + 1] if place + 1 < len(self.regions) else None
        if above is not None and (below is None or above.base - address < address - below.end):
            return f"{above.label} [{above.base:#x}, {above.end:#x}): they begin {above.base - address} bytes before it"
        if below is None:
            return "every buffer: the launch has none"
        past = address + num_bytes - below.end
        return f"{below.label} [{below.base:#x}, {below.end:#x}): they end {past} bytes past it"

    def spread(self, addresses: np.ndarray, num_bytes: int) -> list[tuple[Region, np.ndarray | None]]:
        """Split lanes by region: (region, positions), with None for all of them in one."""
        region = self._last
        low, high = int(addresses.min()), int(addresses.max())
        if region is None or not (region.base <= low and high + num_bytes <= region.end):
            region = self._last = self.region(low, num_bytes)
        if high + num_bytes <= region.end:
            return [(region, None)]
        owners = [self.region(int(a), num_bytes) for a in addresses]
        unique = list(dict.fromkeys(id(o) for o in owners))
        by_id = {id(o): o for o in owners}
        return [(by_id[u], np.array([i for i, o in enumerate(owners) if id(o) == u])) for u in unique]

    def check_writable(self, region: Region) -> None:
        """Refuse writes to arrays that the user marked read-only."""
        if not region.writable:
            raise MemoryFault(f"write to {region.label}, which is read-only on the host")


def _overlapping_groups(spans: list[HostSpan]) -> list[list[HostSpan]]:
    """Spans that share bytes, grouped; groups in the order in which the launch first names them."""
    groups: list[list[HostSpan]] = []
    for span in sorted(spans, key=lambda s: (s.pointer, -s.num_bytes)):
        end = max((s.pointer + s.num_bytes for s in groups[-1]), default=0) if groups else 0
        overlaps = bool(span.num_bytes) and span.pointer < end
        if groups and (overlaps or (not span.num_bytes and span.pointer == groups[-1][0].pointer)):
            groups[-1].append(span)
        else:
            groups.append([span])
    order = {id(span): place for place, span in enumerate(spans)}
    return sorted(groups, key=lambda group: min(order[id(span)] for span in group))
