"""Parse the body of a PTX function: scopes, declarations, labels and instructions.

Inline assembly opens a scope per use and repeats the names inside, so registers and labels are looked up scope by
scope and leave with unique names (`P1@7`); labels may be used before they stand, so they are resolved at the end.
"""

import dataclasses
from typing import Any

from .cursor import Cursor
from .declarations import parse_variables
from .program import (
    SPECIAL_PREFIXES,
    SPECIAL_REGISTERS,
    TYPE_BITS,
    Address,
    Function,
    Group,
    Guard,
    Immediate,
    Instruction,
    LabelRef,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    SourceSpan,
    Special,
    Symbol,
    Vector,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Name:
    """A word that is neither register nor special register: label, variable, parameter or function."""

    text: str
    offset: int
    scope: "_Scope" = dataclasses.field(compare=False, hash=False)
    position: int = 0


class _Scope:
    def __init__(self, parent: "_Scope | None", number: int):
        self.parent = parent
        self.suffix = f"@{number}" if number else ""
        self.registers: dict[str, str] = {}
        self.ranges: list[tuple[str, int, str]] = []
        self.labels: set[str] = set()

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            type_name = scope.registers.get(name) or scope.in_range(name)
            if type_name:
                return Register(name + scope.suffix, type_name)
            scope = scope.parent
        return None

    def in_range(self, name: str) -> str | None:
        for prefix, count, type_name in self.ranges:
            digits = name[len(prefix) :]
            if name.startswith(prefix) and digits.isdigit() and int(digits) < count:
                self.registers[name] = type_name
                return type_name
        return None

    def label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return name + scope.suffix
            scope = scope.parent
        return None


class BodyParser:
    """Fills a Function from the cursor, which stands at its opening brace."""

    def __init__(self, cursor: Cursor, module: Module, function: Function):
        self.cursor = cursor
        self.module = module
        self.function = function
        self.scope = _Scope(None, 0)
        self.num_scopes = 0
        self.span: SourceSpan | None = None
        self.guard: Guard | None = None
        self._targets: list[tuple[str, list[_Name]]] = []
        self._pending: list[Instruction] = []

    def parse(self) -> None:
        """Read up to the closing brace and resolve every name."""
        cursor = self.cursor
        cursor.expect("{")
        depth = 1
        while depth:
            if cursor.take("{"):
                depth += 1
                self.num_scopes += 1
                self.scope = _Scope(self.scope, self.num_scopes)
            elif cursor.take("}"):
                depth -= 1
                self.scope = self.scope.parent or self.scope
            else:
                self._statement()
        self._resolve()

    def _statement(self) -> None:
        cursor = self.cursor
        if cursor.take(";"):
            return
        if cursor.kind == "modifier":
            self._directive()
        elif cursor.kind == "word" and cursor.peek().text == ":":
            self._label()
        elif cursor.text == "@" or cursor.kind == "word":
            self._instruction()
        else:
            what = repr(cursor.text) if cursor.kind != "end" else "the end of the file"
            raise cursor.error(f"expected a statement, got {what}")

    def _label(self) -> None:
        cursor = self.cursor
        name = cursor.advance().text
        cursor.expect(":")
        if cursor.text in (".branchtargets", ".calltargets", ".callprototype"):
            is_branch = cursor.advance().text == ".branchtargets"
            names = []
            while is_branch and cursor.text != ";":
                names.append(_Name(cursor.expect_kind("word").text, 0, self.scope, cursor.token.offset))
                cursor.take(",")
            if is_branch:
                self._targets.append((name + self.scope.suffix, names))
                self.scope.labels.add(name)
            cursor.skip_past(";")
            return
        if name in self.scope.labels:
            raise cursor.error(f"label {name} is defined twice in one scope")
        self.scope.labels.add(name)
        self.function.labels[name + self.scope.suffix] = len(self._pending)

    def _directive(self) -> None:
        cursor = self.cursor
        text = cursor.text
        if text == ".reg":
            cursor.advance()
            self._registers()
        elif text == ".loc":
            cursor.advance()
            span, kept = self._location(), self.span
            # compilers count the lines of inline assembly as if they were the source's: its scope is one line
            counted = self.scope.parent and kept and (span.file, span.column) == (kept.file, kept.column)
            self.span = kept if counted else span
        elif text == ".pragma":
            cursor.advance()
            self.function.pragmas.append(cursor.expect_kind("string").text[1:-1])
            cursor.expect(";")
        elif text in (".local", ".shared", ".param", ".global", ".const", ".extern"):
            self._variables()
        elif text == ".file":
            cursor.advance()
            while cursor.kind in ("integer", "string") or cursor.text == ",":
                cursor.advance()
        else:
            raise cursor.error(f"unknown directive {text!r} in a function body")

    def _variables(self) -> None:
        extern = self.cursor.take(".extern")
        for variable in parse_variables(self.cursor, extern):
            known = self.function.variables.get(variable.name)
            if known is not None and (known.space != "param" or variable.space != "param"):
                raise self.cursor.error(f"variable {variable.name} is declared twice")
            self.function.variables[variable.name] = variable

    def _registers(self) -> None:
        cursor = self.cursor
        vector = ""
        while cursor.text in (".v2", ".v4"):
            vector = cursor.advance().text[1:] + "."
        type_name = cursor.expect_kind("modifier").text[1:]
        if type_name not in TYPE_BITS:
            raise cursor.error(f"unknown register type .{type_name}")
        while True:
            name = cursor.expect_kind("word").text
            if cursor.take("<"):
                self.scope.ranges.append((name, cursor.integer(), vector + type_name))
                cursor.expect(">")
            else:
                self.scope.registers[name] = vector + type_name
            if cursor.take(";"):
                return
            cursor.expect(",")

    def _location(self) -> SourceSpan:
        """Read `file line column [, function_name label [+ n], inlined_at file line column]`."""
        cursor = self.cursor
        file, line, column = (cursor.integer() for _ in range(3))
        inlined_at = None
        while cursor.text == "," and cursor.peek().text in ("function_name", "inlined_at"):
            cursor.advance()
            if cursor.advance().text == "function_name":
                cursor.advance()
                if cursor.take("+"):
                    cursor.integer()
            else:
                where, at_line, at_column = (cursor.integer() for _ in range(3))
                inlined_at = SourceSpan(self.module.files.get(where, f"file {where}"), at_line, at_column)
        return SourceSpan(self.module.files.get(file, f"file {file}"), line, column, inlined_at)

    def _instruction(self) -> None:
        cursor = self.cursor
        start = cursor.token.offset
        guard = self._guard() if cursor.take("@") else None
        mnemonic = cursor.expect_kind("word").text
        while cursor.kind == "modifier":
            mnemonic += cursor.advance().text
        operands: list = []
        while cursor.text != ";":
            operands.append(self._operand())
            if cursor.text != ";":
                cursor.expect(",")
        cursor.expect(";")
        line, column = cursor.source.position(start)
        self._pending.append(Instruction(len(self._pending), mnemonic, tuple(operands), guard, line, column, self.span))

    def _guard(self) -> Guard:
        negated = self.cursor.take("!")
        name = self.cursor.expect_kind("word").text
        register = self.scope.register(name)
        if register is None:
            raise self.cursor.error(f"guard {name} is not a declared register")
        return Guard(register, negated)

    def _operand(self):
        first = self._single_operand()
        if self.cursor.take("|"):
            return Pair(first, self._single_operand())
        return first

    def _single_operand(self):
        cursor = self.cursor
        text = cursor.text
        if text == "[":
            return self._address()
        if text == "{":
            return Vector(self._list("{", "}"))
        if text == "(" and cursor.peek().kind not in ("integer", "float") and cursor.peek().text != "-":
            return Group(self._list("(", ")"))
        if cursor.take("!"):
            register = self._single_operand()
            if not isinstance(register, Register):
                raise cursor.error("only a predicate register can be negated")
            return Negated(register)
        if cursor.kind == "word":
            return self._word()
        return cursor.literal()

    def _list(self, opening: str, closing: str) -> tuple:
        cursor = self.cursor
        cursor.expect(opening)
        items = []
        while not cursor.take(closing):
            items.append(self._operand())
            if cursor.text != closing:
                cursor.expect(",")
        return tuple(items)

    def _word(self):
        cursor = self.cursor
        token = cursor.advance()
        name = token.text
        if name == "_":
            return Sink()
        register = self.scope.register(name)
        if register is not None:
            if cursor.kind == "modifier" and register.type.startswith("v"):
                raise cursor.error(f"vector register {name} is not supported")
            self.function.registers[register.name] = register.type
            return register
        if name == "WARP_SZ":
            return Immediate(32)
        if name in SPECIAL_REGISTERS or name.startswith(SPECIAL_PREFIXES):
            if cursor.kind == "modifier" and cursor.text in (".x", ".y", ".z", ".w"):
                name += cursor.advance().text
            return Special(name)
        if name[0] == "%":
            raise cursor.source.error(token.offset, f"register {name} is not declared")
        offset = self._offset()
        return _Name(name, offset, self.scope, token.offset)

    def _offset(self) -> int:
        """Read `+ 8`, `+ -8` or `- 8`, any number of times."""
        cursor, offset = self.cursor, 0
        while cursor.text in ("+", "-"):
            sign = 1 if cursor.advance().text == "+" else -1
            offset += sign * cursor.integer()
        return offset

    def _address(self):
        cursor = self.cursor
        cursor.expect("[")
        base: Any = self._word() if cursor.kind == "word" else cursor.literal()
        if isinstance(base, (Sink, Special)):
            raise cursor.error("an address needs a register, a variable or a number")
        offset = self._offset()
        coordinates: tuple = ()
        extra: tuple = ()
        if cursor.take(","):
            coordinates = self._list("{", "}") if cursor.text == "{" else (self._operand(),)
            if cursor.take(","):
                extra = self._list("{", "}")
        cursor.expect("]")
        return Address(base, offset, coordinates, extra)

    def _resolve(self) -> None:
        """Turn every _Name into a label, variable, parameter or function reference."""
        function = self.function
        for instruction in self._pending:
            operands = tuple(self._finish(operand) for operand in instruction.operands)
            function.instructions.append(dataclasses.replace(instruction, operands=operands))
            if instruction.guard is not None:
                register = instruction.guard.register
                function.registers[register.name] = register.type
        for label, names in self._targets:
            targets = [self._finish(name) for name in names]
            function.branch_targets[label] = tuple(t.name for t in targets if isinstance(t, LabelRef))

    def _finish(self, operand) -> Operand:
        if isinstance(operand, _Name):
            return self._finish_name(operand)
        if isinstance(operand, (Vector, Group)):
            return type(operand)(tuple(self._finish(item) for item in operand.items))
        if isinstance(operand, Pair):
            return Pair(self._finish(operand.first), self._finish(operand.second))
        if isinstance(operand, Address):
            base, offset = operand.base, operand.offset
            if isinstance(base, _Name):
                symbol = self._finish_name(base)
                if not isinstance(symbol, Symbol):
                    raise self.cursor.source.error(base.position, f"{base.text} is a label, not an address")
                base, offset = Symbol(symbol.name), offset + symbol.offset
            return Address(
                base,
                offset,
                tuple(self._finish(c) for c in operand.coordinates),
                tuple(self._finish(c) for c in operand.extra),
            )
        return operand

    def _finish_name(self, name: _Name) -> LabelRef | Symbol:
        label = name.scope.label(name.text)
        if label is not None:
            return LabelRef(label)
        function, module = self.function, self.module
        known = (
            name.text in function.variables
            or name.text in module.variables
            or name.text in module.functions
            or any(p.name == name.text for p in function.parameters)
            or self.in_prototypes(name.text)
        )
        if not known:
            raise self.cursor.source.error(name.position, f"unknown name {name.text}")
        return Symbol(name.text, name.offset)

    def in_prototypes(self, text: str) -> bool:
        """Say whether the name labels a `.callprototype`, which only indirect calls mention."""
        return any(t.text == text and self._is_prototype(i) for i, t in enumerate(self.cursor.tokens))

    def _is_prototype(self, place: int) -> bool:
        tokens = self.cursor.tokens
        return tokens[place + 1].text == ":" and tokens[place + 2].text in (".callprototype", ".calltargets")
