"""Parse PTX text into a Module: directives here, statements of a function body in `body.py`."""

from .body import BodyParser
from .cursor import Cursor
from .declarations import SPACES, parse_variables
from .lexer import SourceText
from .program import TYPE_BITS, Function, Module, Parameter, Variable

_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_TUNING = {
    ".reqntid", ".maxntid", ".maxnreg", ".minnctapersm", ".maxnctapersm", ".noreturn", ".reqnctapercluster",
    ".explicitcluster", ".maxclusterrank", ".blocksareclusters", ".abi_preserve", ".abi_preserve_control",
}  # fmt: skip


def parse_module(text: str, name: str = "<ptx>") -> Module:
    """Parse a complete PTX module.

    Args: text: the PTX; name: file name used in error messages.
    Returns: Module with every function, variable and `.loc` source span resolved.
    Raises: PtxSyntaxError naming file, line and column.
    Source: PTX ISA 9.0, "Syntax" and "Directives".
    """
    return _ModuleParser(SourceText(text, name)).parse()


class _ModuleParser:
    def __init__(self, source: SourceText):
        self.cursor = Cursor(source)
        self.module = Module(source)

    def parse(self) -> Module:
        cursor, module = self.cursor, self.module
        self._collect_files()
        while cursor.kind != "end":
            if cursor.take(";"):
                continue
            text = cursor.text
            if text == ".version":
                cursor.advance()
                module.version = cursor.advance().text
            elif text == ".target":
                cursor.advance()
                module.target = self._words()
            elif text == ".address_size":
                cursor.advance()
                module.address_size = cursor.integer()
            elif text in (".file", ".loc"):
                self._skip_line_directive()
            elif text == ".section":
                self._skip_section()
            elif text == ".pragma" or text == ".alias":
                cursor.skip_past(";")
            elif text in _LINKAGE or text in SPACES or text in (".entry", ".func"):
                self._definition()
            else:
                raise cursor.error(f"expected a directive, got {text!r}")
        return module

    def _collect_files(self) -> None:
        """Read every `.file` first: NVVM writes them after the code that refers to them."""
        tokens = self.cursor.tokens
        for i, token in enumerate(tokens):
            if token.text == ".file" and tokens[i + 1].kind == "integer" and tokens[i + 2].kind == "string":
                self.module.files[int(tokens[i + 1].text)] = tokens[i + 2].text[1:-1]

    def _words(self) -> tuple[str, ...]:
        words = [self.cursor.advance().text]
        while self.cursor.take(","):
            words.append(self.cursor.advance().text)
        return tuple(words)

    def _skip_line_directive(self) -> None:
        """Skip `.file 1 "x" , 12, 34` or a `.loc` at module scope: up to the next token that cannot belong to it."""
        self.cursor.advance()
        while self.cursor.kind in ("integer", "string") or self.cursor.text == ",":
            self.cursor.advance()

    def _skip_section(self) -> None:
        cursor = self.cursor
        cursor.skip_past("{")
        depth = 1
        while depth:
            if cursor.kind == "end":
                raise cursor.error(".section is never closed")
            text = cursor.advance().text
            depth += (text == "{") - (text == "}")

    def _definition(self) -> None:
        cursor = self.cursor
        linkage = set()
        while cursor.text in _LINKAGE:
            linkage.add(cursor.advance().text)
        while cursor.text == ".attribute":
            cursor.skip_past(")")
        if cursor.text in (".entry", ".func"):
            self._function()
            return
        for variable in parse_variables(cursor, ".extern" in linkage):
            self.module.variables[variable.name] = variable

    def _function(self) -> None:
        cursor = self.cursor
        is_entry = cursor.advance().text == ".entry"
        while cursor.text == ".attribute":
            cursor.skip_past(")")
        results = self._parameters() if cursor.text == "(" else ()
        name = cursor.expect_kind("word").text
        parameters = self._parameters() if cursor.text == "(" else ()
        function = Function(name, is_entry, parameters, cursor.source)
        for result in results:
            function.variables[result.name] = Variable(result.name, "param", result.type, result.align, result.size)
        while cursor.text not in ("{", ";"):
            self._function_directive(function)
        if cursor.take(";"):
            function.declared_only = True
            self.module.functions.setdefault(name, function)
            return
        self.module.functions[name] = function
        BodyParser(cursor, self.module, function).parse()

    def _function_directive(self, function: Function) -> None:
        cursor = self.cursor
        text = cursor.text
        if text == ".pragma":
            cursor.advance()
            function.pragmas.append(cursor.expect_kind("string").text[1:-1])
            cursor.take(";")
        elif text in _TUNING:
            cursor.advance()
            values = []
            while cursor.kind == "integer":
                values.append(cursor.integer())
                if not cursor.take(","):
                    break
            function.directives[text[1:]] = tuple(values)
        elif text in (".loc", ".file"):
            self._skip_line_directive()
        else:
            raise cursor.error(f"unknown function directive {text!r}")

    def _parameters(self) -> tuple[Parameter, ...]:
        """Read `( .param ... , ... )`; offsets follow the alignment rules of the parameter block."""
        cursor = self.cursor
        cursor.expect("(")
        parameters, offset = [], 0
        while not cursor.take(")"):
            if cursor.text not in (".param", ".reg"):
                raise cursor.error(f"expected .param, got {cursor.text!r}")
            cursor.advance()
            parameter = self._parameter(offset)
            offset = parameter.offset + parameter.size
            parameters.append(parameter)
            if not cursor.take(",") and cursor.text != ")":
                raise cursor.error(f"expected ',' or ')' in a parameter list, got {cursor.text!r}")
        return tuple(parameters)

    def _parameter(self, offset: int) -> Parameter:
        cursor = self.cursor
        align, type_name, pointer_space, is_pointer = None, None, None, False
        while cursor.kind == "modifier":
            word = cursor.advance().text
            if word == ".align":
                value = cursor.integer()
                align = align if is_pointer else value
            elif word == ".ptr":
                is_pointer = True
                pointer_space = "generic"
            elif word in SPACES:
                pointer_space = SPACES[word]
            elif word[1:] in TYPE_BITS or word in (".texref", ".samplerref", ".surfref"):
                type_name = word[1:]
            else:
                raise cursor.error(f"unknown parameter attribute {word!r}")
        if type_name is None:
            raise cursor.error("a parameter needs a type")
        name = cursor.expect_kind("word").text
        element = max(TYPE_BITS.get(type_name, 64) // 8, 1)
        align = align or element
        size = element * (cursor.array_length() or 0 if cursor.text == "[" else 1)
        return Parameter(name, type_name, align, size, -(-offset // align) * align, pointer_space)
