"""Arithmetic on f16, bf16 and their packed pairs: PTX ISA, "Half Precision Floating-Point Instructions".

Operands are bit patterns (uint16); each operation is exact and rounded once to the half type, nearest even. Packed
forms treat the two halves alike.
"""

from .table import alu

CHAPTER = "half-precision-floating-point-instructions"
TYPES = "f16 bf16 f16x2 bf16x2"


def scalar(mods) -> str:
    """The half type without packing: f16 or bf16."""
    return mods["type"].removesuffix("x2")


def _flags(mods) -> str:
    return f"({bool(mods.get('ftz'))}, {bool(mods.get('sat'))}, {bool(mods.get('relu'))})"


def _cpp(expression: str):
    """X(a) widens to float; there, sums and products of halves are exact enough for one more rounding."""

    def text(mods) -> str | None:
        kind = scalar(mods)
        body = expression.replace("X(", f"{kind}_to_f32(")
        if mods.get("ftz"):
            return None
        if mods.get("sat"):
            body = f"sat({body})"
        if mods.get("relu"):
            body = f"fmax_num({body}, 0.0f)"
        return f"d = f32_to_{kind}({body})"

    return text


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
    alu(
        f"{_name}{{.rn}}{{.ftz}}{{.sat}}.<type> d, a, b", chapter=CHAPTER, type=TYPES,
        numpy=lambda m, n=_name: f"half_{n}(a, b, d, {scalar(m)!r}, {_flags(m)})", cpp=_cpp(f"X(a) {_sign} X(b)"),
    )  # fmt: skip
alu(
    "fma.rn{.ftz}{.sat}{.relu}.<type> d, a, b, c", chapter=CHAPTER, type=TYPES,
    numpy=lambda m: f"half_fma(a, b, c, d, {scalar(m)!r}, {_flags(m)})",
    cpp=_cpp("round_f32_odd(fma_odd(X(a), X(b), X(c)))"),
)  # fmt: skip
for _name, _bit in (("neg", "^ 0x8000"), ("abs", "& 0x7fff")):
    alu(
        f"{_name}{{.ftz}}.<type> d, a", chapter=CHAPTER, type=TYPES,
        numpy=lambda m, n=_name: f"half_{n}(a, d, {scalar(m)!r}, {m['ftz']})",
        cpp=lambda m, b=_bit: None if m["ftz"] else f"d = a {b}",
    )  # fmt: skip
for _name in ("min", "max"):
    alu(
        f"{_name}{{.ftz}}{{.NaN}}{{.xorsign}}{{.abs}}.<type> d, a, b", chapter=CHAPTER, type=TYPES,
        numpy=lambda m, n=_name: (
            f"half_{n}(a, b, d, {scalar(m)!r}, ({m['ftz']}, {m['NaN']}, {m['xorsign'] and m['abs']}))"
        ),
        cpp=lambda m, n=_name: (
            None
            if m["ftz"] or m["xorsign"]
            else f"d = f32_to_{scalar(m)}(f{n}_{'nan' if m['NaN'] else 'num'}({scalar(m)}_to_f32(a),"
            f" {scalar(m)}_to_f32(b)))"
        ),
    )  # fmt: skip
for _name, _cpp_name in (("ex2", "EX2"), ("tanh", "TANH")):
    alu(
        f"{_name}.approx{{.ftz}}.<type> d, a", chapter=CHAPTER, type=TYPES,
        numpy=lambda m, n=_name: f"half_{n}(a, d, {scalar(m)!r}, {m['ftz']})",
        cpp=lambda m, n=_cpp_name: None if m["ftz"] else f"d = f32_to_{scalar(m)}({n}({scalar(m)}_to_f32(a)))",
    )  # fmt: skip
