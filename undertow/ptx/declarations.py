"""Parse variable declarations, which look the same at module scope and inside a function."""

from .cursor import Cursor
from .program import TYPE_BITS, Variable

SPACES = {".global": "global", ".const": "const", ".shared": "shared", ".local": "local", ".param": "param"}
"""State spaces that a variable can live in, by directive."""


def parse_variables(cursor: Cursor, extern: bool) -> list[Variable]:
    """Parse `.shared .align 16 .b8 a[64], b[4] = {1, 2, 3, 4};` from the state space on, past the semicolon."""
    space = SPACES[cursor.advance().text]
    align, type_name, lanes = None, None, 1
    while cursor.kind == "modifier":
        word = cursor.advance().text
        if word == ".align":
            align = cursor.integer()
        elif word in (".v2", ".v4"):
            lanes = int(word[2:])
        elif word == ".attribute":
            cursor.skip_past(")")
        elif word == ".ptr":
            continue
        elif word[1:] in TYPE_BITS or word in (".texref", ".samplerref", ".surfref"):
            type_name = word[1:]
        else:
            raise cursor.error(f"unknown variable attribute {word!r}")
    if type_name is None:
        raise cursor.error("a variable needs a type")
    element = max(TYPE_BITS.get(type_name, 64) // 8, 1) * lanes
    variables = []
    while True:
        name = cursor.expect_kind("word").text
        length: int | None = 1
        while cursor.text == "[":
            inner = cursor.array_length()
            length = None if inner is None or length is None else length * inner
        initializer = cursor.initializer() if cursor.take("=") else ()
        if length is None and initializer:
            length = len(initializer)
        size = None if length is None else element * length
        variables.append(Variable(name, space, type_name, align or element, size, extern, initializer))
        if cursor.take(";"):
            return variables
        cursor.expect(",")
