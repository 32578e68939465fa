"""Arithmetic on f32, f64 and packed f32x2: PTX ISA, "Floating-Point Instructions".

Rounding: `add`, `sub`, `mul`, `fma` are exact operations rounded once in the mode given (nearest even by default).
Approximate functions (ex2, lg2, rcp, rsqrt, sqrt, tanh, sin, cos, div.approx) are ASSUMED to be the float64 result
rounded once to f32; the hardware's bits differ within the error bounds of the manual. `.ftz` flushes subnormal inputs
and results to zero of the same sign. The packed type is two f32 side by side, treated alike.
"""

from .table import alu

CHAPTER = "floating-point-instructions"
RND = "rn rz rm rp"


def rounding(mods) -> str:
    """One-letter rounding mode n, z, m or p."""
    return (mods.get("rnd") or "rn")[1]


def _numpy(name: str, operands: str, exact_ufunc: str | None = None):
    """Call the plain ufunc where PTX and IEEE default rounding agree, else the general routine."""

    def text(mods) -> str:
        plain = not mods.get("ftz") and not mods.get("sat") and rounding(mods) == "n"
        if exact_ufunc and plain:
            return f"{exact_ufunc}({operands}, d)"
        wide = "64" if mods["type"] == "f64" else "32"
        return f"{name}{wide}({operands}, d, ({rounding(mods)!r}, {bool(mods.get('ftz'))}, {bool(mods.get('sat'))}))"

    return text


def _cpp(plain: str, in_double: str):
    """`plain` for nearest even; other modes round `in_double`, which is exact or rounded to odd. A, B, C: operands."""

    def text(mods) -> str | None:
        directed = rounding(mods) != "n"
        if mods["type"] == "f64":
            return None if directed else "d = " + plain.replace("fmaf", "fma").translate(_PLAIN_OPERANDS)
        expression = f"round_f32({in_double}, '{rounding(mods)}')" if directed else plain
        expression = expression.translate(_FLUSHED_OPERANDS if mods.get("ftz") else _PLAIN_OPERANDS)
        if mods.get("ftz"):
            expression = f"ftz({expression})"
        return f"d = sat({expression})" if mods.get("sat") else f"d = {expression}"

    return text


_PLAIN_OPERANDS = str.maketrans({"A": "a", "B": "b", "C": "c"})
_FLUSHED_OPERANDS = str.maketrans({"A": "ftz(a)", "B": "ftz(b)", "C": "ftz(c)"})


for _name, _sign, _ufunc, _odd in (
    ("add", "+", "add", "add_odd(A, B)"),
    ("sub", "-", "subtract", "add_odd(A, -B)"),
    ("mul", "*", "multiply", "double(A) * double(B)"),
):
    alu(
        f"{_name}{{.<rnd>}}{{.ftz}}{{.sat}}.<type> d, a, b", chapter=CHAPTER, rnd=RND, type="f32 f64 f32x2",
        numpy=_numpy(f"float_{_name}", "a, b", _ufunc),
        cpp=_cpp(f"A {_sign} B", _odd),
    )  # fmt: skip
alu(
    "fma.<rnd>{.ftz}{.sat}.<type> d, a, b, c", chapter=CHAPTER, rnd=RND, type="f32 f64 f32x2",
    numpy=_numpy("float_fma", "a, b, c"), cpp=_cpp("fmaf(A, B, C)", "fma_odd(A, B, C)"),
)  # fmt: skip
alu(
    "mad.<rnd>{.ftz}{.sat}.<type> d, a, b, c", chapter=CHAPTER, rnd=RND, type="f32 f64",
    numpy=_numpy("float_fma", "a, b, c"), cpp=_cpp("fmaf(A, B, C)", "fma_odd(A, B, C)"),
)  # fmt: skip


def mixed(mods, nearest: str, odd: str) -> str:
    """C++ of a form with half sources and an f32 result: `nearest`, or `odd` rounded once more in the mode given."""
    value = nearest if rounding(mods) == "n" else f"round_f32({odd}, '{rounding(mods)}')"
    return f"d = {'sat' if mods['sat'] else ''}({value})"


for _name, _sign in (("add", "+"), ("sub", "-")):
    for _half in ("f16", "bf16"):
        alu(
            f"{_name}{{.<rnd>}}{{.sat}}.f32.{_half} d:f32, a:{_half}, c:f32", chapter="mixed-precision-floating-point",
            rnd=RND,
            numpy=lambda m, n=_name, h=_half: (
                f"float_{n}32(widen_{h}(a), c, d, ({rounding(m)!r}, False, {m['sat']}))"
            ),
            cpp=lambda m, s=_sign, h=_half: mixed(
                m, f"{h}_to_f32(a) {s} c", f"add_odd({h}_to_f32(a), {s}c)"
            ),
        )  # fmt: skip
for _half in ("f16", "bf16"):
    alu(
        f"fma.<rnd>{{.sat}}.f32.{_half} d:f32, a:{_half}, b:{_half}, c:f32", chapter="mixed-precision-floating-point",
        rnd=RND,
        numpy=lambda m, h=_half: (
            f"float_fma32(widen_{h}(a), widen_{h}(b), c, d, ({rounding(m)!r}, False, {m['sat']}))"
        ),
        cpp=lambda m, h=_half: mixed(
            m, f"fmaf({h}_to_f32(a), {h}_to_f32(b), c)", f"fma_odd({h}_to_f32(a), {h}_to_f32(b), c)"
        ),
    )  # fmt: skip

alu(
    "div.<rnd>{.ftz}.<type> d, a, b", chapter=CHAPTER, rnd=RND, type="f32 f64",
    numpy=_numpy("float_div", "a, b", "divide"), cpp=_cpp("A / B", "double(A) / double(B)"),
)  # fmt: skip
alu(
    "div.<how>{.ftz}.<type> d, a, b", chapter=CHAPTER, how="approx full", type="f32",
    numpy=lambda m: f"float_div32(a, b, d, ('n', {m['ftz']}, False))",
    cpp=lambda m: "d = ftz(ftz(a) / ftz(b))" if m["ftz"] else "d = a / b",
)  # fmt: skip
for _name, _ufunc, _expression in (
    ("rcp", "reciprocal", "1.0 / double(a)"),
    ("sqrt", "square_root", "std::sqrt(double(a))"),
):
    alu(
        f"{_name}.<rnd>{{.ftz}}.<type> d, a", chapter=CHAPTER, rnd=RND, type="f32 f64",
        numpy=lambda m, u=_ufunc: f"{u}(a, d, {rounding(m)!r}, {m['ftz']})",
        cpp=lambda m, x=_expression: (
            (f"d = {x}" if rounding(m) == "n" else None)
            if m["type"] == "f64"
            else f"d = {'ftz' if m['ftz'] else ''}(round_f32({x.replace('(a)', '(ftz(a))') if m['ftz'] else x},"
            f" '{rounding(m)}'))"
        ),
    )  # fmt: skip

for _name, _cpp_name in (
    ("ex2", "EX2"), ("lg2", "LG2"), ("rcp", "RCP"), ("rsqrt", "RSQRT"), ("sqrt", "SQRT"), ("sin", "SIN"),
    ("cos", "COS"), ("tanh", "TANH"),
):  # fmt: skip
    alu(
        f"{_name}.approx{{.ftz}}.<type> d, a", chapter=CHAPTER, type="f32",
        numpy=lambda m, n=_name: f"approximate_{n}(a, d, {m['ftz']})",
        cpp=lambda m, n=_cpp_name: f"d = ftz({n}(ftz(a)))" if m["ftz"] else f"d = {n}(a)",
    )  # fmt: skip
for _name in ("rcp", "rsqrt"):
    alu(
        f"{_name}.approx.ftz.<type> d, a", chapter=CHAPTER, type="f64",
        numpy=f"approximate_{_name}(a, d, False)",
        cpp="d = 1.0 / a" if _name == "rcp" else "d = 1.0 / std::sqrt(a)",
    )  # fmt: skip

for _name, _ufunc, _expression in (("abs", "absolute", "std::fabs"), ("neg", "negative", "-")):
    alu(
        f"{_name}{{.ftz}}.<type> d, a", chapter=CHAPTER, type="f32 f64",
        numpy=lambda m, u=_ufunc: f"{u}(flushed(a), d)" if m["ftz"] else f"{u}(a, d)",
        cpp=lambda m, x=_expression: f"d = {x}(ftz(a))" if m["ftz"] else f"d = {x}(a)",
    )  # fmt: skip


def extreme(name: str, mods) -> str:
    """C++ of min or max of A and B; .xorsign.abs takes magnitudes and gives the product's sign."""
    function = f"f{name}_{'nan' if mods['NaN'] else 'num'}"
    if mods["xorsign"] and mods["abs"]:
        return f"sign_of_product({function}(std::fabs(A), std::fabs(B)), A, B)"
    return f"{function}(A, B)"


for _name in ("min", "max"):
    alu(
        f"{_name}{{.ftz}}{{.NaN}}{{.xorsign}}{{.abs}}.<type> d, a, b", chapter=CHAPTER, type="f32 f64",
        numpy=lambda m, n=_name: (
            f"float_{n}(a, b, d, ({m['ftz']}, {m['NaN']}, {m['xorsign'] and m['abs']}))"
        ),
        cpp=lambda m, n=_name: (
            None
            if m["xorsign"] != m["abs"]
            else "d = " + extreme(n, m).translate(_FLUSHED_OPERANDS if m["ftz"] else _PLAIN_OPERANDS)
        ),
    )  # fmt: skip
    alu(
        f"{_name}{{.ftz}}{{.NaN}}.<type> d, a, b, c", chapter=CHAPTER, type="f32",
        numpy=lambda m, n=_name: f"float_{n}_three(a, b, c, d, {m['ftz']}, {m['NaN']})",
        cpp=lambda m, n=_name: (
            f"d = f{n}_N(f{n}_N(X(a), X(b)), X(c))".replace("_N", "_nan" if m["NaN"] else "_num").replace(
                "X(", "ftz(" if m["ftz"] else "("
            )
        ),
    )  # fmt: skip
alu(
    "copysign.<type> d, a, b", chapter=CHAPTER, type="f32 f64", numpy="copysign(b, a, d)",
    cpp="d = std::copysign(b, a)",
)  # fmt: skip
alu(
    "testp.<test>.<type> d:pred, a", chapter=CHAPTER, type="f32 f64",
    test="finite infinite number notanumber normal subnormal",
    numpy=lambda m: f"test_property(a, d, {m['test']!r})",
    cpp=lambda m: {
        "finite": "d = std::isfinite(a)", "infinite": "d = std::isinf(a)", "number": "d = !std::isnan(a)",
        "notanumber": "d = std::isnan(a)", "normal": "d = std::isnormal(a)",
        "subnormal": "d = std::fpclassify(a) == FP_SUBNORMAL",
    }[m["test"]],
)  # fmt: skip
