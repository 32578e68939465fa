"""The functions of the installed flash-attn-4 as they may be called, read from its source.

Importing it would import quack, which changes the compiler of the whole process, and with it other tests.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from pathlib import Path

import pytest


@functools.lru_cache
def signature(function: str) -> inspect.Signature:
    """Of a function in flash_attn.cute.interface: names, kinds and constant defaults. Skips if it is not installed."""
    package = importlib.util.find_spec("flash_attn")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    sources = [path for folder in folders if (path := Path(folder) / "cute" / "interface.py").exists()]
    if not sources:
        pytest.skip("flash-attn-4 is not installed")
    (found,) = (
        node
        for node in ast.parse(sources[0].read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    arguments = found.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    bare = ast.FunctionDef(function, arguments, [ast.Pass()], [], None)
    scope: dict[str, object] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([bare], [])), str(sources[0]), "exec"), scope)
    return inspect.signature(scope[function])  # type: ignore[arg-type]
