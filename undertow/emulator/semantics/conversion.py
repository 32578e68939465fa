"""Conversions: PTX ISA, "Data Movement and Conversion Instructions: cvt".

Float to integer clamps to the range of the target and turns NaN into 0; integer to integer keeps the low bits unless
`.sat`; float to float and integer to float round once in the mode given. In the two-source packed forms the first
source goes to the upper half. A NaN becomes the canonical NaN of the target type.
"""

from .integer import cpp_type
from .table import alu

CHAPTER = "data-movement-and-conversion-instructions-cvt"
INTEGERS = "u8 s8 u16 s16 u32 s32 u64 s64"
FLOATS = "f16 bf16 f32 f64"
INTEGER_ROUNDING = "rni rzi rmi rpi"


def _cpp_integer(mods) -> str | None:
    if mods["sat"]:
        return None
    return f"d = {cpp_type(mods['dt'])}(a)"


alu(
    "cvt{.sat}.<dt>.<st> d:<dt>, a:<st>", chapter=CHAPTER, dt=INTEGERS, st=INTEGERS,
    numpy=lambda m: f"convert_integer(a, d, {m['sat']})", cpp=_cpp_integer,
)  # fmt: skip


def _as_double(kind: str) -> str:
    return {"f16": "double(f16_to_f32(a))", "bf16": "double(bf16_to_f32(a))"}.get(kind, "double(a)")


def _cpp_to_integer(mods) -> str | None:
    """`clamp_int<T>` rounds in the mode given, clamps and maps NaN to 0."""
    source = _as_double(mods["st"])
    if mods["ftz"] and mods["st"] == "f32":
        source = "double(ftz(a))"
    return f"d = clamp_int<{cpp_type(mods['dt'])}>({source}, '{mods['rnd'][1]}')"


alu(
    "cvt.<rnd>{.ftz}{.sat}.<dt>.<st> d:<dt>, a:<st>", chapter=CHAPTER, rnd=INTEGER_ROUNDING, dt=INTEGERS, st=FLOATS,
    numpy=lambda m: f"float_to_integer(a, d, {m['st']!r}, {m['rnd'][1]!r}, {m['ftz']})", cpp=_cpp_to_integer,
)  # fmt: skip


def _cpp_from_integer(mods) -> str | None:
    target, mode = mods["dt"], mods["rnd"][1]
    if target == "f32" and mode == "n":
        return "d = float(a)"
    if target == "f32" and mods["st"][1:] in ("8", "16", "32"):
        return f"d = round_f32(double(a), '{mode}')"
    if target == "f64" and mode == "n":
        return "d = double(a)"
    if target in ("f16", "bf16") and mode == "n" and mods["st"][1:] in ("8", "16"):
        return f"d = f32_to_{target}(float(a))"
    return None


alu(
    "cvt.<rnd>{.sat}.<dt>.<st> d:<dt>, a:<st>", chapter=CHAPTER, rnd="rn rz rm rp", dt=FLOATS, st=INTEGERS,
    numpy=lambda m: f"integer_to_float(a, d, {m['dt']!r}, {m['rnd'][1]!r}, {m['sat']})", cpp=_cpp_from_integer,
)  # fmt: skip


def _cpp_float(mods) -> str | None:
    source, target, mode = mods["st"], mods["dt"], (mods["rnd"] or "rn")
    if mods["ftz"] or mods["sat"] or mods["relu"]:
        return None
    if mode.endswith("i"):
        return (
            f"d = {'float' if target == 'f32' else 'double'}(round_int(double(a), '{mode[1]}'))"
            if source == target and target in ("f32", "f64")
            else None
        )
    value = {"f16": "f16_to_f32(a)", "bf16": "bf16_to_f32(a)", "f32": "a", "f64": "a"}[source]
    if target in ("f32", "f64") and (source != "f64" or target == "f64"):
        return f"d = {value}"
    if target == "f32":
        return f"d = round_f32(a, '{mode[1]}')"
    if source == "f64" or mode != "rn":
        return None
    return f"d = f32_to_{target}({value})"


alu(
    "cvt{.<rnd>}{.ftz}{.sat}{.relu}.<dt>.<st> d:<dt>, a:<st>", chapter=CHAPTER,
    rnd=f"rn rz rm rp rna {INTEGER_ROUNDING}", dt=FLOATS, st=FLOATS,
    numpy=lambda m: (
        f"float_to_float(a, d, {m['st']!r}, {m['dt']!r}, {m['rnd']!r}, ({m['ftz']}, {m['sat']}, {m['relu']}))"
    ),
    cpp=_cpp_float,
)  # fmt: skip
alu(
    "cvt.<rnd>{.relu}{.satfinite}.<dt>.f32 d:b32, a:f32, b:f32", chapter=CHAPTER, rnd="rn rz", dt="f16x2 bf16x2",
    numpy=lambda m: (
        "pack_bf16x2(a, b, d)"
        if m["dt"] == "bf16x2" and m["rnd"] == "rn" and not m["relu"] and not m["satfinite"]
        else f"pack_half(a, b, d, {m['dt'][:-2]!r}, ({m['rnd'][1]!r}, {m['relu']}, {m['satfinite']}))"
    ),
    cpp=lambda m: (
        f"d = uint32_t(f32_to_{m['dt'][:-2]}(A)) << 16 | f32_to_{m['dt'][:-2]}(B)".replace(
            "A", "fmax_num(a, 0.0f)" if m["relu"] else "a"
        ).replace("B)", "fmax_num(b, 0.0f))" if m["relu"] else "b)")
        if m["rnd"] == "rn" and not m["satfinite"]
        else None
    ),
)  # fmt: skip
alu(
    "cvt.<rnd>{.satfinite}{.relu}.tf32.f32 d:b32, a:f32", chapter=CHAPTER, rnd="rn rna rz",
    numpy=lambda m: f"to_tf32(a, d, {m['rnd']!r}, {m['relu']}, {m['satfinite']})",
)  # fmt: skip
