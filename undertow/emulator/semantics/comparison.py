"""Comparison and selection: PTX ISA, "Comparison and Selection Instructions"."""

from typing import Any

from .table import alu

CHAPTER = "comparison-and-selection-instructions"
INTEGER_TYPES = "b16 b32 b64 u16 u32 u64 s16 s32 s64"
INTEGER_COMPARISONS = "eq ne lt le gt ge lo ls hi hs"
FLOAT_COMPARISONS = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"
_CPP = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">",
        "hs": ">="}  # fmt: skip
_UFUNC = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
          "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal"}  # fmt: skip


def cpp_compare(mods) -> str:
    """C++ expression of the comparison; the unordered forms are true if either side is NaN, the others false."""
    cmp = mods["cmp"]
    a, b = ("ftz(a)", "ftz(b)") if mods.get("ftz") else ("a", "b")
    ordered = f"({a} == {a} && {b} == {b})"
    if cmp == "num":
        return ordered
    if cmp == "nan":
        return f"(!{ordered})"
    if len(cmp) == 3 and cmp.endswith("u"):
        return f"(!{ordered} || {a} {_CPP[cmp[:2]]} {b})"
    if cmp == "ne" and mods.get("is_float"):
        return f"({ordered} && {a} != {b})"
    return f"({a} {_CPP[cmp]} {b})"


def _setp_forms() -> None:
    for kind, types, comparisons in (
        ("", INTEGER_TYPES, INTEGER_COMPARISONS),
        ("{.ftz}", "f32 f64", FLOAT_COMPARISONS),
    ):
        is_float = bool(kind)

        def cpp(mods, is_float=is_float) -> str:
            return f"d = {cpp_compare({**mods, 'is_float': is_float})}"

        def cpp_both(mods, is_float=is_float) -> str:
            return f"bool t = {cpp_compare({**mods, 'is_float': is_float})}; d = t; e = !t"

        def cpp_combined(mods, is_float=is_float) -> str:
            op = {"and": "&&", "or": "||", "xor": "!="}[mods["bool"]]
            return f"bool t = {cpp_compare({**mods, 'is_float': is_float})}; bool p = c; d = t {op} p"

        def cpp_combined_both(mods, is_float=is_float) -> str:
            op = {"and": "&&", "or": "||", "xor": "!="}[mods["bool"]]
            compare = cpp_compare({**mods, "is_float": is_float})
            return f"bool t = {compare}; bool p = c; d = t {op} p; e = (!t) {op} p"

        def direct(mods, is_float=is_float) -> str:
            cmp, ufunc = mods["cmp"], _UFUNC.get(mods["cmp"])
            if ufunc and not mods.get("ftz") and not (is_float and cmp == "ne"):
                return f"{ufunc}(a, b, d)"
            return f"compare(a, b, d, {cmp!r}, {bool(mods.get('ftz'))})"

        def both(mods) -> str:
            return f"compare_both(a, b, d, e, {mods['cmp']!r}, {bool(mods.get('ftz'))})"

        def combined(mods) -> str:
            return f"compare_combined(a, b, c, d, ({mods['cmp']!r}, {bool(mods.get('ftz'))}, {mods['bool']!r}))"

        def combined_both(mods) -> str:
            flags = f"{mods['cmp']!r}, {bool(mods.get('ftz'))}, {mods['bool']!r}"
            return f"compare_combined_both(a, b, c, d, e, ({flags}))"

        words: dict[str, Any] = {"cmp": comparisons, "type": types}
        syntax = f"setp.<cmp>{kind}.<type> "
        alu(syntax + "d:pred, a, b", chapter=CHAPTER, numpy=direct, cpp=cpp, **words)
        alu(syntax + "d:pred|e:pred, a, b", chapter=CHAPTER, numpy=both, cpp=cpp_both, **words)
        words["bool"] = "and or xor"
        syntax = f"setp.<cmp>.<bool>{kind}.<type> "
        alu(syntax + "d:pred, a, b, c:pred", chapter=CHAPTER, numpy=combined, cpp=cpp_combined, **words)
        alu(
            syntax + "d:pred|e:pred, a, b, c:pred", chapter=CHAPTER, numpy=combined_both, cpp=cpp_combined_both, **words
        )
        alu(
            f"set.<cmp>{kind}.<dt>.<type> d:<dt>, a, b", chapter=CHAPTER, cmp=comparisons, dt="u32 s32 f32", type=types,
            numpy=lambda m: f"set_compare(a, b, d, {m['cmp']!r}, {bool(m.get('ftz'))}, {m['dt'] == 'f32'})",
            cpp=lambda m, is_float=is_float: f"d = {cpp_compare({**m, 'is_float': is_float})} ? "
            + ("1.0f : 0.0f" if m["dt"] == "f32" else "-1 : 0"),
        )  # fmt: skip


_setp_forms()

for _half in ("f16", "bf16"):
    alu(
        f"setp.<cmp>{{.ftz}}.{_half} d:pred, a:{_half}, b:{_half}", chapter=CHAPTER, cmp=FLOAT_COMPARISONS,
        numpy=lambda m, h=_half: f"compare(widen_{h}(a), widen_{h}(b), d, {m['cmp']!r}, {m['ftz']})",
        cpp=lambda m, h=_half: "float x = A(a), y = A(b); { float a = x, b = y; d = CMP; }".replace(
            "A(", f"{h}_to_f32("
        ).replace("CMP", cpp_compare({**m, "is_float": True})),
    )  # fmt: skip

alu(
    "selp.<type> d, a, b, c:pred", chapter=CHAPTER, type=INTEGER_TYPES + " f32 f64",
    numpy="select(a, b, c, d)", cpp="d = c ? a : b",
)  # fmt: skip
alu(
    "slct{.ftz}.<type>.<ct> d, a, b, c:<ct>", chapter=CHAPTER, type=INTEGER_TYPES + " f32 f64", ct="s32 f32",
    numpy="select(a, b, greater_equal(c, 0), d)", cpp="d = c >= 0 ? a : b",
)  # fmt: skip
