"""Matrix operands that a tensor core reads from shared memory through a descriptor."""

import numpy as np

from ..descriptors import SharedDescriptor, operand_index
from ..errors import MemoryFault
from ..events import MemoryAccess
from ..numpy_backend.arithmetic import widen


class SharedOperand:
    """Reads operands for one instruction and reports what was read."""

    def __init__(self, decoded, bus):
        self.decoded = decoded
        self.sink = bus.sink(MemoryAccess)
        self._places: dict[tuple[SharedDescriptor, bool, int], np.ndarray] = {}

    def read(self, operation, descriptor: SharedDescriptor, mn_major: bool, extent: int, kind: str) -> np.ndarray:
        """An (extent, 16) operand as float64.

        Raises: MemoryFault if it leaves shared memory.
        """
        shared = operation.lanes.cta.shared
        index = operand_index(descriptor, mn_major, extent)
        low, high = int(index.min()) * 2, int(index.max()) * 2 + 2
        if low < shared.base or high > shared.end:
            raise MemoryFault(
                f"MMA operand [{low:#x}, {high:#x}) leaves shared memory [{shared.base:#x}, {shared.end:#x})"
            )
        if self.sink:
            key = (descriptor, mn_major, extent)
            places = self._places.get(key)
            if places is None:
                places = self._places[key] = np.unique(index >> 3) << 4
            self.sink(
                MemoryAccess(operation.lanes, self.decoded, "read", "shared", "async", places, 16, None, operation)
            )
        return widen(shared.view(2, 1)[:, 0][index], kind).astype(np.float64)
