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
    kind = cpp_type(mods["dt"])
    return f"d = clamp_to<{kind}>(a)" if mods["sat"] else f"d = {kind}(a)"


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
    clamp = "sat" if mods["sat"] else ""
    if target == "f64":
        return f"d = {clamp}(double(a))" if mode == "n" or mods["st"][1:] != "64" else None
    if target == "f32":
        value = "float(a)" if mode == "n" else f"round_f32(odd_double(a), '{mode}')"
        return f"d = {clamp}({value})"
    return f"d = f32_to_{target}({clamp}(round_f32_odd(odd_double(a))), '{mode}')"


alu(
    "cvt.<rnd>{.sat}.<dt>.<st> d:<dt>, a:<st>", chapter=CHAPTER, rnd="rn rz rm rp", dt=FLOATS, st=INTEGERS,
    numpy=lambda m: f"integer_to_float(a, d, {m['dt']!r}, {m['rnd'][1]!r}, {m['sat']})", cpp=_cpp_from_integer,
)  # fmt: skip


_FLOAT_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def _is_legal(source: str, target: str, rounding: str | None, mods) -> bool:
    """Whether the manual allows these modifiers: rounding only where bits are lost, .ftz with f32, .relu to halves."""
    widens = _FLOAT_BITS[target] > _FLOAT_BITS[source]
    if source == target:
        allowed = (None, *INTEGER_ROUNDING.split())
    else:
        allowed = (None,) if widens else ("rn", "rz", "rm", "rp")
    relu_fits = target in ("f16", "bf16") and rounding in ("rn", "rz")
    return rounding in allowed and (not mods["ftz"] or "f32" in (source, target)) and (not mods["relu"] or relu_fits)


def _cpp_float(mods) -> str | None:
    source, target, rounding = mods["st"], mods["dt"], mods["rnd"]
    if not _is_legal(source, target, rounding, mods):
        return None
    value = {"f16": "f16_to_f32(a)", "bf16": "bf16_to_f32(a)", "f32": "a", "f64": "a"}[source]
    if mods["ftz"] and source == "f32":
        value = f"ftz({value})"
    mode = (rounding or "rn")[1]
    if rounding and rounding.endswith("i"):
        value, mode = f"{'double' if source == 'f64' else 'float'}(round_int(double({value}), '{mode}'))", "n"
    for flag in ("sat", "relu"):
        value = f"{flag}({value})" if mods[flag] else value
    if target == "f64" or (target == "f32" and source != "f64"):
        return f"d = {'ftz' if mods['ftz'] and target == 'f32' else ''}({value})"
    if target == "f32":
        return f"d = {'ftz' if mods['ftz'] else ''}(round_f32({value}, '{mode}'))"
    return f"d = f32_to_{target}({f'round_f32_odd({value})' if source == 'f64' else value}, '{mode}')"


alu(
    "cvt{.<rnd>}{.ftz}{.sat}{.relu}.<dt>.<st> d:<dt>, a:<st>", chapter=CHAPTER,
    rnd=f"rn rz rm rp rna {INTEGER_ROUNDING}", dt=FLOATS, st=FLOATS,
    numpy=lambda m: (
        f"float_to_float(a, d, {m['st']!r}, {m['dt']!r}, {m['rnd']!r}, ({m['ftz']}, {m['sat']}, {m['relu']}))"
    ),
    cpp=_cpp_float,
)  # fmt: skip


def _cpp_half(mods, operand: str) -> str:
    """One half of a packed conversion."""
    kind = mods["dt"][:-2]
    bits = f"f32_to_{kind}({f'relu({operand})' if mods['relu'] else operand}, '{mods['rnd'][1]}')"
    return f"finite_{kind}({bits})" if mods["satfinite"] else bits


alu(
    "cvt.<rnd>{.relu}{.satfinite}.<dt>.f32 d:b32, a:f32, b:f32", chapter=CHAPTER, rnd="rn rz", dt="f16x2 bf16x2",
    numpy=lambda m: (
        "pack_bf16x2(a, b, d)"
        if m["dt"] == "bf16x2" and m["rnd"] == "rn" and not m["relu"] and not m["satfinite"]
        else f"pack_half(a, b, d, {m['dt'][:-2]!r}, ({m['rnd'][1]!r}, {m['relu']}, {m['satfinite']}))"
    ),
    cpp=lambda m: (
        f"d = uint32_t({_cpp_half(m, 'a')}) << 16 | {_cpp_half(m, 'b')}"
    ),
)  # fmt: skip
alu(
    "cvt.<rnd>{.satfinite}{.relu}.tf32.f32 d:b32, a:f32", chapter=CHAPTER, rnd="rn rna rz",
    numpy=lambda m: f"to_tf32(a, d, {m['rnd']!r}, {m['relu']}, {m['satfinite']})",
    cpp=lambda m: "d = {}f32_to_tf32({}, '{}'){}".format(
        "finite_tf32(" if m["satfinite"] else "", "relu(a)" if m["relu"] else "a", m["rnd"][-1],
        ")" if m["satfinite"] else "",
    ),
)  # fmt: skip
