"""Compile a variant in an interpreter of its own, where no other library has changed the compiler.

quack, which flash-attn-4 imports, replaces parts of nvidia-cutlass-dsl in its process: how tensors are indexed, how
arguments are converted. Kernels that were proved with the compiler as it is must not be compiled with another one; with
nvidia-cutlass-dsl 4.8.1 and quack 0.6.5 they do not compile at all.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from undertow import cache
from undertow.kernels.compile import CompileError, MachineCodeError
from undertow.runtime.architectures import Architecture

PATCHING = ("quack",)  # packages that change the compiler of the process which imports them
SECONDS = 300.0  # of the interpreter, which imports the compiler; a variant takes 2 to 5 on an idle core


def is_patched() -> bool:
    """Whether a package that changes the compiler has been imported into this process."""
    return any(name in sys.modules for name in PATCHING)


def precompile_apart(architecture: Architecture, variant: Any, seconds: float = SECONDS) -> cache.Entry:
    """`objects.precompile` in a fresh interpreter; not by multiprocessing, which would run the user's script again.

    Raises: CompileError, also if there is no answer within `seconds`; MachineCodeError as raised there.
    """
    with tempfile.TemporaryDirectory(prefix="undertow-apart-") as folder:
        question, answer = Path(folder) / "question", Path(folder) / "answer"
        question.write_bytes(pickle.dumps((architecture, variant)))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", __name__, str(question), str(answer)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise CompileError(
                f"compiling {variant.name} for {architecture.target}: no end in {seconds:g} s"
            ) from error
        said = pickle.loads(answer.read_bytes()) if answer.exists() else done.stderr.strip() or "its process died"
    if isinstance(said, MachineCodeError):
        raise said
    if not isinstance(said, cache.Entry):
        raise CompileError(f"{_what(architecture, variant)} in a process of its own failed: {said}")
    return said


def _what(architecture: Architecture, variant: Any) -> str:
    return f"compiling {variant.name} for {architecture.target}"


def main(question: str, answer: str) -> None:
    """Answer with the cache entry, or with the complaint."""
    from undertow.runtime import objects

    architecture, variant = pickle.loads(Path(question).read_bytes())
    try:
        said: Any = objects.precompile(architecture, variant)
    except MachineCodeError as error:
        said = error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(answer).write_bytes(pickle.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
