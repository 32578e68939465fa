"""Arithmetic on f16, bf16 and their packed pairs: PTX ISA, "Half Precision Floating-Point Instructions".

Operands are bit patterns (uint16); each operation is exact and rounded once to the half type, nearest even. Packed
forms treat the two halves alike.
"""

import re

from .floating import extreme
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
        ftz = bool(mods.get("ftz"))
        if ftz and kind == "bf16":
            return None
        body = re.sub(r"X\((\w)\)", rf"{kind}_to_f32(ftz_f16(\1))" if ftz else rf"{kind}_to_f32(\1)", expression)
        for flag in ("sat", "relu"):
            body = f"{flag}({body})" if mods.get(flag) else body
        return f"d = ftz_f16(f32_to_{kind}({body}))" if ftz else f"d = f32_to_{kind}({body})"

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
        cpp=lambda m, b=_bit: (
            f"d = a {b}" if not m["ftz"] else f"d = ftz_f16(a) {b}" if scalar(m) == "f16" else None
        ),
    )  # fmt: skip
for _name in ("min", "max"):
    alu(
        f"{_name}{{.ftz}}{{.NaN}}{{.xorsign}}{{.abs}}.<type> d, a, b", chapter=CHAPTER, type=TYPES,
        numpy=lambda m, n=_name: (
            f"half_{n}(a, b, d, {scalar(m)!r}, ({m['ftz']}, {m['NaN']}, {m['xorsign'] and m['abs']}))"
        ),
        cpp=lambda m, n=_name: (
            None
            if m["xorsign"] != m["abs"] or (m["ftz"] and scalar(m) == "bf16")
            else str(_cpp(extreme(n, m).replace("A", "X(a)").replace("B", "X(b)"))({**m, "ftz": False})).replace(
                "(a)", "(ftz_f16(a))" if m["ftz"] else "(a)"
            ).replace("(b)", "(ftz_f16(b))" if m["ftz"] else "(b)")
        ),
    )  # fmt: skip
for _name, _cpp_name in (("ex2", "EX2"), ("tanh", "TANH")):
    alu(
        f"{_name}.approx{{.ftz}}.<type> d, a", chapter=CHAPTER, type=TYPES,
        numpy=lambda m, n=_name: f"half_{n}(a, d, {scalar(m)!r}, {m['ftz']})",
        cpp=lambda m, n=_cpp_name: _cpp(f"{n}(X(a))")(m),
    )  # fmt: skip
