"""The memories of the machine: bytes with bounds, alignment and poison; nothing here knows instructions."""

from .byte_memory import ByteMemory
from .global_memory import GlobalMemory, Region
from .shared_memory import Mbarrier, SharedMemory
from .tensor_memory import TensorMemory

__all__ = ["ByteMemory", "GlobalMemory", "Mbarrier", "Region", "SharedMemory", "TensorMemory"]
