"""From the PTX instructions of a kernel to what issues: copies vanish, dead code goes, added constants are folded.

Everything here is about the text of a kernel; which of it a warp executes is in a recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from undertow import ptx
from undertow.emulator.program import Program
from undertow.emulator.semantics.table import Decoded

from .errors import TimingError
from .regions import Regions
from .uops import Form, Kind, Unit, form_of

_UNIFORM_SOURCES = ("%ctaid", "%nctaid", "%ntid", "%clusterid", "%nclusterid", "%cluster_", "%smid", "%nsmid")
_FOLDED = ("add", "or")
_PRODUCTS, _SUMS = ("mul.f32", "mul.ftz.f32"), ("add.f32", "sub.f32", "add.ftz.f32", "sub.ftz.f32")
_ACCESSES = (Kind.LOAD, Kind.STORE, Kind.TMEM_LOAD, Kind.TMEM_STORE)
_FLOATS = frozenset(("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2"))
_LONG = 4  # from so many instructions on, one on uniform values is no single uniform instruction


@dataclass(frozen=True)
class Node:
    """An instruction that issues. place: its PTX index. reads, writes: registers, copies followed to their origin.

    touches: registers of asynchronous MMAs among them. holds: those that an asynchronous MMA has until it is done.
    commits: whether it closes a group of MMAs. limit: groups that a wait leaves open, -1 for what is no such wait.
    words: 32-bit words of a lane's load or store.
    """

    place: int
    form: Form
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    touches: frozenset[str] = frozenset()
    holds: frozenset[str] = frozenset()
    commits: bool = False
    limit: int = -1
    words: int = 0

    @property
    def is_ordered(self) -> bool:
        """Whether the assembler keeps its place among others of this sort: it does more than write registers."""
        return self.form.kind is not Kind.ARITHMETIC


def names_in(operand: Any) -> Iterator[str]:
    """The registers of an operand."""
    if isinstance(operand, ptx.Register):
        yield operand.name
    elif isinstance(operand, ptx.Negated):
        yield operand.register.name
    elif isinstance(operand, (ptx.Vector, ptx.Group)):
        for item in operand.items:
            yield from names_in(item)
    elif isinstance(operand, ptx.Pair):
        yield from names_in(operand.first)
        yield from names_in(operand.second)
    elif isinstance(operand, ptx.Address):
        yield from names_in(operand.base)
        for item in (*operand.coordinates, *operand.extra):
            yield from names_in(item)


def reads_of(decoded: Decoded) -> tuple[str, ...]:
    """Registers that an instruction reads when it issues, its guard's included."""
    found = [name for typed in decoded.operands.values() if not typed.spec.is_dst for name in names_in(typed.operand)
             if typed.spec.name != "acc"]  # fmt: skip
    if decoded.guard:
        found.append(decoded.guard.register.name)
    return tuple(dict.fromkeys(found))


def writes_of(decoded: Decoded) -> tuple[str, ...]:
    """Registers that an instruction writes; the accumulators of an asynchronous MMA are not among them."""
    return tuple(name for typed in decoded.destinations for name in names_in(typed.operand))


def _limit(decoded: Decoded, form: Form) -> int:
    """How many groups of MMAs a wait leaves open; -1 for what is no wait of a warpgroup."""
    if form.kind is not Kind.WGMMA_WAIT:
        return -1
    operand = decoded.operands["limit"].operand
    return operand.value if isinstance(operand, ptx.Immediate) else 0


def _words(decoded: Decoded, form: Form) -> int:
    """32-bit words of a lane's load or store of shared or tensor memory; 0 for others."""
    if form.kind not in _ACCESSES:
        return 0
    parts = decoded.instruction.mnemonic.split(".")
    many = [int(part[1:]) for part in parts if part[:1] in ("v", "x") and part[1:].isdigit()]
    bits = next((ptx.TYPE_BITS[part] for part in reversed(parts) if part in ptx.TYPE_BITS), 32)
    return (many[0] if many else 1) * max(1, (32 if bits == 16 and "matrix" in parts[0] else bits) // 32)


class Lowering:
    """The instructions of a kernel as they issue.

    nodes: by PTX index, None for what does not issue. origins: register -> the registers it is a copy of.
    """

    def __init__(self, program: Program):
        self.program = program
        self.regions = Regions(program)
        self._forms = [form_of(decoded) for decoded in program.code]
        self._check_waits()
        self._fold_constants()
        self._contract()
        self._async = frozenset(
            name for decoded in program.code for typed in decoded.operands.values() if typed.spec.is_async
            for name in names_in(typed.operand)
        )  # fmt: skip
        self.origins = self._copies()
        self._fold_addresses()
        alive = self._alive()
        self._guards = self._converted_guards()
        self.nodes = tuple(self._node(decoded, decoded.index in alive) for decoded in program.code)

    @cached_property
    def registers(self) -> dict[str, int]:
        """A number for every register that something writes and something reads."""
        names: dict[str, int] = {}
        for node in self.nodes:
            for name in () if node is None else (*node.reads, *node.writes):
                names.setdefault(name, len(names))
        return names

    def _check_waits(self) -> None:
        """The answer of a try_wait may only be used to ask again: the branch on it is where the warp waits.

        Raises: TimingError for a kernel that does something else with it.
        """
        code = self.program.code
        answers = {
            name: decoded for decoded, form in zip(code, self._forms, strict=True) if form and form.kind is Kind.ASK
            for name in writes_of(decoded)
        }  # fmt: skip
        for decoded in code:
            for name in reads_of(decoded):
                if name in answers and decoded.instruction.opcode != "bra":
                    where = self.program.where(answers[name].index)
                    raise TimingError(f"control flow depends on time: `{decoded.instruction.mnemonic}` uses the answer"
                                      f" of a try_wait, {where}")  # fmt: skip
            if decoded.guard and decoded.guard.register.name in answers:
                self._forms[decoded.index] = Form(Kind.WAIT)

    def _fold_constants(self) -> None:
        """What is computed from literals alone is a literal."""
        code = self.program.code
        makers = Counter(name for decoded in code for name in writes_of(decoded))
        self._constant: set[str] = set()
        for decoded, form in zip(code, self._forms, strict=True):
            names, is_special = self._sources(decoded), any(isinstance(t.operand, ptx.Special) for t in decoded.sources)
            if form is None or form.kind not in (Kind.ARITHMETIC, Kind.ALIAS) or decoded.guard or is_special:
                continue
            if form.unit not in (Unit.COLLECTIVE, Unit.SHUFFLE) and all(name in self._constant for name in names):
                written = writes_of(decoded)
                if all(makers[name] == 1 for name in written):
                    self._constant.update(written)
                    self._forms[decoded.index] = Form(Kind.ALIAS)

    def _contract(self) -> None:
        """A product that only one sum uses is part of a fused multiply-add, where neither asks for a rounding."""
        code = self.program.code
        uses = Counter(name for decoded in code for name in reads_of(decoded))
        products = {
            name for decoded in code if decoded.instruction.mnemonic in _PRODUCTS and not decoded.guard
            for name in writes_of(decoded) if uses[name] == 1
        }  # fmt: skip
        makers = {name: decoded for decoded in code for name in writes_of(decoded) if name in products}
        for decoded in code:
            if decoded.instruction.mnemonic in _SUMS:
                fused = next((name for name in self._sources(decoded) if name in products), None)
                if fused:
                    self._forms[makers[fused].index] = Form(Kind.ALIAS)

    def _copies(self) -> dict[str, tuple[str, ...]]:
        """Registers that are only ever copied from others, and what those are.

        A register with several definitions (a value that a loop carries) is one of these definitions' own registers
        for the assembler; here its readers wait for all of them.
        """
        made: dict[str, list[Decoded]] = {}
        for decoded in self.program.code:
            for name in writes_of(decoded):
                made.setdefault(name, []).append(decoded)
        direct = {
            name: tuple(source for decoded in makers for source in self._sources(decoded))
            for name, makers in made.items() if all(self._is_copy(decoded) for decoded in makers)
        }  # fmt: skip
        self._makers = made
        return direct

    def _sources(self, decoded: Decoded) -> tuple[str, ...]:
        return tuple(name for typed in decoded.sources for name in names_in(typed.operand))

    def _is_copy(self, decoded: Decoded) -> bool:
        form = self._forms[decoded.index]
        return form is None or form.kind is Kind.ALIAS

    def _fold_addresses(self) -> None:
        """A constant added to a register is part of the address, where nothing but addresses use the sum."""
        users: dict[str, list[tuple[int, bool]]] = {}
        for decoded in self.program.code:
            for typed in decoded.operands.values():
                for name in () if typed.spec.is_dst else names_in(typed.operand):
                    users.setdefault(name, []).append((decoded.index, isinstance(typed.operand, ptx.Address)))
        folded: set[int] = set()
        for decoded in reversed(self.program.code):
            names = [name for name in self._sources(decoded) if name not in self._constant]
            written = writes_of(decoded)
            if decoded.instruction.opcode not in _FOLDED or decoded.guard or len(names) != 1 or len(written) != 1:
                continue
            if len(decoded.sources) == 2 and all(is_in or user in folded for user, is_in in users.get(written[0], ())):
                folded.add(decoded.index)
                self._forms[decoded.index] = Form(Kind.ALIAS)
                if len(self._makers[written[0]]) == 1:
                    self.origins[written[0]] = tuple(names)

    def origin(self, name: str) -> tuple[str, ...]:
        """The registers that hold a value before it is copied."""
        found: dict[str, None] = {}
        seen, left = set(), [name]
        while left:
            at = left.pop()
            if at in seen:
                continue
            seen.add(at)
            if at in self.origins:
                left.extend(self.origins[at])
            else:
                found[at] = None
        return tuple(found)

    def _alive(self) -> set[int]:
        """Instructions that do something, or whose result something alive reads."""
        code = self.program.code
        alive = {
            decoded.index for decoded, form in zip(code, self._forms, strict=True)
            if form is not None and form.kind not in (Kind.ARITHMETIC, Kind.ALIAS)
        }  # fmt: skip
        left = list(alive)
        while left:
            decoded = code[left.pop()]
            accumulators = (n for t in decoded.operands.values() if t.spec.is_async for n in names_in(t.operand))
            for name in (*reads_of(decoded), *accumulators):
                for maker in self._makers.get(name, ()):
                    if maker.index not in alive:
                        alive.add(maker.index)
                        left.append(maker.index)
        return alive

    def _converted_guards(self) -> dict[int, str]:
        """The predicate that guards each instruction behind a branch that is no branch in the assembly."""
        guards = {}
        for branch, target in self.regions.converted.items():
            guard = self.program.code[branch].guard
            assert guard is not None
            guards |= dict.fromkeys(range(branch + 1, target), guard.register.name)
        return guards

    def _node(self, decoded: Decoded, is_alive: bool) -> Node | None:
        form, place = self._forms[decoded.index], decoded.index
        if form is None or not is_alive or form.kind is Kind.ALIAS:
            return None
        if form.kind is Kind.BRANCH and place in self._guards:
            return None  # the jump back to a try_wait
        if form.kind is Kind.BRANCH and place in self.regions.converted and not self.regions.retries(place + 1):
            return None
        named = (*reads_of(decoded), *((self._guards[place],) if place in self._guards else ()))
        reads = tuple(dict.fromkeys(origin for name in named for origin in self.origin(name)))
        writes = writes_of(decoded)
        if form.kind is Kind.ARITHMETIC and form.unit in (Unit.ALU, Unit.MULTIPLY) and self._is_uniform(decoded):
            form = Form(form.kind, Unit.UNIFORM, 1 if form.issues < _LONG else form.issues)
        touched = frozenset({*reads, *writes, *reads_of(decoded)} & self._async_origins)
        if form.kind is Kind.WGMMA:
            held = {name for t in decoded.operands.values() if t.spec.is_async for name in names_in(t.operand)}
            origins = {origin for name in held for origin in self.origin(name)}
            return Node(place, form, reads, writes, touched, frozenset(held | origins))
        commits = decoded.instruction.mnemonic.startswith("wgmma.commit_group")
        limit, words = _limit(decoded, form), _words(decoded, form)
        return Node(place, form, reads, writes, touched, frozenset(), commits, limit, words)

    @cached_property
    def _async_origins(self) -> frozenset[str]:
        return self._async | {origin for name in self._async for origin in self.origin(name)}

    def _is_uniform(self, decoded: Decoded) -> bool:
        """Whether an instruction computes with integers that all lanes share."""
        if not _FLOATS.isdisjoint(decoded.instruction.mnemonic.split(".")):
            return False
        return all(name in self.uniform for name in (*self._sources(decoded), *writes_of(decoded)))

    @cached_property
    def uniform(self) -> frozenset[str]:
        """Registers that hold one value for all lanes of a warp, as far as the text says so."""
        varying = {
            name for name, makers in self._makers.items() for decoded in makers if self._varies(decoded)
        }  # fmt: skip
        readers: dict[str, list[Decoded]] = {}
        for decoded in self.program.code:
            for name in self._sources(decoded):
                readers.setdefault(name, []).append(decoded)
        left = list(varying)
        while left:
            for decoded in readers.get(left.pop(), ()):
                if decoded.instruction.opcode != "shfl":
                    new = set(writes_of(decoded)) - varying
                    varying |= new
                    left.extend(new)
        return frozenset(self._makers.keys() - varying)

    def _varies(self, decoded: Decoded) -> bool:
        """Whether an instruction makes something of its own for each lane."""
        opcode = decoded.instruction.opcode
        specials = [t.operand.name for t in decoded.sources if isinstance(t.operand, ptx.Special)]
        if specials:
            return not all(name.startswith(_UNIFORM_SOURCES) for name in specials)
        if opcode == "ld":  # of one address, it is one value; ptxas takes it so
            return (decoded.mods.get("space") or "").startswith("local")
        return opcode in ("elect", "atom", "ldmatrix", "tcgen05", "match")
