"""Build a kernel out of one row of the semantics table: every choice of its modifiers, on chosen and random lanes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from undertow.emulator.compiled import generate
from undertow.emulator.semantics.table import Row
from undertow.ptx import TYPE_BITS

THREADS = 256
CHANNELS = 4
"""Source arrays: the operands of an instruction read different ones, so that they meet in all combinations."""

_SPECIAL_FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-40, -1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, np.inf,
    -np.inf, np.nan, 255.5, 65504.0, 65520.0, 2147483520.0, 4294967040.0, 1e20, 127.99, -126.5, -149.5, 1e-8, 88.0,
)  # fmt: skip


PROLOGUE = """\
    ld.param.b64 %out, [out];
    ld.param.b64 %sources, [sources];
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %at, %thread, 8;
    add.s64 %out, %out, %at;
    add.s64 %sources, %sources, %at;
    and.b32 %r0, %thread, 5;
    setp.ne.b32 %guard, %r0, 0;
"""


@dataclass(frozen=True)
class Variant:
    """One instruction to try: its text, the types of the sources it reads and of the results it writes."""

    mnemonic: str
    sources: dict[str, str]
    results: dict[str, str]
    guarded: bool


def variants(row: Row) -> Iterator[Variant]:
    """Yield every form of a lane row that has a C++ column, plain and guarded."""
    words = re.findall(r"\{\.<\w+>\}|\.<\w+>|\{\.[^}]+\}|\.[^.{]+|^[^.{]+", row.syntax.partition(" ")[0])
    for mods in generate.modifier_choices(row):
        statement = row.column("cpp", mods)
        if statement is None:
            continue
        types = {s.name: _operand_type(s.type, mods) for s in row.operands}
        if "b128" in types.values():
            continue
        mnemonic = "".join(_spell(word, mods) for word in words)
        sources = {s.name: types[s.name] for s in row.operands if not s.is_dst}
        results = {s.name: types[s.name] for s in row.operands if s.is_dst}
        yield Variant(mnemonic, sources, results, False)
        if not re.search(r"\bcc\b", statement):
            yield Variant(mnemonic, sources, results, True)


def _spell(word: str, mods: dict) -> str:
    optional, bare = word.startswith("{"), word.strip("{}")
    if bare.startswith(".<"):
        chosen = mods[bare.strip(".<>")]
        return f".{chosen}" if chosen else ""
    return bare if not optional or mods[bare[1:]] else ""


def _operand_type(type_name: str, mods: dict) -> str:
    if type_name == "wide":
        return mods["type"][0] + str(2 * int(mods["type"][1:]))
    return mods[type_name.strip("<>")] if type_name.startswith("<") else type_name


def register_type(type_name: str) -> str:
    """Declared type of a register that holds a PTX type: at least 16 bits."""
    return "pred" if type_name == "pred" else f"b{max(TYPE_BITS[type_name], 16)}"


def kernel(row: Row, some: list[Variant]) -> tuple[str, int]:
    """Write a kernel that runs the variants in turn and stores each result; returns PTX and bytes of output.

    Sources come from the array `sources` (CHANNELS rows of THREADS 64-bit patterns per type), results go to `out`.
    """
    writer = _Writer(row)
    for variant in some:
        writer.variant(variant)
    return writer.text(), writer.offset


class _Writer:
    """Collects register declarations and instructions; `offset` is where the next result goes."""

    def __init__(self, row: Row):
        self.row = row
        self.registers: list[str] = []
        self.lines: list[str] = [*map(str, PROLOGUE.splitlines())]
        self.offset = 0
        self.number = 0

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def variant(self, variant: Variant) -> None:
        names = {n: self.source(variant, n, t, i) for i, (n, t) in enumerate(variant.sources.items())}
        names.update({n: self.result(n, t) for n, t in variant.results.items()})
        if ".cc" in variant.mnemonic or self.row.syntax.startswith(("addc", "subc", "madc")):
            self.line("mul.lo.u32 %r1, %thread, 0x9e3779b9;")
            self.line(f"add.u32 %r1, %r1, {self.number};")
            self.line("add.cc.u32 %r1, %r1, %r1;")
        operands = ""
        for spec in self.row.operands:
            operands += ("|" if spec.paired else ", " if operands else "") + names[spec.name]
        self.line(f"{'@%guard ' if variant.guarded else ''}{variant.mnemonic} {operands};")
        for name, type_name in variant.results.items():
            self.store(names[name], type_name)
        if ".cc" in variant.mnemonic:
            self.line("addc.u32 %r0, 0, 0;")
            self.line("cvt.u64.u32 %wide, %r0;")
            self.store("%wide", "b64")
        self.number += 1

    def declare(self, name: str, type_name: str) -> str:
        register = f"%v{self.number}_{name}"
        self.registers.append(f"    .reg .{register_type(type_name)} {register};")
        return register

    def source(self, variant: Variant, name: str, type_name: str, channel: int) -> str:
        if name == "lut":
            return str((self.number * 73 + 0x96) % 256)
        register = self.declare(name, type_name)
        place = 8 * THREADS * (CHANNELS * list(SOURCES).index(_array(type_name)) + channel)
        if type_name == "pred":
            self.line(f"ld.global.b32 %r1, [%sources+{place}];")
            self.line(f"setp.lt.s32 {register}, %r1, 0;")
        else:
            self.line(f"ld.global.{register_type(type_name)} {register}, [%sources+{place}];")
        return register

    def result(self, name: str, type_name: str) -> str:
        """Declare a result and give it a value, which lanes with a false guard must keep."""
        register = self.declare(name, type_name)
        if type_name == "pred":
            self.line(f"setp.eq.u32 {register}, %thread, 3;")
        else:
            self.line(f"mov.{register_type(type_name)} {register}, 0x1234;")
        return register

    def store(self, register: str, type_name: str) -> None:
        kind = register_type(type_name)
        if kind == "pred":
            self.line(f"selp.b32 %r0, 1, 0, {register};")
            self.line(f"st.global.b32 [%out+{self.offset}], %r0;")
        else:
            self.line(f"st.global.{kind} [%out+{self.offset}], {register};")
        self.offset += 8 * THREADS

    def text(self) -> str:
        body = "\n".join([*self.registers, *self.lines])
        return (
            ".version 8.8\n.target sm_100a\n.address_size 64\n"
            ".visible .entry k(.param .u64 out, .param .u64 sources)\n{\n"
            "    .reg .b64 %out, %sources, %at, %wide;\n    .reg .b32 %thread, %r0, %r1;\n    .reg .pred %guard;\n"
            f"{body}\n    ret;\n}}\n"
        )


def _array(type_name: str) -> str:
    return {"f32x2": "f32", "f16x2": "f16", "bf16x2": "bf16"}.get(
        type_name, type_name if type_name in SOURCES else "bits"
    )


def _floats(dtype) -> np.ndarray:
    generator = np.random.default_rng(7)
    exponents = generator.uniform(-20, 20, (CHANNELS, 2 * THREADS))
    values = (generator.standard_normal((CHANNELS, 2 * THREADS)) * 2.0**exponents).astype(dtype)
    special = np.array(_SPECIAL_FLOATS, dtype)
    for channel in range(CHANNELS):
        chosen = generator.choice(2 * THREADS, THREADS, replace=False)
        values[channel, chosen] = generator.choice(special, THREADS)
    return values


def _bits() -> np.ndarray:
    generator = np.random.default_rng(11)
    words = generator.integers(0, 1 << 64, (CHANNELS, THREADS), np.uint64)
    edges = np.array([0, 1, 2, 31, 32, 33, 63, 64, 65, 255, 0x7F, 0x80, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000,
                      0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1], np.uint64)  # fmt: skip
    for channel in range(CHANNELS):
        chosen = generator.choice(THREADS, THREADS // 2, replace=False)
        words[channel, chosen] = generator.choice(edges, THREADS // 2)
        small = generator.choice(THREADS, THREADS // 8, replace=False)
        words[channel, small] = generator.integers(0, 70, THREADS // 8, np.uint64)
    return words


def _half_words(kind: str) -> np.ndarray:
    single = _floats(np.float32)
    with np.errstate(over="ignore"):
        halves = (
            single.astype(np.float16).view(np.uint16)
            if kind == "f16"
            else (single.view(np.uint32) >> 16).astype(np.uint16)
        )
    pairs = np.concatenate([halves, halves[:, ::-1]], 1)
    return np.ascontiguousarray(pairs).view(np.uint64)[:, :THREADS]


SOURCES = {
    "bits": _bits(),
    "f32": np.ascontiguousarray(_floats(np.float32)).view(np.uint64)[:, :THREADS],
    "f64": np.ascontiguousarray(_floats(np.float64)[:, :THREADS]).view(np.uint64),
    "f16": _half_words("f16"),
    "bf16": _half_words("bf16"),
}
"""64-bit patterns per thread by kind of value, CHANNELS rows each."""


def source_array() -> np.ndarray:
    """All sources in one buffer."""
    return np.ascontiguousarray(np.concatenate(list(SOURCES.values())))


def value_of(type_name: str, channel: int, lane: int, half: int) -> str:
    """A source value in hexadecimal, for messages."""
    if type_name == "pred":
        return str(bool(SOURCES["bits"][channel][lane] & np.uint64(1 << 31)))
    word = int(SOURCES[_array(type_name)][channel][lane])
    bits = max(TYPE_BITS[type_name], 16)
    if type_name.endswith("x2"):
        bits //= 2
        word >>= bits * int(half)
    return hex(word & ((1 << bits) - 1))
