"""Bit logic and shifts: PTX ISA, "Logic and Shift Instructions" and `prmt` of "Data Movement"."""

from .integer import bits_of
from .table import alu

CHAPTER = "logic-and-shift-instructions"
BITS = "b16 b32 b64"

alu("and.pred d:pred, a:pred, b:pred", chapter=CHAPTER, numpy="logical_and(a, b, d)", cpp="d = a && b")
alu("or.pred d:pred, a:pred, b:pred", chapter=CHAPTER, numpy="logical_or(a, b, d)", cpp="d = a || b")
alu("xor.pred d:pred, a:pred, b:pred", chapter=CHAPTER, numpy="logical_xor(a, b, d)", cpp="d = a != b")
alu("not.pred d:pred, a:pred", chapter=CHAPTER, numpy="logical_not(a, d)", cpp="d = !a")
alu("and.<type> d, a, b", chapter=CHAPTER, type=BITS, numpy="bitwise_and(a, b, d)", cpp="d = a & b")
alu("or.<type> d, a, b", chapter=CHAPTER, type=BITS, numpy="bitwise_or(a, b, d)", cpp="d = a | b")
alu("xor.<type> d, a, b", chapter=CHAPTER, type=BITS, numpy="bitwise_xor(a, b, d)", cpp="d = a ^ b")
alu("not.<type> d, a", chapter=CHAPTER, type=BITS, numpy="invert(a, d)", cpp="d = ~a")
alu("cnot.<type> d, a", chapter=CHAPTER, type=BITS, numpy="equal(a, 0, d)", cpp="d = a == 0 ? 1 : 0")


def lop3_terms(lut: int) -> list[tuple[bool, bool, bool]]:
    """Minterms of a lop3 table: bit (a << 2 | b << 1 | c) of the table is the result for those input bits."""
    return [(bool(i & 4), bool(i & 2), bool(i & 1)) for i in range(8) if lut >> i & 1]


alu(
    "lop3.<type> d, a, b, c, lut:u32", chapter=CHAPTER, type="b32", numpy="lop3(a, b, c, lut, d)",
    cpp="d = 0; for (int i = 0; i < 8; ++i) if (lut >> i & 1)"
    " d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c)",
)  # fmt: skip
alu(
    "shl.<type> d, a, b:u32", chapter=CHAPTER, type=BITS, numpy="shl(a, b, d)",
    cpp=lambda m: f"d = b > {bits_of(m) - 1}u ? 0 : a << b",
)  # fmt: skip
alu(
    "shr.<type> d, a, b:u32", chapter=CHAPTER, type="b16 b32 b64 u16 u32 u64 s16 s32 s64", numpy="shr(a, b, d)",
    cpp=lambda m: (
        f"d = b > {bits_of(m) - 1}u ? {f'a >> {bits_of(m) - 1}' if m['type'][0] == 's' else '0'} : a >> b"
    ),
)  # fmt: skip


def _cpp_funnel(mods) -> str:
    shift = "(c & 31u)" if mods["mode"] == "wrap" else "(c > 32u ? 32u : c)"
    value = "(uint64_t(b) << 32 | a)"
    if mods["dir"] == "l":
        return f"d = uint32_t({value} << {shift} >> 32)"
    return f"d = uint32_t({value} >> {shift})"


alu(
    "shf.<dir>.<mode>.<type> d, a, b, c:u32", chapter=CHAPTER, type="b32", dir="l r", mode="clamp wrap",
    numpy=lambda m: f"shf(a, b, c, d, {m['dir']!r}, {m['mode']!r})", cpp=_cpp_funnel,
)  # fmt: skip


def _selectors(mode: str) -> list[int]:
    """Selectors of a prmt mode for c = 0, 1, 2, 3: nibble i picks the byte that goes to byte i."""
    pick = {
        "f4e": lambda n, i: n + i, "b4e": lambda n, i: (n - i) & 7, "rc8": lambda n, i: n,
        "ecl": lambda n, i: max(i, n), "ecr": lambda n, i: min(i, n), "rc16": lambda n, i: 2 * (n & 1) + (i & 1),
    }[mode]  # fmt: skip
    return [sum(pick(n, i) << 4 * i for i in range(4)) for n in range(4)]


def _cpp_permute(mods) -> str:
    chosen = "c"
    if mods["mode"]:
        chosen = f"((const uint32_t[4]){{{', '.join(f'{s}u' for s in _selectors(mods['mode']))}}})[c & 3u]"
    return (
        f"uint64_t both = uint64_t(b) << 32 | a; uint32_t chosen = {chosen}; d = 0; for (int i = 0; i < 4; ++i) {{"
        " uint32_t s = chosen >> 4 * i & 15u, v = both >> 8 * (s & 7u) & 255u; if (s & 8u) v = v & 128u ? 255u : 0u;"
        " d |= v << 8 * i; }"
    )


alu(
    "prmt.<type>{.<mode>} d, a, b, c:u32", chapter="data-movement-and-conversion-instructions", type="b32",
    mode="f4e b4e rc8 ecl ecr rc16",
    numpy=lambda m: f"prmt(a, b, c, d, {m['mode']!r})",
    cpp=_cpp_permute,
)  # fmt: skip
