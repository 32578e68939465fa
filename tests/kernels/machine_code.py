"""Machine code made by hand: a line an instruction, the control bits in words; and cubins that hold it."""

from __future__ import annotations

import re
import struct

from undertow.kernels.sass import EM_CUDA, NONE, SIZE, Code, Instruction

FREE = 0x000FC00000000000  # control bits of an instruction that sets no scoreboard and waits for none
WORDS = {  # name: low and high word without guard, target and control bits
    "NOP": (0x918, 0),
    "LDS": (0x984, 0),
    "FENCE": (0x3C6, 0),
    "FENCE.G": (0x3C6, 0x100),
    "MEMBAR": (0x992, 0x8000),
    "BAR": (0xB1D, 0x10000),
    "ARRIVE": (0x9A7, 0x8100008),
    "PHASECHK": (0x5A7, 0x800014C),
    "REDG": (0x98E, 0xC10E3A2),
    "BSSY": (0x945, 0x3800000),
    "BSYNC": (0x941, 0x3800000),
    "WARPSYNC": (0x948, 0x3800000),
    "COLLECTIVE": (0x948, 0x3C00000),
    "BRA": (0x947, 0x3800000),
    "BRA.U": (0x547 | 1 << 32, 0xB800000),
    "CALL": (0x944, 0x3C00000),
    "RET": (0x950, 0x3C00000),
    "BRX": (0x949, 0x3800000),
    "TRAP": (0x95C | 4 << 32, 0x300000),
    "EXIT": (0x94D, 0x3800000),
}


def instruction(line: str, number: int) -> Instruction:
    """One line: `[@P0] NAME [line number to jump to] [set=SCOREBOARD] [read=SCOREBOARD] [wait=SCOREBOARD ...]`."""
    found = re.fullmatch(r"(@P0 )?([A-Z.]+)( \d+)?((?: (?:set|read|wait)=\d)*)", line)
    assert found is not None, line
    low, high = WORDS[found.group(2)]
    low |= 0 if found.group(1) else 7 << 12
    if found.group(3):
        offset = (int(found.group(3)) - number - 1) * SIZE // 4
        if found.group(2) == "BSSY":
            low |= (offset & (1 << 30) - 1) << 34
        else:
            low |= (offset & 0xFF) << 16 | (offset >> 8 & (1 << 30) - 1) << 34
            high |= offset >> 38 & 0x3FFFF
    high |= FREE
    for word, scoreboard in re.findall(r"(set|read|wait)=(\d)", found.group(4)):
        place, bits = {"set": (46, NONE), "read": (49, NONE), "wait": (52, 0)}[word]
        value = 1 << int(scoreboard) if word == "wait" else int(scoreboard)
        high = high & ~(bits << place) | value << place
    return Instruction(number * SIZE, low, high)


def code(*lines: str, name: str = "k") -> Code:
    return Code(name, tuple(instruction(line, number) for number, line in enumerate(lines)))


def bytes_of(kernel: Code) -> bytes:
    return b"".join(struct.pack("<QQ", x.low, x.high) for x in kernel.instructions)


def cubin(*kernels: Code) -> bytes:
    """An ELF file with a section for each kernel, and no more of it than tells a reader where they are."""
    sections = [("", 0, b""), *((f".text.{kernel.name}", 1, bytes_of(kernel)) for kernel in kernels)]
    names = b"\0".join(name.encode() for name, _, _ in sections) + b"\0.shstrtab\0"
    sections.append((".shstrtab", 3, names))
    body, headers = b"", b""
    for name, kind, content in sections:
        place = names.index(b"\0" + name.encode() + b"\0") + 1 if name else 0
        headers += struct.pack("<IIQQQQIIQQ", place, kind, 0, 0, 64 + len(body), len(content), 0, 0, 16, 0)
        body += content
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHH", 2, EM_CUDA, 1, 0, 0, 64 + len(body), 0, 64, 0, 0)
    return head + struct.pack("<HHH", 64, len(sections), len(sections) - 1) + body + headers


EARLY = code("BAR", "NOP", "FENCE set=1", "@P0 BRA 0", "EXIT", name="early")  # as ptxas 13.4 ends a loop
