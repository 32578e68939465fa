"""Integer arithmetic: PTX ISA, "Integer Arithmetic Instructions" and "Extended-Precision Integer Arithmetic"."""

from .table import alu

CHAPTER = "integer-arithmetic-instructions"
EXTENDED = "extended-precision-arithmetic-instructions"
ALL = "u16 s16 u32 s32 u64 s64"
WIDE_SOURCES = "u16 s16 u32 s32"
WORDS = "u32 s32 u64 s64"


def bits_of(mods) -> int:
    """Width of the `type` modifier in bits."""
    return int(mods["type"].lstrip("usbf"))


def cpp_type(name: str) -> str:
    """C++ integer type of a PTX integer type: `int32_t` for s32, `uint64_t` for u64 and b64."""
    return f"{'' if name[0] == 's' else 'u'}int{name[1:]}_t"


def _wider(mods) -> str:
    return cpp_type(mods["type"][0] + str(2 * bits_of(mods)))


alu("add.<type> d, a, b", chapter=CHAPTER, type=ALL, numpy="add(a, b, d)", cpp="d = a + b")
alu("sub.<type> d, a, b", chapter=CHAPTER, type=ALL, numpy="subtract(a, b, d)", cpp="d = a - b")
alu(
    "add.sat.<type> d, a, b", chapter=CHAPTER, type="s32",
    numpy="add_sat(a, b, d)",
    cpp="int64_t t = int64_t(a) + b; d = t > INT32_MAX ? INT32_MAX : t < INT32_MIN ? INT32_MIN : int32_t(t)",
)  # fmt: skip
alu(
    "sub.sat.<type> d, a, b", chapter=CHAPTER, type="s32",
    numpy="sub_sat(a, b, d)",
    cpp="int64_t t = int64_t(a) - b; d = t > INT32_MAX ? INT32_MAX : t < INT32_MIN ? INT32_MIN : int32_t(t)",
)  # fmt: skip

alu("mul.lo.<type> d, a, b", chapter=CHAPTER, type=ALL, numpy="multiply(a, b, d)", cpp="d = a * b")
alu(
    "mul.hi.<type> d, a, b", chapter=CHAPTER, type=ALL, numpy="mul_hi(a, b, d)",
    cpp=lambda m: "d = mulhi(a, b)" if bits_of(m) > 16 else "d = (int64_t(a) * b) >> 16",
)  # fmt: skip
alu(
    "mul.wide.<type> d:wide, a, b", chapter=CHAPTER, type=WIDE_SOURCES, numpy="mul_wide(a, b, d)",
    cpp=lambda m: f"d = {_wider(m)}(a) * b",
)  # fmt: skip
alu("mad.lo.<type> d, a, b, c", chapter=CHAPTER, type=ALL, numpy="mad_lo(a, b, c, d)", cpp="d = a * b + c")
alu(
    "mad.hi.<type> d, a, b, c", chapter=CHAPTER, type=ALL, numpy="mad_hi(a, b, c, d)",
    cpp=lambda m: "d = mulhi(a, b) + c" if bits_of(m) > 16 else "d = ((int64_t(a) * b) >> 16) + c",
)  # fmt: skip
alu(
    "mad.wide.<type> d:wide, a, b, c:wide", chapter=CHAPTER, type=WIDE_SOURCES, numpy="mad_wide(a, b, c, d)",
    cpp=lambda m: f"d = {_wider(m)}(a) * b + c",
)  # fmt: skip
alu(
    "mul24.lo.<type> d, a, b", chapter=CHAPTER, type="u32 s32", numpy="mul24_lo(a, b, d)",
    cpp=lambda m: (
        "d = (a & 0xffffffu) * (b & 0xffffffu)" if m["type"] == "u32" else "d = ((a << 8) >> 8) * ((b << 8) >> 8)"
    ),
)  # fmt: skip
alu(
    "mad24.lo.<type> d, a, b, c", chapter=CHAPTER, type="u32 s32", numpy="mad24_lo(a, b, c, d)",
    cpp=lambda m: (
        "d = (a & 0xffffffu) * (b & 0xffffffu) + c"
        if m["type"] == "u32"
        else "d = ((a << 8) >> 8) * ((b << 8) >> 8) + c"
    ),
)  # fmt: skip
alu(
    "sad.<type> d, a, b, c", chapter=CHAPTER, type=ALL, numpy="sad(a, b, c, d)",
    cpp="d = c + (a < b ? b - a : a - b)",
)  # fmt: skip

# The manual leaves division by zero unspecified; here, as measured nowhere, all bits of the quotient are set.
alu(
    "div.<type> d, a, b", chapter=CHAPTER, type=ALL, numpy="int_div(a, b, d)",
    cpp="d = b == 0 ? decltype(d)(-1) : (decltype(d)(b) == decltype(d)(-1) && decltype(d)(-1) < 0) ? decltype(d)(0 - a)"
    " : a / b",
)  # fmt: skip
alu(
    "rem.<type> d, a, b", chapter=CHAPTER, type=ALL, numpy="int_rem(a, b, d)",
    cpp="d = b == 0 ? a : (decltype(d)(b) == decltype(d)(-1) && decltype(d)(-1) < 0) ? 0 : a % b",
)  # fmt: skip

alu("abs.<type> d, a", chapter=CHAPTER, type="s16 s32 s64", numpy="absolute(a, d)", cpp="d = a < 0 ? 0 - a : a")
alu("neg.<type> d, a", chapter=CHAPTER, type="s16 s32 s64", numpy="negative(a, d)", cpp="d = 0 - a")
alu("min.<type> d, a, b", chapter=CHAPTER, type=ALL, numpy="minimum(a, b, out=d)", cpp="d = a < b ? a : b")
alu("max.<type> d, a, b", chapter=CHAPTER, type=ALL, numpy="maximum(a, b, out=d)", cpp="d = a > b ? a : b")
alu(
    "min.relu.<type> d, a, b", chapter=CHAPTER, type="s32", numpy="min_relu(a, b, d)",
    cpp="d = a < b ? a : b; d = d < 0 ? 0 : d",
)  # fmt: skip
alu(
    "max.relu.<type> d, a, b", chapter=CHAPTER, type="s32", numpy="max_relu(a, b, d)",
    cpp="d = a > b ? a : b; d = d < 0 ? 0 : d",
)  # fmt: skip

alu("popc.<type> d:u32, a", chapter=CHAPTER, type="b32 b64", numpy="popc(a, d)", cpp="d = popc(a)")
alu("clz.<type> d:u32, a", chapter=CHAPTER, type="b32 b64", numpy="clz(a, d)", cpp="d = clz(a)")
alu("brev.<type> d, a", chapter=CHAPTER, type="b32 b64", numpy="brev(a, d)", cpp="d = brev(a)")
alu(
    "bfind{.shiftamt}.<type> d:u32, a", chapter=CHAPTER, type=WORDS,
    numpy=lambda m: f"bfind(a, d, {m['shiftamt']})",
    cpp=lambda m: (
        f"auto t = {cpp_type('u' + m['type'][1:])}({'a < 0 ? ~a : a' if m['type'][0] == 's' else 'a'});"
        f" d = t == 0 ? 0xffffffffu : {'clz(t)' if m['shiftamt'] else f'{bits_of(m) - 1} - clz(t)'}"
    ),
)  # fmt: skip


def _cpp_bfe(mods) -> str:
    """Bits from a start bit on; past the end, unsigned gives zeros and signed the sign of the last bit available."""
    bits, signed = bits_of(mods), mods["type"][0] == "s"
    unsigned = cpp_type(f"u{bits}")
    text = (
        f"uint32_t pos = b & 255u, len = c & 255u; {unsigned} u = {unsigned}(a), v = pos < {bits} ? u >> pos : 0;"
        f" {unsigned} mask = len >= {bits} ? ~{unsigned}(0) : ({unsigned}(1) << len) - 1;"
    )
    if not signed:
        return text + " d = v & mask"
    return text + (
        f" uint32_t last = pos + len - 1; if (last > {bits - 1}) last = {bits - 1};"
        f" bool neg = len != 0 && ((u >> last) & 1); d = neg ? (v & mask) | ~mask : v & mask;"
        f" if (neg && pos < {bits} && pos + len > {bits}) d = {unsigned}(d) | ~({unsigned}(~{unsigned}(0)) >> pos);"
        f" if (neg && pos >= {bits}) d = -1"
    )


alu(
    "bfe.<type> d, a, b:u32, c:u32", chapter=CHAPTER, type=WORDS, numpy="bfe(a, b, c, d)", cpp=_cpp_bfe,
)  # fmt: skip
alu(
    "bfi.<type> d, a, b, p:u32, c:u32", chapter=CHAPTER, type="b32 b64", numpy="bfi(a, b, p, c, d)",
    cpp=lambda m: (
        f"uint32_t pos = p & 255u, len = c & 255u; auto ones = len >= {bits_of(m)} ? ~decltype(d)(0) :"
        f" (decltype(d)(1) << len) - 1; auto mask = pos < {bits_of(m)} ? ones << pos : 0;"
        f" d = (b & ~mask) | ((pos < {bits_of(m)} ? a << pos : 0) & mask)"
    ),
)  # fmt: skip
alu(
    "dp4a.<type>.<other> d:s32, a:b32, b:b32, c:s32", chapter=CHAPTER, type="u32 s32", other="u32 s32",
    numpy=lambda m: f"dp4a(a, b, c, d, {m['type']!r}, {m['other']!r})",
    cpp=lambda m: "d = c; for (int i = 0; i < 4; ++i) d += "
    f"int32_t({'u' if m['type'] == 'u32' else ''}int8_t(a >> 8 * i)) * "
    f"int32_t({'u' if m['other'] == 'u32' else ''}int8_t(b >> 8 * i))",
)  # fmt: skip


def _cpp_carry(expression: str, carry: str):
    def text(mods) -> str:
        bits = bits_of(mods)
        big = "uint128_t" if bits == 64 else "uint64_t"
        unsigned = cpp_type(f"u{bits}")
        full = expression.replace("BIG", big).replace("UINT", unsigned)
        return f"{big} t = {full}; d = {unsigned}(t); {carry.replace('BITS', str(bits))}"

    return text


def _register_carry_forms() -> None:
    """Register add/sub/mad chains; the carry flag is a hidden register of the lane, never an operand (T41)."""
    set_carry = "cc = (t >> BITS) & 1"
    types = "u32 s32 u64 s64 b32 b64"
    for name, carry_in, sets in (("add.cc", 0, 1), ("addc", 1, 0), ("addc.cc", 1, 1)):
        alu(
            f"{name}.<type> d, a, b", chapter=EXTENDED, type=types,
            numpy=f"add_carry(a, b, {'cc' if carry_in else None}, {'cc' if sets else None}, d)",
            cpp=_cpp_carry(f"BIG(UINT(a)) + UINT(b) + {'cc' if carry_in else 0}", set_carry if sets else ""),
        )  # fmt: skip
    for name, carry_in, sets in (("sub.cc", 0, 1), ("subc", 1, 0), ("subc.cc", 1, 1)):
        alu(
            f"{name}.<type> d, a, b", chapter=EXTENDED, type=types,
            numpy=f"sub_borrow(a, b, {'cc' if carry_in else None}, {'cc' if sets else None}, d)",
            cpp=_cpp_carry(f"BIG(UINT(a)) - UINT(b) - {'cc' if carry_in else 0}", set_carry if sets else ""),
        )  # fmt: skip
    for half in ("lo", "hi"):
        for name, carry_in, sets in ((f"mad.{half}.cc", 0, 1), (f"madc.{half}", 1, 0), (f"madc.{half}.cc", 1, 1)):
            product = "UINT(UINT(a) * UINT(b))" if half == "lo" else "UINT(mulhi(a, b))"
            alu(
                f"{name}.<type> d, a, b, c", chapter=EXTENDED, type=WORDS,
                numpy=f"mad_carry(a, b, c, {half!r}, ({'cc' if carry_in else None}, {'cc' if sets else None}), d)",
                cpp=_cpp_carry(f"BIG({product}) + UINT(c) + {'cc' if carry_in else 0}", set_carry if sets else ""),
            )  # fmt: skip


_register_carry_forms()
