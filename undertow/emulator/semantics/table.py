"""The semantics table: one row per PTX instruction form.

A row is the manual's syntax line plus what the form does. Everything that executes or watches PTX reads these rows:
the NumPy back end, the C++ generator, the observers and the timing model. A form without a row does not exist, and a
row without declared effects does not register.

SYNTAX of a row: `mnemonic operands`, for example
    "fma.<rnd>{.ftz}{.sat}.<type> d, a, b, c"
    "mbarrier.try_wait{.parity}.shared.b64 d:pred, [a], parity:u32{, hint:u32}"
* `.word` must stand there; `{.word}` may; `.<class>` takes one of the words given by the keyword argument `class`;
  `{.<class>}` likewise or nothing. The result is `Decoded.mods`: {"rnd": "rn", "ftz": False, "sat": False, ...}
  (a flag is True/False, an absent class None).
* operands named `d` and `e` are written, all others are read. `[a]` is an address operand. `{, x}` may be absent;
  `d{|e}` is a pair whose second half may be absent.
* `x:u32` gives the operand's type; `x:<class>` takes it from a modifier; no type means `:<type>`. Other types:
  `wide` (twice the width of <type>), `label`, `vector` (must be in braces), `any`, `async` (registers in braces that
  the instruction reads, or reads and writes if they are named `acc`, after it has been issued; the handler finds them
  by itself and is passed None).

TWO KINDS OF ROWS
1. Lane forms (`alu`): pure, same expression on each lane. `numpy` is a call over whole arrays that writes `d` (and
   `e`); its functions are those of `numpy_backend.lanes`. `cpp` is a C++ statement for one lane. Either may be a
   function of the mods that returns the text. In both, operand names stand for values of the C++/NumPy type of the
   operand's PTX type: u32 uint32_t, s32 int32_t, f32 float, f64 double, pred bool, b8/b16/b32/b64 the unsigned type,
   f16 and bf16 uint16_t bit patterns. For the packed types f32x2, f16x2 and bf16x2 the statement is applied to each
   half with the scalar type (f32, f16, bf16). Immediates are converted to the operand's type first.
   C++ must be compiled with -fwrapv -ffp-contract=off. Functions that `cpp` may call are named in `CPP_FUNCTIONS`.
   A row with `cpp=None` has no compiled form yet: the compiled back end must raise UnsupportedPtx for it (or treat it).
2. Machine forms (`machine`): memory, barriers, asynchronous copies, collectives, control. `make(decoded, bus)`
   returns `handler(lanes, mask, *sources)` for the NumPy machine; sources come in the order of the syntax line, absent
   ones as None, addresses as integer arrays (offset added), vectors as a list of arrays. The handler returns the value
   for `d` (and `e`), one array per register of a vector destination. Other back ends implement these by `Row.name`.

EFFECTS say what happens besides registers: Effect(kind, space, proxy), kind one of read, write, acquire, release,
issue (starts an asynchronous operation), complete (waits for one), fence. NO_EFFECTS is a declaration, too.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from undertow import ptx

from ..errors import UnsupportedPtx

CPP_FUNCTIONS = {
    "fmaf(a,b,c)": "fused multiply-add, also fma() for double",
    "ftz(x)": "float; a subnormal becomes zero of the same sign",
    "sat(x)": "float or double; clamp to [0,1], NaN becomes 0",
    "fmin_num(a,b) fmax_num(a,b)": "IEEE minNum/maxNum: the number wins over NaN; -0 < +0",
    "fmin_nan(a,b) fmax_nan(a,b)": "NaN wins and becomes canonical (0x7fffffff)",
    "round_f32(x, 'n'|'z'|'m'|'p')": "double to float, one rounding: nearest even, to zero, down, up",
    "f16_to_f32(b) bf16_to_f32(b) f32_to_f16(x) f32_to_bf16(x)": "bit patterns to and from float, nearest even",
    "f32_to_f16(x, mode) f32_to_bf16(x, mode) f32_to_tf32(x, mode)": "also z, m, p; a: nearest, ties away from zero",
    "finite_f16(b) finite_bf16(b) finite_tf32(b)": "bit pattern; infinity becomes the largest finite value",
    "ftz_f16(b)": "bit pattern of f16; a subnormal becomes zero of the same sign",
    "relu(x)": "0 if negative; -0 and NaN stay",
    "sign_of_product(x, a, b)": "magnitude of x, sign of a * b",
    "clamp_int<T>(x, mode) clamp_to<T>(i) round_int(x, mode)": "clamping; to an integral double",
    "add_odd(a,b) fma_odd(a,b,c) round_f32_odd(x) odd_double(i)": "rounded to odd, so that one more rounding is right",
    "mulhi(a,b)": "upper half of the product, for the four 32- and 64-bit integer types",
    "popc clz brev bfind": "on uint32_t/uint64_t",
    "bits<T>(x)": "reinterpret",
    "cc": "the lane's carry flag (bool lvalue), used by .cc forms",
    "EX2(x) LG2(x) RCP(x) RSQRT(x) SQRT(x) TANH(x) SIN(x) COS(x)": "float -> float: evaluated in double, rounded once",
}
"""What the `cpp` column may call; the compiled back end supplies these."""


@dataclass(frozen=True)
class Effect:
    """One thing that an instruction does besides writing registers."""

    kind: str
    space: str = ""
    proxy: str = "generic"


NO_EFFECTS: tuple[Effect, ...] = ()
EFFECT_KINDS = ("read", "write", "acquire", "release", "issue", "complete", "fence")


@dataclass(frozen=True)
class OperandSpec:
    """One operand of a syntax line."""

    name: str
    type: str
    is_address: bool = False
    optional: bool = False
    paired: bool = False

    @property
    def is_dst(self) -> bool:
        """Whether the instruction writes this operand."""
        return self.name in ("d", "e") and not self.is_address

    @property
    def is_async(self) -> bool:
        """Whether its registers belong to the instruction until it is complete."""
        return self.type == "async"


@dataclass(frozen=True)
class TypedOperand:
    """An operand of a decoded instruction with the PTX type under which the instruction uses it."""

    operand: ptx.Operand
    type: str
    spec: OperandSpec


@dataclass(frozen=True)
class Row:
    """One instruction form. `name` is stable and unique: back ends may key on it."""

    name: str
    syntax: str
    chapter: str
    effects: tuple[Effect, ...]
    operands: tuple[OperandSpec, ...]
    pattern: re.Pattern
    flags: Mapping[str, str]
    parts: tuple[tuple[str | None, frozenset[str], bool], ...]
    numpy: str | Callable[[Mapping], str] | None = None
    cpp: str | Callable[[Mapping], str] | None = None
    make: Callable | None = None
    blocking: bool = False
    control: bool = False

    @property
    def is_collective(self) -> bool:
        """Whether a warp executes the form as a whole, so that its guard must agree among the lanes of a warp."""
        words = {word for _, choices, optional in self.parts if not optional for word in choices}
        return bool(words & {"sync", "aligned"}) or self.syntax.startswith(("bar.", "bar{", "barrier"))

    def column(self, which: str, mods: Mapping) -> str | None:
        """Return the text of the `numpy` or `cpp` column for these modifiers."""
        value = self.numpy if which == "numpy" else self.cpp
        return value if value is None or isinstance(value, str) else value(mods)


@dataclass(frozen=True)
class Decoded:
    """An instruction joined with its row: `operands` by name of the syntax line, absent optional ones missing."""

    index: int
    instruction: ptx.Instruction
    row: Row
    mods: Mapping[str, Any]
    operands: Mapping[str, TypedOperand]

    @property
    def guard(self) -> ptx.Guard | None:
        """The predicate in front, if any."""
        return self.instruction.guard

    @property
    def destinations(self) -> list[TypedOperand]:
        """Written operands in order d, e."""
        return [o for o in self.operands.values() if o.spec.is_dst]

    @property
    def sources(self) -> list[TypedOperand]:
        """Read operands, addresses included, in the order of the syntax line."""
        return [o for o in self.operands.values() if not o.spec.is_dst]


ROWS: dict[str, list[Row]] = {}
"""All rows by opcode (mnemonic up to the first dot)."""

_NAMES: set[str] = set()


def alu(syntax: str, *, chapter: str, numpy, cpp=None, effects: tuple[Effect, ...] = NO_EFFECTS, **classes: str) -> Row:
    """Register a lane form; see the module docstring for the columns."""
    return _register(_build(syntax, chapter, effects, classes, numpy=numpy, cpp=cpp))


def machine(
    syntax: str,
    *,
    chapter: str,
    effects: tuple[Effect, ...],
    blocking: bool = False,
    control: bool = False,
    **classes: str,
) -> Callable[[Callable], Callable]:
    """Register a machine form; decorates `make(decoded, bus) -> handler`.

    blocking: the handler may return a Wait; the instruction gets a basic block of its own.
    control: the machine itself interprets the instruction (branches, exit); `make` only documents it.
    """

    def decorate(make: Callable) -> Callable:
        _register(_build(syntax, chapter, effects, classes, make=make, blocking=blocking, control=control))
        return make

    return decorate


def _register(row: Row) -> Row:
    if row.name in _NAMES:
        raise ValueError(f"semantics: two rows named {row.name}: {row.syntax}")
    _NAMES.add(row.name)
    ROWS.setdefault(re.split(r"[.{ ]", row.syntax, maxsplit=1)[0], []).append(row)
    return row


def _build(syntax: str, chapter: str, effects, classes: Mapping[str, str], **columns) -> Row:
    if not isinstance(effects, tuple):
        raise ValueError(f"semantics: {syntax}: declare effects (NO_EFFECTS if there are none)")
    for effect in effects:
        if effect.kind not in EFFECT_KINDS:
            raise ValueError(f"semantics: {syntax}: unknown effect kind {effect.kind!r}; one of {EFFECT_KINDS}")
    mnemonic, _, operands = syntax.partition(" ")
    pattern, flags, parts = _mnemonic_pattern(mnemonic, classes)
    name = re.sub(r"\.<type>$", "", mnemonic).replace("<", "").replace(">", "")
    for other in ("", "/2", "/3", "/4", "/5", "/6"):
        if name + other not in _NAMES:
            name += other
            break
    return Row(name, syntax, chapter, effects, _operand_specs(operands), pattern, flags, parts, **columns)


def _mnemonic_pattern(mnemonic: str, classes: Mapping[str, str]) -> tuple[re.Pattern, dict[str, str], tuple]:
    """Compile `add{.sat}.<type>` to a regular expression; groups g0, g1, ... map to modifier names.

    The third result lists (key, words, optional) per modifier, for modifiers that stand in another order.
    """
    parts = re.findall(r"\{\.<\w+>\}|\.<\w+>|\{\.[^}]+\}|\.[^.{]+|^[^.{]+", mnemonic)
    if "".join(parts) != mnemonic:
        raise ValueError(f"semantics: cannot read the syntax {mnemonic!r}")
    text, flags, modifiers = "", {}, []
    for part in parts:
        optional = part.startswith("{")
        word = part.strip("{}").lstrip(".")
        if word.startswith("<"):
            key = word.strip("<>")
            words = "|".join(re.escape(w) for w in sorted(classes[key].split(), key=len, reverse=True))
            text += f"(?:\\.(?P<c_{key}>{words}))" + ("?" if optional else "")
            modifiers.append((f"<{key}>", frozenset(classes[key].split()), optional))
        elif optional:
            group = f"g{len(flags)}"
            flags[group] = word
            text += f"(?P<{group}>\\.{re.escape(word)})?"
            modifiers.append((word, frozenset((word,)), True))
        else:
            text += re.escape(part)
            if part.startswith("."):
                modifiers.append((None, frozenset((word,)), False))
    return re.compile(text + r"\Z"), flags, tuple(modifiers)


def _operand_specs(text: str) -> tuple[OperandSpec, ...]:
    specs = []
    for part in re.findall(r"\{\|[^}]*\}|\{,[^}]*\}|\|[^,{|]+|[^,{|]+", text.strip()):
        optional = part.startswith("{")
        body = part.strip("{} ")
        paired = body.startswith("|")
        for item in body.lstrip("|,").split(","):
            item = item.strip()
            if not item:
                continue
            is_address = item.startswith("[")
            name, _, type_name = item.strip("[]").partition(":")
            default = "any" if is_address else "<type>"
            specs.append(OperandSpec(name, type_name or default, is_address, optional, paired))
    return tuple(specs)


def decode(instruction: ptx.Instruction, source: ptx.SourceText) -> Decoded:
    """Find the row of an instruction and type its operands.

    Raises: UnsupportedPtx with the instruction, its PTX line and, through `.loc`, the source line.
    """
    for find_mods in (_ordered_mods, _reordered_mods):
        for row in ROWS.get(instruction.opcode, ()):
            mods = find_mods(row, instruction.mnemonic)
            operands = None if mods is None else _bind_operands(row, instruction, mods)
            if mods is not None and operands is not None:
                return Decoded(instruction.index, instruction, row, mods, operands)
    where = f"{source.name}:{instruction.line}"
    origin = f" ({instruction.source})" if instruction.source else ""
    raise UnsupportedPtx(
        f"no semantics for `{source.line(instruction.line)}` ({instruction.mnemonic}), {where}{origin}"
    )


def _ordered_mods(row: Row, mnemonic: str) -> dict[str, Any] | None:
    """Modifiers of a mnemonic that has them in the order of the manual."""
    match = row.pattern.match(mnemonic)
    if match is None:
        return None
    groups = match.groupdict()
    mods: dict[str, Any] = {row.flags[g]: v is not None for g, v in groups.items() if g in row.flags}
    mods.update({g[2:]: v for g, v in groups.items() if g.startswith("c_")})
    return mods


def _reordered_mods(row: Row, mnemonic: str) -> dict[str, Any] | None:
    """The same for any order: ptxas 13.0 takes `atom.global.gpu.relaxed.add.f32` (tried), and Triton writes it."""
    left = mnemonic.split(".")[1:]
    mods: dict[str, Any] = {}
    for key, words, optional in row.parts:
        found = next((word for word in left if word in words), None)
        if found is None and not optional:
            return None
        if found is not None:
            left.remove(found)
        if key is not None:
            mods[key.strip("<>")] = found if key.startswith("<") else found is not None
    return None if left else mods


def _bind_operands(row: Row, instruction: ptx.Instruction, mods: Mapping) -> dict[str, TypedOperand] | None:
    """Pair the instruction's operands with the specs of a row, or return None if they do not fit."""
    queue = list(instruction.operands)
    required = sum(not s.optional and not s.paired for s in row.operands)
    bound: dict[str, TypedOperand] = {}
    specs = list(row.operands)
    num_left = required
    i = 0
    while i < len(specs):
        spec = specs[i]
        pair = specs[i + 1] if i + 1 < len(specs) and specs[i + 1].paired else None
        i += 2 if pair else 1
        if spec.optional and len(queue) <= num_left:
            continue
        if not queue:
            return None
        operand = queue.pop(0)
        num_left -= not spec.optional
        if isinstance(operand, ptx.Pair):
            if pair is None:
                return None
            bound[pair.name] = TypedOperand(operand.second, _resolve_type(pair, mods), pair)
            operand = operand.first
        elif pair is not None and not pair.optional:
            return None
        if not _kind_fits(spec, operand):
            return None
        bound[spec.name] = TypedOperand(operand, _resolve_type(spec, mods), spec)
    if queue:
        return None
    return {s.name: bound[s.name] for s in specs if s.name in bound}


def _kind_fits(spec: OperandSpec, operand: ptx.Operand) -> bool:
    if spec.is_address != isinstance(operand, ptx.Address):
        return False
    if spec.type in ("vector", "async"):
        return isinstance(operand, ptx.Vector)
    if spec.type == "label":
        return isinstance(operand, ptx.LabelRef)
    if spec.type == "pred" and isinstance(operand, ptx.Vector):
        return False
    return not isinstance(operand, (ptx.LabelRef, ptx.Group))


def _resolve_type(spec: OperandSpec, mods: Mapping) -> str:
    if spec.type == "wide":
        narrow = mods["type"]
        return narrow[0] + str(2 * int(narrow[1:]))
    if spec.type.startswith("<"):
        return mods.get(spec.type.strip("<>")) or "any"
    return spec.type
