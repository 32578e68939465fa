"""Line budget: files, functions and parameter lists stay small enough to be read in one go.

Prints every offender and exits 1 if there is one. There is no list of exemptions; a role of a kernel (a file in a
folder named `roles`) may have longer functions, because its loop is the schedule and is read as one piece; a file named
`signatures.py` may have longer parameter lists, because they are those of a library whose place its functions take.

    python tools/size.py            checks the repository it lies in
    python tools/size.py FOLDER     checks another tree
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("undertow", "tests", "tools")


@dataclass(frozen=True)
class Budget:
    """Largest number of lines in a file and in a function, and of parameters (self and cls not counted)."""

    file_lines: int
    function_lines: int
    parameters: int


EVERYWHERE = Budget(file_lines=400, function_lines=80, parameters=6)
ROLES = Budget(file_lines=350, function_lines=150, parameters=6)
SIGNATURES = Budget(file_lines=400, function_lines=80, parameters=24)


def budget_of(path: Path) -> Budget:
    """The budget that `path` (relative to the root) is held to."""
    if path.name == "signatures.py":
        return SIGNATURES
    return ROLES if "roles" in path.parts[:-1] else EVERYWHERE


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a function has, however they are passed; self and cls are not counted."""
    spec = function.args
    names = [argument.arg for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    names += [argument.arg for argument in (spec.vararg, spec.kwarg) if argument is not None]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def offences(path: Path, text: str) -> Iterator[str]:
    """What in one file is over its budget, one line each."""
    budget = budget_of(path)
    lines = len(text.splitlines())
    if lines > budget.file_lines:
        yield f"{path}: {lines} lines, at most {budget.file_lines}"
    for node in ast.walk(ast.parse(text, str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > budget.function_lines:
            yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {budget.function_lines}"
        count = parameters_of(node)
        if count > budget.parameters:
            yield f"{path}:{node.lineno}: {node.name} has {count} parameters, at most {budget.parameters}"


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    files = sorted(path for room in ROOMS for path in (root / room).rglob("*.py"))
    if not files:
        print(f"{root}: no Python files in {', '.join(ROOMS)}", file=sys.stderr)
        return 2
    lengths, found = [], []
    for file in files:
        text = file.read_text(encoding="utf-8")
        lengths.append((len(text.splitlines()), file.relative_to(root)))
        found += offences(file.relative_to(root), text)
    for line in found:
        print(line)
    longest, where = max(lengths)
    median = sorted(length for length, _ in lengths)[len(lengths) // 2]
    total = sum(length for length, _ in lengths)
    print(f"{len(files)} files, {total} lines, median {median}, longest {longest} ({where}), {len(found)} over budget")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
