"""Every element of a result is written exactly once: finds stores that are in bounds and yet in the wrong place.

Optional, because kernels may write a result more than once on purpose. Bulk reductions do not count as writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .. import events as ev
from ..memory.global_memory import host_span
from .base import Finding

SHOWN = 4
"""Elements that a finding lists."""


class Ownership:
    """Counts the writes of each element of some arrays. results: name -> NumPy array or CPU tensor of the launch."""

    subscriptions: ClassVar[tuple[type, ...]] = (ev.CtaStarted, ev.MemoryAccess)

    def __init__(self, results: Mapping[str, Any]):
        self._results = dict(results)

    def start(self, program: Any, launch: Any) -> None:
        """Begin a launch."""
        self._counts: dict[int, np.ndarray] = {}
        self._memory: Any = None

    def observe(self, event: Any) -> None:
        """Count the bytes that are written."""
        if isinstance(event, ev.CtaStarted):
            self._memory = event.cta.machine.global_memory
            return
        if event.space != "global" or event.kind != "write":
            return
        region = self._memory.region(int(event.addresses[0]), 1)
        counts = self._counts.get(region.base)
        if counts is None:
            counts = self._counts[region.base] = np.zeros(region.num_bytes, np.uint16)
        starts = event.addresses.astype(np.int64) - region.base
        np.add.at(counts, (starts[:, None] + np.arange(event.size)).reshape(-1), 1)

    def finish(self) -> list[Finding]:
        """One finding per array with elements that were not written, or more than once."""
        found = []
        for name, array in self._results.items():
            counts = self._counts_of(name, array)
            for what, wrong in (("never written", counts == 0), ("written more than once", counts > 1)):
                if wrong.any():
                    where = [tuple(map(int, place)) for place in np.argwhere(wrong)[:SHOWN]]
                    listed = ", ".join(map(str, where)) + (", ..." if wrong.sum() > SHOWN else "")
                    message = f"{int(wrong.sum())} of {wrong.size} elements of {name} {what}: {listed}"
                    found.append(Finding("write-exactly-once", message))
        return found

    def _counts_of(self, name: str, array: Any) -> np.ndarray:
        """How often each element was written, in the shape of the array."""
        span = host_span(array, name)
        size = array.itemsize if isinstance(array, np.ndarray) else array.element_size()
        strides = array.strides if isinstance(array, np.ndarray) else [s * size for s in array.stride()]
        offsets = np.zeros(tuple(array.shape), np.int64)
        for axis, (extent, stride) in enumerate(zip(array.shape, strides, strict=True)):
            shape = [1] * offsets.ndim
            shape[axis] = extent
            offsets += (np.arange(extent) * stride).reshape(shape)
        assert self._memory is not None, "the launch has run no CTA"
        address = self._memory.device_address(span)
        region = self._memory.region(address, 1)
        counts = self._counts.get(region.base)
        return np.zeros(offsets.shape, int) if counts is None else counts[offsets + (address - region.base)]
