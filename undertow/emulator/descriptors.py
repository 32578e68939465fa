"""Bit fields that PTX hides in registers: matrix descriptors, instruction descriptors, and the address swizzle.

Sources: PTX ISA "tcgen05 matrix descriptor", "instruction descriptor", "wgmma matrix descriptor format"; the canonical
layouts of CUTLASS `mma_sm100_desc.hpp` and `mma_sm90_desc.hpp`, which are the same ones under two encodings.
Exercised by compiled kernels: 128-byte swizzle, both majors, bf16.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import ProtocolError, UnsupportedPtx

SWIZZLE_OF_LAYOUT = {0: 0, 2: 128, 4: 64, 6: 32}
SWIZZLE_OF_WGMMA_LAYOUT = {0: 0, 1: 128, 2: 64, 3: 32}
WGMMA_RESERVED = 0b11 << 14 | 0b11 << 30 | 0b111 << 46 | 0x3FF << 52
HALF_FORMATS = {0: "f16", 1: "bf16"}


def swizzle_address(address, swizzle_bytes: int, base_offset: int = 0):
    """Permute the 16-byte chunks of an absolute shared address (int or array), as TMA and the tensor cores do.

    Bits [4:7) are XORed with bits [7:10) for 128 bytes, two bits of them for 64, one for 32; 0 changes nothing.
    base_offset: where the pattern begins in these bits.
    """
    if not swizzle_bytes:
        return address
    chunks = swizzle_bytes // 16 - 1
    return address ^ ((((address >> 7) - base_offset) & chunks) << 4)


@dataclass(frozen=True)
class SharedDescriptor:
    """Where a matrix operand lies in shared memory: byte addresses and byte strides; base_offset as in the swizzle."""

    start: int
    leading: int
    stride: int
    swizzle: int
    base_offset: int = 0


@lru_cache(maxsize=4096)
def decode_shared_descriptor(bits: int) -> SharedDescriptor:
    """Decode a 64-bit tcgen05 shared-memory descriptor.

    Raises: ProtocolError for a wrong version or reserved bits; UnsupportedPtx for 128-byte swizzle on a 32-byte base,
    base offsets and absolute leading offsets.
    """
    version, base_offset, layout = bits >> 46 & 3, bits >> 49 & 7, bits >> 61 & 7
    if version != 1:
        raise ProtocolError(f"matrix descriptor {bits:#018x}: version field [46:48) is {version}, tcgen05 needs 1")
    if bits >> 53 & 0xFF:
        raise ProtocolError(f"matrix descriptor {bits:#018x}: reserved bits [53:61) are {bits >> 53 & 0xFF:#x}, need 0")
    if layout == 1:
        raise UnsupportedPtx(f"matrix descriptor {bits:#018x}: 128-byte swizzle with 32-byte atoms")
    if layout not in SWIZZLE_OF_LAYOUT:
        raise ProtocolError(
            f"matrix descriptor {bits:#018x}: layout field [61:64) is {layout}; allowed are 0, 1, 2, 4, 6"
        )
    if base_offset:
        raise UnsupportedPtx(f"matrix descriptor {bits:#018x}: base offset {base_offset}")
    if bits >> 52 & 1:
        raise UnsupportedPtx(f"matrix descriptor {bits:#018x}: absolute leading-dimension mode")
    return SharedDescriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, SWIZZLE_OF_LAYOUT[layout]
    )


@lru_cache(maxsize=4096)
def decode_wgmma_descriptor(bits: int) -> SharedDescriptor:
    """Decode the 64-bit shared-memory descriptor of wgmma.

    ASSUMED: a base offset says in which 128-byte row of its pattern the address space begins, so that the swizzle
    counts rows from there; tensor copies swizzle by absolute addresses and need 0.

    Raises: ProtocolError for reserved bits.
    """
    if bits & WGMMA_RESERVED:
        raise ProtocolError(f"wgmma matrix descriptor {bits:#018x}: reserved bits {bits & WGMMA_RESERVED:#x} are set")
    return SharedDescriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4,
        SWIZZLE_OF_WGMMA_LAYOUT[bits >> 62], bits >> 49 & 7,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def operand_index(descriptor: SharedDescriptor, mn_major: bool, extent: int, depth: int = 16) -> np.ndarray:
    """Index of every element of a 16-bit operand into shared memory seen as uint16: array (extent, depth).

    extent counts along M or N, depth along K. The swizzle acts on the final absolute address.
    """
    mn = np.arange(extent, dtype=np.int64)[:, None]
    k = np.arange(depth, dtype=np.int64)[None, :]
    row_bytes = descriptor.swizzle or 16
    if not mn_major:
        address = descriptor.start + (mn // 8) * descriptor.stride + (mn % 8) * row_bytes
        chunk = descriptor.leading if not descriptor.swizzle else 16
        address = address + (k // 8) * chunk + (k % 8) * 2
    elif descriptor.swizzle:
        per_row = row_bytes // 2
        address = descriptor.start + (mn % per_row) * 2 + (mn // per_row) * descriptor.leading
        address = address + (k % 8) * row_bytes + (k // 8) * descriptor.stride
    else:
        address = descriptor.start + (mn % 8) * 2 + (mn // 8) * descriptor.stride
        address = address + (k % 8) * 16 + (k // 8) * descriptor.leading
    index = swizzle_address(address, descriptor.swizzle, descriptor.base_offset) >> 1
    index.setflags(write=False)
    return index


@dataclass(frozen=True)
class InstructionDescriptor:
    """What a kind::f16 MMA multiplies: formats, majors, negations and the M by N shape (K is 16)."""

    a_format: str
    b_format: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    m: int
    n: int


@lru_cache(maxsize=1024)
def decode_instruction_descriptor(bits: int) -> InstructionDescriptor:
    """Decode the 32-bit instruction descriptor of tcgen05.mma kind::f16, cta_group::1.

    Raises: ProtocolError for fields that the ISA forbids (mixed f16 and bf16, reserved bits, shapes);
    UnsupportedPtx for f16 accumulators and sparsity.
    """
    name = f"instruction descriptor {bits:#010x}"
    d_format, a_format, b_format = bits >> 4 & 3, bits >> 7 & 7, bits >> 10 & 7
    if bits >> 2 & 1:
        raise UnsupportedPtx(f"{name}: sparse operand A")
    if bits & 0b1000 or bits & 0b11:
        raise ProtocolError(f"{name}: bits [0:4) are {bits & 15:#x}, need 0 for dense kind::f16")
    if bits >> 6 & 1 or bits >> 23 & 1 or bits >> 29:
        raise ProtocolError(f"{name}: reserved bits 6, 23 or [29:32) are set")
    if d_format not in (0, 1):
        raise ProtocolError(f"{name}: accumulator format {d_format}; allowed are 0 (f16) and 1 (f32)")
    for which, value in (("A", a_format), ("B", b_format)):
        if value not in HALF_FORMATS:
            raise ProtocolError(f"{name}: format of {which} is {value}; allowed are 0 (f16) and 1 (bf16)")
    if a_format != b_format:
        raise ProtocolError(
            f"{name}: A is {HALF_FORMATS[a_format]} and B is {HALF_FORMATS[b_format]}; kind::f16 needs equal formats"
        )
    if d_format == 0:
        if a_format == 1:
            raise ProtocolError(f"{name}: bf16 operands with an f16 accumulator")
        raise UnsupportedPtx(f"{name}: f16 accumulator")
    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    if m not in (64, 128):
        raise ProtocolError(f"{name}: M is {m}; allowed for one CTA are 64 and 128")
    step = 8 if m == 64 else 16
    if n % step or not step <= n <= 256:
        raise ProtocolError(f"{name}: N is {n}; allowed for M = {m} are multiples of {step} up to 256")
    return InstructionDescriptor(
        HALF_FORMATS[a_format], HALF_FORMATS[b_format], bool(bits >> 13 & 1), bool(bits >> 14 & 1),
        bool(bits >> 15 & 1), bool(bits >> 16 & 1), m, n,
    )  # fmt: skip
