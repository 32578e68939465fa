"""Compile the C++ of the back end once per machine and keep the library on disk.

The key is a hash of everything that can change the result: every source (generated ones included), the compiler's
version, the flags, and the features of the processor, because the code is built for it. A library appears by one
atomic rename, so parallel processes never load half of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from undertow.cache import CacheError, cache_folder, locked

from ..errors import EmulatorError
from . import generate

RUNTIME = Path(__file__).resolve().parent / "runtime"
FLAGS = (
    "-std=c++17", "-march=native", "-fPIC", "-pthread", "-fwrapv", "-fno-strict-aliasing", "-fno-math-errno",
    "-fno-trapping-math",
)  # fmt: skip
EXACT = "-ffp-contract=off"
"""Lane forms must round where PTX says; the MMA kernel states why contraction changes nothing there."""
NUM_GENERATED = 4
LIBRARY = "emulator.so"
ALONE = "mma_kernel.cpp"
"""Compiled by itself, because it has a flag of its own."""
GATHERED = "runtime_"


_LOG = logging.getLogger(__name__)


class CompilerMissing(EmulatorError):
    """There is no C++ compiler, or it cannot build the back end; the message says which was tried."""


def find_compiler() -> str:
    """Return the C++ compiler: $CXX, else the first of g++, clang++ and c++ on the path.

    Raises: CompilerMissing.
    """
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        if path:
            return path
    raise CompilerMissing(f"no C++ compiler: tried {chosen or 'g++, clang++, c++'}")


def num_processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sources() -> dict[str, str]:
    """Return all C++ sources by file name, headers and generated units included."""
    found = {path.name: path.read_text() for path in sorted(RUNTIME.iterdir()) if path.suffix in (".cpp", ".hpp")}
    return found | generate.translation_units(NUM_GENERATED) | _gathered(found)


def _gathered(runtime: dict[str, str]) -> dict[str, str]:
    """Gather the runtime's files in two units: most of their compile time is the standard headers they share."""
    names = sorted((n for n in runtime if n.endswith(".cpp") and n != ALONE), key=lambda n: -len(runtime[n]))
    return {
        f"{GATHERED}{i}.cpp": "".join(f'#include "{name}"\n' for name in names[i::2]) for i in range(2)
    }  # fmt: skip


def library() -> Path:
    """Return the built library of the back end, from the cache where possible.

    Raises: CompilerMissing, with the compiler's words if it refuses the sources.
    """
    return built("emulator", sources())


def built(name: str, files: dict[str, str]) -> Path:
    """Return the library that these sources make, from the cache where possible. name: of its folder there.

    Raises: CompilerMissing, with the compiler's words if it refuses the sources.
    """
    compiler = find_compiler()
    try:
        folder = cache_folder() / f"{name}-{_key(compiler, files)[:24]}"
    except CacheError as error:
        raise CompilerMissing(str(error)) from error
    if not (folder / LIBRARY).exists():
        with locked(folder.parent / f".{folder.name}.lock"):
            if not (folder / LIBRARY).exists():
                _LOG.info("building the compiled %s, once per machine, into %s", name, folder)
                _build(compiler, files, folder)
    return folder / LIBRARY


def _key(compiler: str, files: dict[str, str]) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    for part in (version, repr(FLAGS), EXACT, platform.machine(), _processor_features(), *files, *files.values()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _processor_features() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _build(compiler: str, files: dict[str, str], folder: Path) -> None:
    """Compile all units, at most one per processor at a time, link, and put the library into place."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, text in files.items():
            (scratch / name).write_text(text)
        units = [n for n in files if n.endswith(".cpp") and (n == ALONE or not (RUNTIME / n).exists())]
        units.sort(key=lambda name: (not name.startswith(GATHERED), name))  # the largest first
        with ThreadPoolExecutor(max_workers=num_processors()) as pool:
            list(pool.map(lambda unit: _compile(compiler, scratch, unit), units))
        objects = [f"{unit}.o" for unit in units]
        _run([compiler, "-shared", "-pthread", *objects, "-o", LIBRARY], scratch)
        for path in scratch.iterdir():
            if path.suffix == ".o":
                path.unlink()
        with contextlib.suppress(OSError):
            scratch.rename(folder)  # fails, harmlessly, where another process was faster
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(compiler: str, scratch: Path, unit: str) -> None:
    """Compile one unit; a compiler that stumbles over its vectoriser gets a second chance without it."""
    contraction = "-ffp-contract=fast" if unit == ALONE else EXACT
    effort = "-O1" if unit.startswith("rare_") or unit == "lane_table.cpp" else "-O3"
    command = [compiler, *FLAGS, effort, contraction, "-c", unit, "-o", f"{unit}.o"]
    try:
        _run(command, scratch)
    except CompilerMissing:
        _run([*command, "-fno-tree-vectorize", "-fno-tree-slp-vectorize"], scratch)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[:20])
        raise CompilerMissing(f"`{' '.join(command)}` failed, so there is no compiled back end:\n{said}")
