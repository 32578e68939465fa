"""Compile one kernel for sm_100a on any machine: no GPU, no CUDA driver, no CUDA toolkit.

The DSL lowers to PTX and assembles with the ptxas inside its own wheel, so its documented options suffice: keep the
PTX and the cubin, let the remark file carry ptxas's verbose report. Every compilation gets a dump folder of its own,
because kernel names are not unique across configurations. Results are kept on disk under a hash of everything
that can change them; an entry appears by one atomic rename, so parallel processes never see half of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from undertow.cache import cache_folder

ARCH = "sm_100a"
PACKAGE = Path(__file__).resolve().parent.parent
_KEY_FOLDERS = ("kernels", "plan")  # a change of any source file in them invalidates every cached kernel
_LOG = logging.getLogger(__name__)
_ONE_COMPILATION = threading.Lock()  # the DSL keeps tracing state in globals

Build = Callable[[], tuple[Any, tuple[Any, ...]]]


class CompileError(ValueError):
    """The kernel could not be compiled; the message says where the compiler stopped."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel. Units: registers per thread; the rest in bytes per thread, smem per CTA."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem: int


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel: `name` is ours, `entry` is its PTX entry; `.file` paths in `ptx` do not depend on the machine."""

    name: str
    entry: str
    ptx: str
    cubin: bytes
    resources: Resources


def compile_kernel(name: str, config: object, build: Build) -> CompiledKernel:
    """Return the compiled kernel, from the disk cache where possible.

    Args:
        name: short name for messages and for the cache folder.
        config: everything that `build` depends on besides the sources of this package; its repr is part of the key.
        build: called on a cache miss only, returns a `cute.jit` host function that launches exactly one kernel,
            and its arguments (fake tensors). It may import the DSL: a cache hit does not.
    Raises:
        CompileError: the DSL or ptxas refuses the kernel, or `build` launches a number of kernels other than one.
        CacheError: no folder can be written.
    """
    key = _key(name, config, build)
    folder = cache_folder() / f"{name}-{key[:24]}"
    kernel = _load(folder, name, key)
    if kernel is None:
        with _ONE_COMPILATION:
            kernel = _compile(name, build)
        _store(folder, kernel, key)
    return kernel


def _key(name: str, config: object, build: Build) -> str:
    described = repr(config)
    assert " at 0x" not in described, f"the repr of config holds a memory address, so it is no key: {described}"
    digest = hashlib.sha256()
    environment = sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_"))
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    for part in (name, described, version, ARCH, repr(environment)):
        digest.update(part.encode() + b"\0")
    sources = [path for folder in _KEY_FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]
    own_source = Path(build.__code__.co_filename) if hasattr(build, "__code__") else None
    if own_source is not None and own_source.is_file():
        sources.append(own_source)
    for path in sources:
        where = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name
        digest.update(str(where).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(name: str, build: Build) -> CompiledKernel:
    try:
        import cutlass.cute as cute
    except ImportError as error:
        raise CompileError(
            f"compiling {name} needs the package nvidia-cutlass-dsl, which cannot be imported: {error}"
        ) from error
    with tempfile.TemporaryDirectory(prefix=f"undertow-{name}-") as dump:
        report_path = Path(dump) / "ptxas.yaml"
        options = (
            f"--gpu-arch {ARCH} --generate-line-info --keep-ptx --keep-cubin --dump-dir '{dump}' "
            f"--ptxas-options '-v' --remark-filter ptxas --remark-output '{report_path}'"
        )
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                host, arguments = build()
                compiled = cute.compile(host, *arguments, options=options)
        except Exception as error:
            raise CompileError(f"compiling {name} for {ARCH} failed: {error}\n{said.getvalue()}".rstrip()) from error
        if said.getvalue().strip():
            _LOG.debug("while compiling %s the DSL said:\n%s", name, said.getvalue())
        ptx, cubin = _artifact(compiled.__ptx__, str, name), _artifact(compiled.__cubin__, bytes, name)
        report = report_path.read_text() if report_path.exists() else ""
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if len(entries) != 1:
        raise CompileError(f"{name} must launch exactly one kernel, its PTX has {len(entries)}: {entries}")
    return CompiledKernel(name, entries[0], _with_portable_paths(ptx), cubin, parse_ptxas_report(report))


def _artifact(content: object, kind: type, name: str) -> Any:
    if not isinstance(content, kind) or not content:
        raise CompileError(f"the DSL kept no {'PTX' if kind is str else 'cubin'} of {name}")
    return content


def parse_ptxas_report(report: str) -> Resources:
    """Read the resources of one kernel out of the text that `ptxas -v` prints.

    Raises: CompileError when the text does not speak of exactly one kernel.
    """
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    used = re.findall(r"Used (\d+) registers([^\n]*)", report)
    if len(set(frames)) != 1 or len(set(used)) != 1:
        raise CompileError(f"expected the report of ptxas on one kernel, got: {report!r}")
    stack, stores, loads = (int(number) for number in frames[0])
    registers, rest = used[0]
    smem = re.search(r"(\d+) bytes smem", rest)
    return Resources(int(registers), stores, loads, stack, int(smem.group(1)) if smem else 0)


def _with_portable_paths(ptx: str) -> str:
    """Make the `.file` paths of this package and of the DSL relative, so that the text is the same everywhere."""
    import cutlass

    roots = (PACKAGE.parent, Path(str(cutlass.__file__)).resolve().parent.parent)

    def relative(match: re.Match[str]) -> str:
        path = Path(match.group(2))
        root = next((root for root in roots if path.is_relative_to(root)), None)
        return f'{match.group(1)}"{path.relative_to(root) if root else path}"'

    return re.sub(r'^(\s*\.file\s+\d+\s+)"([^"]*)"', relative, ptx, flags=re.MULTILINE)


def _load(folder: Path, name: str, key: str) -> CompiledKernel | None:
    try:
        facts = json.loads((folder / "kernel.json").read_text())
        ptx, cubin = (folder / "kernel.ptx").read_bytes(), (folder / "kernel.cubin").read_bytes()
        if facts["key"] != key or facts["sha256"] != [hashlib.sha256(part).hexdigest() for part in (ptx, cubin)]:
            return None
        return CompiledKernel(name, facts["entry"], ptx.decode(), cubin, Resources(**facts["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: it is compiled again


def _store(folder: Path, kernel: CompiledKernel, key: str) -> None:
    ptx = kernel.ptx.encode()
    facts = {
        "key": key,
        "entry": kernel.entry,
        "resources": asdict(kernel.resources),
        "sha256": [hashlib.sha256(part).hexdigest() for part in (ptx, kernel.cubin)],
    }
    with contextlib.suppress(OSError), _scratch_folder(folder) as scratch:
        (scratch / "kernel.ptx").write_bytes(ptx)
        (scratch / "kernel.cubin").write_bytes(kernel.cubin)
        (scratch / "kernel.json").write_text(json.dumps(facts, indent=1))
        if folder.exists() and _load(folder, kernel.name, key) is None:
            shutil.rmtree(folder)
        scratch.rename(folder)  # fails, harmlessly, where another process was faster


@contextlib.contextmanager
def _scratch_folder(folder: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
