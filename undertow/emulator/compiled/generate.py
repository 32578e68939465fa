"""Write the C++ of the lane forms: one function over 32 lanes per distinct statement of the semantics table.

Rows that differ in the mnemonic only (`add.u32` and `add.b32`) share a function, so the number of functions is far
below the number of instruction forms. A function handles both cases: all lanes active, a loop that vectorises, and
some lanes active, a loop over the set bits of the mask, which for one elected lane costs one iteration.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from undertow.ptx import TYPE_BITS

from .. import semantics
from ..semantics.table import Row

LANES = 32
_PACKED = {"f32x2": "f32", "f16x2": "f16", "bf16x2": "bf16"}


@dataclass(frozen=True)
class LaneOperand:
    """One operand of a lane form: its name in the statement, PTX type of one element, whether it is written."""

    name: str
    type: str
    is_dst: bool

    @property
    def cpp_type(self) -> str:
        """C++ type of the value that the statement sees."""
        if self.type == "pred":
            return "bool"
        if self.type in ("f32", "f64"):
            return {"f32": "float", "f64": "double"}[self.type]
        signed = "" if self.type[0] == "s" else "u"
        return f"{signed}int{TYPE_BITS[self.type]}_t" if self.type != "b128" else "uint128_t"

    @property
    def storage(self) -> str:
        """C++ type of an element of the row; bytes live in rows of 16-bit elements."""
        return self.cpp_type if self.type == "pred" or TYPE_BITS[self.type] >= 16 else f"{self.cpp_type[:-3]}16_t"


@dataclass(frozen=True)
class LaneForm:
    """A statement with the types of its operands: what one generated function computes."""

    statement: str
    operands: tuple[LaneOperand, ...]
    elements: int  # per row: 32, or 64 for the packed types

    @property
    def uses_carry(self) -> bool:
        """Whether the statement reads or writes the lane's carry flag."""
        return re.search(r"\bcc\b", self.statement) is not None

    @property
    def is_rare(self) -> bool:
        """Whether the form is one that kernels hardly execute, so that compiling it quickly is worth more than speed.

        Half of all forms are: two results, carries, comparisons folded with predicates, float64, f16 in software,
        directed rounding.
        """
        num_predicates = sum(o.type == "pred" for o in self.operands)
        return (
            self.uses_carry
            or sum(o.is_dst for o in self.operands) > 1
            or 1 < num_predicates < len(self.operands)
            or any(o.type == "f64" for o in self.operands)
            or re.search(r"\bf16_to_f32|f32_to_f16|_odd\(|'[zmpa]'", self.statement) is not None
        )


def lane_form(row: Row, mods: Mapping, types: Mapping[str, str]) -> LaneForm | None:
    """Return what a lane row computes for these modifiers and operand types, None if it has no C++ column.

    types: PTX type by operand name, in the order of the syntax line, of the operands that are present.
    """
    statement = row.column("cpp", mods)
    if statement is None:
        return None
    packed = {t for t in types.values() if t in _PACKED}
    if packed and len(set(types.values())) != 1:
        return None
    specs = {spec.name: spec for spec in row.operands}
    operands = tuple(LaneOperand(n, _element_type(t), specs[n].is_dst) for n, t in types.items())
    return LaneForm(statement.strip().rstrip(";"), operands, 2 * LANES if packed else LANES)


def _element_type(type_name: str) -> str:
    """Reduce a PTX type to the one that stands for its C++ type: b32 and u32 are the same thing here."""
    type_name = _PACKED.get(type_name, type_name)
    if type_name in ("pred", "f32", "f64", "b128") or type_name[0] == "s":
        return type_name
    return f"u{TYPE_BITS[type_name]}"


@lru_cache(maxsize=1)
def all_forms() -> dict[LaneForm, int]:
    """Return every lane form of the table with its number; the order depends on nothing but the table."""
    forms: dict[LaneForm, int] = {}
    for rows in semantics.ROWS.values():
        for row in rows:
            if row.make is None:
                for form in _forms_of(row):
                    forms.setdefault(form, len(forms))
    return forms


def _forms_of(row: Row) -> Iterator[LaneForm]:
    optional = [s for s in row.operands if s.optional]
    for mods in modifier_choices(row):
        types = {s.name: _operand_type(s.type, mods) for s in row.operands}
        for absent in itertools.product((False, True), repeat=len(optional)):
            gone = {s.name for s, is_absent in zip(optional, absent, strict=True) if is_absent}
            form = lane_form(row, mods, {n: t for n, t in types.items() if n not in gone})
            if form is not None:
                yield form


def modifier_choices(row: Row) -> Iterator[dict]:
    """Enumerate the modifiers that a row's pattern accepts, each as `Decoded.mods` would hold them."""
    names: list[str] = list(row.flags.values())
    choices: list[tuple] = [(False, True)] * len(names)
    for group in re.finditer(r"\(\?:\\\.\(\?P<c_(\w+)>([^)]*)\)\)(\??)", row.pattern.pattern):
        words = tuple(re.sub(r"\\(.)", r"\1", word) for word in group.group(2).split("|"))
        names.append(group.group(1))
        choices.append((None, *words) if group.group(3) else words)
    for values in itertools.product(*choices):
        yield dict(zip(names, values, strict=True))


def _operand_type(type_name: str, mods: Mapping) -> str:
    if type_name == "wide":
        return mods["type"][0] + str(2 * int(mods["type"][1:]))
    return mods[type_name.strip("<>")] if type_name.startswith("<") else type_name


def translation_units(count: int) -> dict[str, str]:
    """Return the C++ sources of all lane handlers by file name, and that of their table `lane_handlers`.

    Files named `rare_*` hold the forms for which optimising does not pay.
    """
    forms = list(all_forms())
    numbers = {form: number for number, form in enumerate(forms)}
    units = {}
    for kind in ("lanes", "rare"):
        chosen = [form for form in forms if form.is_rare == (kind == "rare")]
        for i in range(count):
            body = "\n".join(_function(form, numbers[form]) for form in chosen[i::count])
            units[f"{kind}_{i}.cpp"] = (
                f'#include "lanes.hpp"\n\nnamespace undertow {{\n\n{body}\n}}  // namespace undertow\n'
            )
    declarations = "\n".join(_signature(i) + ";" for i in range(len(forms)))
    table = ", ".join(f"lane_{i}" for i in range(len(forms)))
    units["lane_table.cpp"] = (
        f'#include "program.hpp"\n\nnamespace undertow {{\n\n{declarations}\n\n'
        f"extern const LaneHandler lane_handlers[] = {{{table}}};\n"
        f"extern const int num_lane_handlers = {len(forms)};\n\n}}  // namespace undertow\n"
    )
    return units


def _signature(number: int) -> str:
    return f"void lane_{number}(char* regs, const char* consts, const Inst& inst, uint32_t mask)"


def _function(form: LaneForm, number: int) -> str:
    rows, loads, stores, before, after = [], [], [], [], []
    num_read = num_written = 0
    for operand in form.operands:
        name, kind, storage = operand.name, operand.cpp_type, operand.storage
        if operand.is_dst:
            place = f"inst.d[{num_written}]"
            num_written += 1
            loads.append(f"{kind} {name};")
            if kind == "bool":
                rows.append(f"uint32_t& row_{name} = *target<uint32_t>(regs, {place});")
                before.append(f"uint32_t new_{name} = 0;")
                stores.append(f"new_{name} |= uint32_t({name}) << lane;")
                after.append(f"row_{name} = (row_{name} & ~mask) | (new_{name} & mask);")
            else:
                rows.append(f"{storage}* row_{name} = target<{storage}>(regs, {place});")
                stores.append(f"row_{name}[i] = {storage}({name});")
        else:
            place = f"inst.s[{num_read}]"
            num_read += 1
            if kind == "bool":
                rows.append(f"const uint32_t row_{name} = *source<uint32_t>(regs, consts, {place});")
                loads.append(f"bool {name} = (row_{name} >> lane) & 1u;")
            else:
                rows.append(f"const {storage}* row_{name} = source<{storage}>(regs, consts, {place});")
                loads.append(f"{kind} {name} = {kind}(row_{name}[i]);")
    if form.uses_carry:
        rows.append("uint32_t& carry_row = *target<uint32_t>(regs, 0);")
        before.append("uint32_t old_carry = carry_row, new_carry = 0;")
        loads.append("bool cc = (old_carry >> lane) & 1u;")
        stores.append("new_carry |= uint32_t(cc) << lane;")
        after.append("carry_row = (old_carry & ~mask) | (new_carry & mask);")
    lane = "i / 2" if form.elements == 2 * LANES else "i"
    step = f"{' '.join(loads)} {form.statement}; {' '.join(stores)}"
    halves = (
        "for (int i = 2 * lane; i < 2 * lane + 2; ++i) { STEP }" if form.elements == 2 * LANES else "int i = lane; STEP"
    ).replace("STEP", step)
    active = f"for (uint32_t left = mask; left; left &= left - 1) {{ const int lane = __builtin_ctz(left); {halves} }}"
    if not form.is_rare:
        active = f"""if (mask == kFullMask) {{
#pragma GCC ivdep
        for (int i = 0; i < {form.elements}; ++i) {{ const int lane = {lane}; (void)lane; {step} }}
    }} else {{
        {active}
    }}"""
    return f"""{_signature(number)} {{
    {" ".join(rows)} {" ".join(before)}
    {active}
    {" ".join(after)}
}}
"""
