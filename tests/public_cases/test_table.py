"""The table of public reports is complete, and says what is true: every test in it exists, and names its thread."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = {
    "N": (1, 2, 5, 7, 8, 10, 11, 13, 14, 15, 17, 19, 20),
    "S": (1, 2, 4, 5, 8, 9, 10, 11, 12, 14, 16, 18, 20, 21),
    "L": (1, 2, 3, 5, 6, 8, 9, 10),
    "G": (1, 2, 4, 6),
    "W": (1, 2, 4, 5, 7, 9, 10, 12, 13),
    "D": (1, 2, 5, 6, 7, 9, 10),
}
ROW = re.compile(r"^\| ([A-Z]\d\d) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
ROWS = ROW.findall((HERE / "README.md").read_text(encoding="utf-8"))


def docstrings_of(*files: Path) -> dict[str, str]:
    """Name and docstring of every test in the files."""
    functions = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    return {node.name: ast.get_docstring(node) or "" for node in functions if isinstance(node, ast.FunctionDef)}


OWN = docstrings_of(*HERE.glob("test_*.py"))


def test_every_case_has_one_row():
    assert [case for case, _, _ in ROWS] == [f"{group}{n:02}" for group, numbers in CASES.items() for n in numbers]


@pytest.mark.parametrize(("case", "threads", "tests"), ROWS, ids=[case for case, _, _ in ROWS])
def test_the_tests_of_a_case_exist_and_name_its_threads(case, threads, tests):
    names = re.findall(r"`([^`]+)`", tests)
    assert names and ", ".join(f"`{name}`" for name in names) == tests
    docstrings = []
    for name in names:
        file, _, function = name.rpartition("::")
        known = docstrings_of(ROOT / file) if file else OWN
        assert function in known, f"{case}: there is no {name}"
        docstrings.append("" if file else known[function])
    for thread in threads.split(", "):
        assert any(re.search(rf"{re.escape(thread)}(?!\d)", docstring) for docstring in docstrings), f"{case}: {thread}"
