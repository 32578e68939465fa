"""Sphinx extension that reads the docstrings of this repository: plain text whose parts begin with a name and a colon.

The first line stays a paragraph. What follows becomes a list with an item for each part: names of parameters or fields
before a colon, at the beginning or after a sentence, and the words of WORDS. Examples and formulas stay as they are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from sphinx.application import Sphinx

WORDS = ("Args", "Raises", "Returns", "Error", "Example", "Shapes", "Units", "Source")


def parts(text: str, names: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """What stands before the first part, and the parts as (names, text)."""
    alternatives = "|".join(sorted(map(re.escape, {*names, *WORDS}), key=len, reverse=True))
    listed = rf"(?:{alternatives})(?:, (?:{alternatives}))*(?=: )|Returns(?= )"
    found = list(re.finditer(rf"(?:^|(?<=[.;:] ))({listed}):? ", text))
    if not found:
        return text, []
    ends = [*(head.start() for head in found[1:]), len(text)]
    return text[: found[0].start()].strip(), [
        (head[1], text[head.end() : end].strip().rstrip(";")) for head, end in zip(found, ends)
    ]


def to_rst(lines: list[str], names: Iterable[str]) -> list[str]:
    """The docstring as reStructuredText."""
    summary, _, rest = "\n".join(lines).strip().partition("\n\n")
    out = [*_escaped(summary).splitlines(), ""]
    for block in re.split(r"\n\s*\n", rest.strip()):
        if block.startswith(">>>"):
            out += [*block.splitlines(), ""]
            continue
        if not block.startswith(WORDS) and any(line.startswith(" ") for line in block.splitlines()):  # a formula
            out += [".. code-block:: text", "", *(f"    {line}" for line in block.splitlines()), ""]
            continue
        before, items = parts(" ".join(block.removeprefix("Args:").split()), names)
        out += [_escaped(before), ""] if before else []
        for head, text in items:
            named = (f"*{name}*" if name in WORDS else f"``{name}``" for name in head.split(", "))
            out += [", ".join(named), f"    {_escaped(text)}", ""]
    return out


def _escaped(text: str) -> str:
    """Code in backticks as code, everything else as the characters that it is."""
    pieces = re.split(r"`([^`]+)`", text)
    plain = [re.sub(r"([\\*|_`:])", r"\\\1", piece) for piece in pieces[::2]]
    code = [f"``{piece}``" for piece in pieces[1::2]]
    return "".join(a + b for a, b in zip(plain, [*code, ""]))


def _names(thing: Any) -> list[str]:
    """Parameters of a function or of a class's constructor, fields and properties of a class."""
    names = list(getattr(thing, "__annotations__", {}))
    names += [name for name in vars(thing) if not name.startswith("_")] if inspect.isclass(thing) else []
    try:
        return names + list(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return names


def process(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place, as `autodoc-process-docstring` asks."""
    del app, what, name, options
    if lines:
        lines[:] = to_rst(lines, _names(thing))


def process_signature(*given: Any) -> tuple[str | None, str | None]:
    """Write defaults that a factory makes, which are no Python, as dots; given as `autodoc-process-signature` says."""
    signature, returns = given[-2:]
    return (signature.replace("<factory>", "...") if signature else signature), returns


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the hooks."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", process_signature)
    return {"version": "1", "parallel_read_safe": True}
