"""Rooms know only what lies below them: read off every import statement, and tried in fresh processes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "undertow"
OURS = "undertow"

# room: (rooms it may import, third parties it may import); the standard library is free to all
ARROWS: dict[str, tuple[set[str], set[str]]] = {
    "plan": (set(), set()),
    "ptx": (set(), set()),
    "cache": (set(), set()),
    "emulator": ({"cache", "ptx", "plan"}, {"numpy"}),
    "kernels": ({"cache", "plan"}, {"torch", "cutlass", "cuda"}),
    "runtime": ({"cache", "kernels", "plan"}, {"torch", "cutlass"}),
    "health": ({"attention", "cache", "kernels", "plan", "runtime"}, {"torch"}),
    "reference": (set(), {"torch"}),
    "tolerance": ({"reference"}, {"torch"}),
    "inputs": ({"reference"}, {"torch", "safetensors"}),
    "emulated": ({"emulator", "inputs", "kernels", "plan", "reference"}, {"torch"}),
    "attention": ({"emulated", "emulator", "kernels", "reference", "runtime"}, {"torch"}),
    "integrations": ({"attention", "kernels"}, {"torch", "transformers"}),
    "verify": ({"emulator", "inputs", "kernels", "reference", "tolerance"}, {"torch"}),
    "cases": ({"emulator", "plan", "ptx"}, {"numpy"}),
    "launch_file": ({"cases", "plan"}, {"numpy"}),
    "backward_case": ({"cases", "emulated", "emulator", "inputs", "kernels", "plan"}, {"numpy", "torch"}),
    "check": ({"cases", "emulator", "plan", "ptx"}, {"numpy"}),
    "hazard_figure": ({"emulator", "plan"}, set()),
    "campaign": ({"cases", "check", "emulator", "hazard_figure", "mutate", "pool", "ptx"}, {"numpy"}),
    "mutate": ({"cases", "check", "emulator", "plan", "pool", "ptx"}, {"numpy"}),
    "sweep": (
        {"", "backward_case", "cases", "check", "emulated", "emulator", "inputs", "kernels", "mutate", "pool"}
        | {"record_file", "reference", "verify"},
        {"numpy", "torch"},
    ),
    "bench": (
        {"", "attention", "kernels", "pool", "record_file", "reference", "runtime", "sweep", "tolerance"},
        {"matplotlib", "torch"},
    ),
    "timing": ({"cache", "cases", "emulator", "plan", "pool", "ptx"}, {"numpy"}),
    "timeline": ({"cases", "emulator", "plan", "timing"}, {"numpy", "perfetto"}),
    "report": (
        {"backward_case", "bench", "campaign", "cases", "hazard_figure", "inputs", "kernels", "plan", "sweep"}
        | {"timeline", "timing"},
        set(),
    ),
    "calibrate": ({"cache", "kernels", "plan", "runtime", "timing"}, {"cutlass", "numpy", "torch"}),
    "pool": (set(), set()),
    "record_file": (set(), set()),
    "progress": (set(), set()),
    "cli": ({"", "commands", "progress"}, set()),
    "__main__": ({"cli"}, set()),
    "": ({"attention", "integrations"}, set()),  # undertow/__init__.py, and only when a name of it is asked for
}
FREE = {"commands"}  # a command may import any room; no room may import a command but cli, by name

LOADED = """
import importlib, json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked in this test")
sys.meta_path.insert(0, Blocked())
importlib.import_module({module!r})
{then}
print(json.dumps(sorted(name for name in sys.modules)))
"""


def room_of(module: str) -> str:
    """`undertow.plan.schema` -> `plan`; the package itself -> ``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports anywhere, in functions and under conditions too."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
            # `from undertow import plan` imports the room, not only the package
            yield from ((node.lineno, f"{base}.{alias.name}" if base == OURS else base) for alias in node.names)


def forbidden(path: Path, text: str) -> Iterator[str]:
    room = room_of(module_of(path))
    if room in FREE:
        return
    rooms, third_parties = ARROWS[room]
    for line, name in imported(path, text):
        top = name.partition(".")[0]
        if top == OURS:
            target = room_of(name)
            if not (PACKAGE / target).is_dir() and not (PACKAGE / f"{target}.py").is_file():
                target = ""  # a name defined in undertow/__init__.py
            if target != room and target not in rooms:
                yield f"{path.relative_to(PACKAGE.parent)}:{line}: {room or OURS} imports {name}"
        elif top not in third_parties and top not in sys.stdlib_module_names:
            yield f"{path.relative_to(PACKAGE.parent)}:{line}: {room or OURS} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_follow_the_arrows(path):
    assert not list(forbidden(path, path.read_text(encoding="utf-8")))


def test_every_room_has_its_arrows():
    assert not {room_of(module_of(path)) for path in sources()} - ARROWS.keys() - FREE


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("plan/schema.py", "import numpy", "plan imports numpy"),
        ("ptx/lexer.py", "from undertow.plan import schema", "ptx imports undertow.plan"),
        ("ptx/lexer.py", "from ..emulator import memory", "ptx imports undertow.emulator"),
        ("emulator/memory/x.py", "def f():\n    import torch", "emulator imports torch"),
        ("kernels/sm100/plan.py", "from undertow import emulator", "kernels imports undertow.emulator"),
        ("reference.py", "import cutlass.cute as cute", "reference imports cutlass.cute"),
        ("verify.py", "from undertow.commands import verify", "verify imports undertow.commands"),
    ],
)
def test_a_wrong_arrow_is_seen(file, line, complaint):
    (found,) = forbidden(PACKAGE / file, line)
    assert found.endswith(complaint)


def loaded(module: str, blocked: Iterable[str] = (), then: str = "") -> set[str]:
    """Every module that a fresh process holds after importing `module`, with some packages made unimportable."""
    program = LOADED.format(module=module, blocked=set(blocked), then=then)
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent
    )
    assert child.returncode == 0, child.stderr
    return set(json.loads(child.stdout.splitlines()[-1]))


HEAVY = {"torch", "cutlass", "numpy", "triton", "safetensors"}


def test_the_package_loads_nothing_heavy():
    assert not loaded(OURS) & HEAVY


def test_the_command_line_answers_before_anything_heavy_is_loaded():
    assert not loaded("undertow.cli", then="undertow = sys.modules['undertow.cli'].main(['--version'])") & HEAVY


@pytest.mark.parametrize(
    "module", ["undertow.plan.schema", "undertow.kernels.sm100.plan", "undertow.ptx", "undertow.sweep.matrix"]
)
def test_plans_and_ptx_need_only_the_standard_library(module):
    loaded(module, HEAVY)


def test_the_reference_needs_only_torch():
    loaded("undertow.tolerance", {"cutlass", "triton", "safetensors"})


def test_the_emulator_needs_neither_torch_nor_the_compiler():
    loaded("undertow.emulator", {"torch", "cutlass", "triton", "safetensors"})
