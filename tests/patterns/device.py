"""What the pattern kernels share: shared memory by byte offset, mbarriers by number, copies, tensor memory.

Plain Python that is called while a kernel is traced; most functions are one or two instructions. The dynamic shared
memory of every pattern begins with its mbarriers, 8 bytes each; data begins at byte `DATA`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int8, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_tensor

from undertow.kernels.sm100.instructions import mma, store_vector

WARP = 32  # threads
DATA = 1024  # byte offset of the data; keeps the alignment that swizzled boxes need
TMEM_WORD = 512  # byte offset of the word that receives the address of a TMEM allocation
TMEM_LANE = 1 << 16  # one lane in a TMEM address
SWIZZLED_ROW = 128  # bytes
_WHOLE_MAP = 1024  # alignment of the shared memory, in bytes


def set_entry(kernel: Any, name: str) -> None:
    """Name the PTX entry, the same for a pattern and its twins."""
    kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)


def argument(*shape: int, dtype: Any = Float32) -> cute.Tensor:
    """A contiguous tensor argument of fixed shape, last dimension fastest: its parameter is an address."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return make_fake_tensor(dtype, shape, stride=tuple(strides), assumed_align=16)


def shared(offset: int | Int32, dtype: Any = Float32) -> cute.Pointer:
    """A typed pointer to a byte of the CTA's dynamic shared memory."""
    return cute.recast_ptr(cute.arch.get_dyn_smem(Int8, alignment=_WHOLE_MAP) + offset, dtype=dtype)


def elements(offset: int | Int32, count: int, dtype: Any = Float32) -> cute.Tensor:
    """`count` consecutive elements of shared memory."""
    return cute.make_tensor(shared(offset, dtype), cute.make_layout(count))


def warp_number() -> Int32:
    """The warp of this thread, as a value that the compiler knows to be the same in all its lanes."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def mbarrier(number: int | Int32) -> cute.Pointer:
    """The mbarrier with this number."""
    return shared(0, Int64) + number


def wait(number: int | Int32, parity: int | Int32) -> None:
    """Block until the phase of this parity is complete."""
    cute.arch.mbarrier_wait(mbarrier(number), parity)


def arrive(number: int | Int32) -> None:
    """Arrive by one elected lane, for a warp whose lanes have been joined."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(mbarrier(number))


def expect(number: int | Int32, size: int) -> None:
    """Arrive by this thread and expect `size` bytes."""
    cute.arch.mbarrier_arrive_and_expect_tx(mbarrier(number), size)


def initialise(counts: Sequence[int], fenced: bool = True) -> None:
    """Give mbarrier i the arrival count counts[i], by one lane; the caller is one warp and joins the others."""
    with cute.arch.elect_one():
        for number, count in enumerate(counts):
            cute.arch.mbarrier_init(mbarrier(number), count)
    if fenced:
        cute.arch.mbarrier_init_fence()


def named_barrier(number: int | Int32, threads: int) -> None:
    """Arrive at a named barrier and wait for `threads` threads."""
    cute.arch.barrier(barrier_id=number, number_of_threads=threads)


def named_arrive(number: int | Int32, threads: int) -> None:
    """Arrive at a named barrier of `threads` threads without waiting."""
    cute.arch.barrier_arrive(barrier_id=number, number_of_threads=threads)


def bulk_load(offset: int | Int32, source: cute.Pointer, count: int, number: int | Int32) -> None:
    """Start a copy of `count` floats from global memory that completes bytes of an mbarrier; by one thread."""
    layout = cute.make_layout(count)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    cute.copy(atom, cute.make_tensor(source, layout), elements(offset, count), mbar_ptr=mbarrier(number))


def bulk_store(target: cute.Pointer, offset: int | Int32, count: int) -> None:
    """Start a copy of `count` floats to global memory, as a bulk group of this thread."""
    atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Float32)
    cute.copy(atom, elements(offset, count), cute.make_tensor(target, cute.make_layout(count)))
    cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class Box:
    """A tile that TMA moves: `rows` of `columns` contiguous elements; bf16 boxes lie under the 128-byte swizzle."""

    columns: int
    rows: int
    dtype: Any = Float32

    @property
    def size(self) -> int:
        """Bytes."""
        return self.columns * self.rows * self.dtype.width // 8

    def layout(self) -> Any:
        """Where an element lies in shared memory, as (column, row)."""
        if self.dtype is Float32:
            return cute.make_layout((self.columns, self.rows))
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.MN_SW128, self.dtype)
        return cute.tile_to_shape(atom, (self.columns, self.rows), order=(0, 1))

    def tensor_map(self, tensor: cute.Tensor) -> cute.CopyAtom:
        """The TMA load of one box of a (rows, columns) tensor; built by the host function."""
        view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 0]))
        box = (self.columns, self.rows)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, self.layout(), box).atom

    def load(self, tensor_map: cute.CopyAtom, corner: tuple, offset: int | Int32, number: int | Int32) -> None:
        """Start the copy of the box at `corner` (column, row), by one lane that the DSL elects."""
        layout = self.layout()
        target = shared(offset, self.dtype)
        if self.dtype is Float32:
            tile = cute.make_tensor(target, layout)
        else:
            tile = cute.make_tensor(cute.recast_ptr(target, layout.inner), layout.outer)
        box = cute.domain_offset(corner, cute.make_identity_tensor((self.columns, self.rows)))
        part, coordinates = cpasync.tma_partition(
            tensor_map, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(box, 0, 2)
        )
        cute.copy(tensor_map, coordinates, part, tma_bar_ptr=mbarrier(number))


ROWS = Box(64, 128, BFloat16)
"""Operand A of the MMAs here: M = 128, K = 64."""
COLUMNS = Box(64, 32, BFloat16)
"""Operand B: N = 32, K = 64."""
K_STEPS = 4  # instructions of K = 16 in a box of 64
ACCUMULATOR = COLUMNS.rows  # TMEM columns of a 128 x 32 fp32 accumulator
INSTRUCTION = 1 << 4 | 1 << 7 | 1 << 10 | (COLUMNS.rows >> 3) << 17 | (ROWS.rows >> 4) << 24
"""fp32 += bf16 x bf16, both K-major, 128 x 32. Source: PTX ISA, tcgen05 instruction descriptor."""


def operand(offset: int | Int32, step: int) -> Int64:
    """Descriptor of 16 of the 64 k of a swizzled box. Source: PTX ISA, tcgen05 shared memory descriptor."""
    fields = 1 << 16 | (8 * SWIZZLED_ROW >> 4) << 32 | 1 << 46 | 2 << 61
    return Int64((shared(offset).toint() + 32 * step) >> 4) + fields


def multiply(d: Int32, a: int | Int32, b: int | Int32, steps: range) -> None:
    """Issue k steps of D += A B for operands in shared memory, by this thread; step 0 begins the sum."""
    for step in steps:
        mma(d, operand(a, step), operand(b, step), INSTRUCTION, step > 0)


def commit(number: int | Int32) -> None:
    """Arrive when all MMAs that this thread has issued are done."""
    tcgen05.commit(mbarrier(number))


def allocate_tmem(columns: int) -> None:
    """Allocate by this warp; its address appears in shared memory at TMEM_WORD."""
    cute.arch.alloc_tmem(columns, shared(TMEM_WORD, Int32))
    cute.arch.relinquish_tmem_alloc_permit()


def allocated_tmem() -> Int32:
    """The address of the allocation."""
    return elements(TMEM_WORD, 1, Int32)[0]


def free_tmem(address: Int32, columns: int) -> None:
    """Give the allocation back by this warp."""
    cute.arch.dealloc_tmem(cute.make_ptr(Int32, address, cute.AddressSpace.tmem, assumed_align=16), columns)


def own_lanes(address: Int32, warp: Int32) -> Int32:
    """The TMEM address moved to the quarter of the lanes that this warp may use."""
    return address + warp % 4 * (WARP * TMEM_LANE)


def store_row(target: cute.Pointer, words: list[Int32]) -> None:
    """Write 32-bit words to global memory, four at a time."""
    for first in range(0, len(words), 4):
        store_vector("global", target.toint() + 4 * first, words[first : first + 4])
