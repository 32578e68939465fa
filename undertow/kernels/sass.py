"""Machine code of compiled kernels, decoded as far as a question about its order needs it: no disassembler.

Instructions have 16 bytes. Of each are read: the opcode (bits 0 to 11, of which the last three say where operands come
from), the guard (12 to 15), where it jumps, and the control bits that ptxas has set: the scoreboard that is released
when the result is there (110 to 112), the one that is released when the operands have been read (113 to 115), and the
scoreboards that must be free before it is issued (116 to 121).

Source: observed with nvdisasm 13.5.37, for NVIDIA documents none of it: opcodes, places and targets in its listings of
this package's kernels for sm_90a and sm_100a, as ptxas 12.9 and 13.4 compile them; other opcodes in listings of words
made up for that, one of each number. No number means two things for the two targets. The control bits are not listed:
they are where public descriptions of Volta have them, and what they say fits what the listed registers depend on.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from undertow.kernels.opcodes import BSSY

SIZE = 16  # bytes of an instruction
NONE = 7  # a scoreboard number that is none
EM_CUDA = 190  # e_machine of a cubin's ELF header
_ELF = b"\x7fELF\x02\x01"  # 64 bits, little endian
_TEXT, _SHT_PROGBITS = ".text.", 1


class SassError(ValueError):
    """The bytes are no machine code that this decoder knows; the message says where."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its two words, and its address in the kernel in bytes."""

    address: int
    low: int
    high: int

    @property
    def opcode(self) -> int:
        """With the form of its operands, such as 0xb1d for BAR with a number."""
        return self.low & 0xFFF

    @property
    def operation(self) -> int:
        """The opcode without the form of its operands, such as 0x11d for BAR."""
        return self.low & 0x1FF

    @property
    def is_guarded(self) -> bool:
        """Whether a predicate can keep it from being executed."""
        return self.low >> 12 & 0xF != 7

    @property
    def sets(self) -> frozenset[int]:
        """The scoreboards that it holds until it is complete, or has read its operands."""
        return frozenset((self.high >> 46 & 7, self.high >> 49 & 7)) - {NONE}

    def waits_for(self, scoreboard: int) -> bool:
        """Whether it is not issued before the scoreboard is free, whatever its guard says."""
        return scoreboard != NONE and bool(self.high >> (52 + scoreboard) & 1)

    @property
    def target(self) -> int:
        """Where a BRA, CALL.REL or BSSY leads, an address."""
        if self.operation == BSSY:
            offset = _signed(self.low >> 34, 30)
        else:
            offset = _signed((self.high & 0x3FFFF) << 30 | self.low >> 34, 48) << 8 | self.low >> 16 & 0xFF
        return self.address + SIZE + 4 * offset


@dataclass(frozen=True)
class Code:
    """All instructions of one kernel and of the functions that it calls, in the order of their addresses."""

    name: str
    instructions: tuple[Instruction, ...]


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def kernels_of(content: bytes) -> list[Code]:
    """The machine code of every kernel in an object file, a library or a cubin: wherever a cubin lies in the bytes.

    Raises: SassError if there is none, or one that is cut off.
    """
    found = [code for start in _cubins(content) for code in _codes(content, start)]
    if not found:
        raise SassError("no machine code of a GPU was found")
    return found


def _cubins(content: bytes) -> list[int]:
    starts = []
    at = content.find(_ELF)
    while at >= 0:
        if content[at + 18 : at + 20] == struct.pack("<H", EM_CUDA):
            starts.append(at)
        at = content.find(_ELF, at + 1)
    return starts


def _codes(content: bytes, start: int) -> list[Code]:
    try:
        (table,) = struct.unpack_from("<Q", content, start + 40)
        size, count, of_names = struct.unpack_from("<HHH", content, start + 58)
        headers = [
            struct.unpack_from("<IIQQQQ", content, start + table + number * size)  # name, type, flags, address, ...
            for number in range(count)
        ]
        names = start + headers[of_names][4]
        codes = []
        for name, kind, _, _, offset, length in headers:
            begin = names + name
            text = content[begin : content.index(b"\0", begin)].decode("ascii")
            if kind == _SHT_PROGBITS and text.startswith(_TEXT):
                codes.append(Code(text.removeprefix(_TEXT), _decoded(content[start + offset :][:length], length)))
    except (struct.error, IndexError, ValueError) as error:
        raise SassError(f"the cubin at byte {start} cannot be read: {error}") from error
    return codes


def _decoded(text: bytes, length: int) -> tuple[Instruction, ...]:
    if len(text) < length or length % SIZE:
        raise ValueError(f"{len(text)} bytes of code, {length} are announced")
    words = struct.iter_unpack("<QQ", text)
    return tuple(Instruction(number * SIZE, low, high) for number, (low, high) in enumerate(words))
