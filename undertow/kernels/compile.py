"""Compile kernels on any machine, and whole calls to objects: no GPU, no CUDA driver, no CUDA toolkit.

The DSL lowers to PTX and assembles with the ptxas inside its own wheel, so its documented options suffice: keep the
PTX and the cubin, let the remark file carry ptxas's verbose report. Every compilation gets a dump folder of its own,
because kernel names are not unique across configurations. Results are kept on disk (`undertow.cache`) under a hash of
everything that can change them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import json
import logging
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from undertow import cache
from undertow.kernels.fences import unawaited
from undertow.kernels.sass import SassError

ARCH = "sm_100a"  # what kernels are compiled for if nobody says
PACKAGE = Path(__file__).resolve().parent.parent
_KEY_FOLDERS = ("kernels", "plan")  # a change of any source file in them invalidates every cached kernel
COMPILER = "nvidia-cutlass-dsl"
BAD_RELEASES = {  # release: what it does; refused by name
    "4.6.0": "backward passes at head dim 64 never return with it (flash-attention issue 2797)",
    "4.6.1": "backward passes at head dim 64 never return with it (flash-attention issue 2797)",
}
OBJECT, OBJECT_PTX, FUNCTION = "call.o", "call.ptx", "backward_pass"  # of an entry of `compile_object`
_LOG = logging.getLogger(__name__)
_ONE_COMPILATION = threading.Lock()  # the DSL keeps tracing state in globals

Build = Callable[[], tuple[Any, tuple[Any, ...]]]


class CompileError(ValueError):
    """The kernel could not be compiled; the message says where the compiler stopped."""


class MachineCodeError(CompileError):
    """The compiler made machine code that could give wrong results; the message says where, and what to do."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel. Units: registers per thread; the rest in bytes per thread, smem per CTA."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem: int
    warnings: tuple[str, ...] = ()  # codes of what ptxas says about wgmma, such as C7512: instructions are serialized


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel: `name` is ours, `entry` is its PTX entry; `.file` paths in `ptx` do not depend on the machine."""

    name: str
    entry: str
    ptx: str
    cubin: bytes
    resources: Resources


def compile_kernel(name: str, config: object, build: Build, target: str = ARCH, events: bool = False) -> CompiledKernel:
    """Return the compiled kernel, from the disk cache where possible.

    Args:
        name: short name for messages and for the cache folder.
        config: everything that `build` depends on besides the sources of this package; its repr is part of the key.
        build: called on a cache miss only, returns a `cute.jit` host function that launches exactly one kernel,
            and its arguments (fake tensors). It may import the DSL: a cache hit does not.
        target: architecture to compile for, such as sm_100a.
        events: keep the spans of `kernels.events`, for a tracer.
    Raises:
        CompileError: the DSL or ptxas refuses the kernel, or `build` launches a number of kernels other than one.
        CacheError: no folder can be written.
    """
    refuse_bad_toolchain()
    key = _key(name, config, build, (target, *_events(events)))
    files = cache.fetch(name, key, lambda: _files_of(_compile(name, target, build, events))).files
    facts = json.loads(files["kernel.json"])
    ptx, cubin = files["kernel.ptx"].decode(), files["kernel.cubin"]
    resources = {**facts["resources"], "warnings": tuple(facts["resources"]["warnings"])}
    return CompiledKernel(name, facts["entry"], ptx, cubin, Resources(**resources))


def _files_of(kernel: CompiledKernel) -> cache.Files:
    facts = {"entry": kernel.entry, "resources": asdict(kernel.resources)}
    return {
        "kernel.json": json.dumps(facts, indent=1).encode(),
        "kernel.ptx": kernel.ptx.encode(),
        "kernel.cubin": kernel.cubin,
    }


def object_key(name: str, target: str, config: object, build: Build, events: bool = False) -> str:
    """The cache key of what `compile_object` makes of the same arguments."""
    ffi = toolchain_version("apache-tvm-ffi")
    return _key(name, config, build, (target, "object", ffi, platform.machine(), *_events(events)))


def compile_object(name: str, target: str, config: object, build: Build, events: bool = False) -> cache.Entry:
    """Return the object file of a host function and its kernels, from the disk cache where possible.

    The entry's files are `OBJECT`, which offers the tvm-ffi function `FUNCTION`, and `OBJECT_PTX`, the kernels in it.

    Args:
        name, config, build: as for `compile_kernel`, but the host function may launch any number of kernels.
        target: architecture to compile for, such as sm_100a.
        events: keep the spans of `kernels.events`, for a tracer.
    Raises:
        CompileError: the DSL or ptxas refuses a kernel, or the toolchain is known to be bad.
        MachineCodeError: what they made does not await a fence, or cannot be judged; it is not kept.
        CacheError: no folder can be written.
    """
    refuse_bad_toolchain()
    key = object_key(name, target, config, build, events)
    return cache.fetch(name, key, lambda: _object_files(name, target, build, events))


def _events(events: bool) -> tuple[str, ...]:
    """The compiler's option that keeps them: without it, and it is not there by default, they leave no instruction."""
    return ("iket",) if events else ()


def _object_files(name: str, target: str, build: Build, events: bool) -> cache.Files:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"undertow-{name}-") as dump:
        options = f"--enable-tvm-ffi --gpu-arch {target} --generate-line-info --keep-ptx --dump-dir '{dump}'"
        compiled = _traced(name, target, build, " ".join((options, *_events(events))))
        ptx, path = _artifact(compiled.__ptx__, str, name), Path(dump) / OBJECT
        compiled.export_to_c(object_file_path=str(path), function_name=FUNCTION)
        files = {OBJECT: path.read_bytes(), OBJECT_PTX: _with_portable_paths(ptx).encode()}
    refuse_unawaited(name, target, files[OBJECT])
    _LOG.info("compiled %s for %s in %.1f s", name, target, time.perf_counter() - begin)
    return files


def refuse_bad_toolchain() -> None:
    """Refuse releases of the compiler with which backward passes never return, before they are tried.

    Raises: CompileError naming the release.
    """
    version = toolchain_version(COMPILER)
    if version in BAD_RELEASES:
        raise CompileError(f"{COMPILER} {version} is installed: {BAD_RELEASES[version]}; install another release")


def refuse_unawaited(name: str, target: str, content: bytes) -> None:
    """Refuse an object whose machine code lets others go on before a fence is complete (`kernels.fences`).

    Raises: MachineCodeError naming kernel, addresses and compiler; also where the code cannot be followed.
    """
    try:
        found = [str(one) for one in unawaited(content)]
    except SassError as error:
        found = [f"it cannot be judged: {error}"]
    if found:
        raise MachineCodeError(
            f"the machine code of {name} for {target} is refused: {'; '.join(found)}. {_maker(content)} made it: "
            "install another release of it, or its other flavour (CUDA 12 or 13), or use objects that another one has "
            "compiled (`undertow precompile --output DIR` elsewhere, UNDERTOW_CACHE_DIR=DIR here)"
        )


def _maker(content: bytes) -> str:
    """The compiler's release, and that of its ptxas where cubins tell (they do since CUDA 13)."""
    told = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", content)
    return f"{COMPILER} {toolchain_version(COMPILER)}" + (f" with ptxas {told.group(1).decode()}" if told else "")


def toolchain_version(package: str) -> str:
    """The installed release of a package.

    Raises: CompileError if there is none.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise CompileError(f"compiling needs the package {package}, which is not installed") from error


def _key(name: str, config: object, build: Build, more: tuple[str, ...] = (ARCH,)) -> str:
    described = repr(config)
    assert " at 0x" not in described, f"the repr of config holds a memory address, so it is no key: {described}"
    environment = sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_"))
    own_source = Path(build.__code__.co_filename) if hasattr(build, "__code__") else None
    own = [] if own_source is None or not own_source.is_file() else [(own_source.name, own_source)]
    parts = (name, described, toolchain_version(COMPILER), repr(environment), *more, _digest_of_sources(PACKAGE))
    return cache.key_of(parts, own)


@functools.cache  # this process has imported them once; reading them again takes longer than fetching a kernel
def _digest_of_sources(package: Path) -> str:
    """Of the sources that make kernels."""
    paths = [path for folder in _KEY_FOLDERS for path in sorted((package / folder).rglob("*.py"))]
    return cache.key_of((), [(str(path.relative_to(package)), path) for path in paths])


def _compile(name: str, target: str, build: Build, events: bool) -> CompiledKernel:
    with tempfile.TemporaryDirectory(prefix=f"undertow-{name}-") as dump:
        report_path = Path(dump) / "ptxas.yaml"
        options = (
            f"--gpu-arch {target} --generate-line-info --keep-ptx --keep-cubin --dump-dir '{dump}' "
            f"--ptxas-options '-v' --remark-filter ptxas --remark-output '{report_path}'"
        )
        compiled = _traced(name, target, build, " ".join((options, *_events(events))))
        ptx, cubin = _artifact(compiled.__ptx__, str, name), _artifact(compiled.__cubin__, bytes, name)
        report = report_path.read_text() if report_path.exists() else ""
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if len(entries) != 1:
        raise CompileError(f"{name} must launch exactly one kernel, its PTX has {len(entries)}: {entries}")
    return CompiledKernel(name, entries[0], _with_portable_paths(ptx), cubin, parse_ptxas_report(report))


def _traced(name: str, target: str, build: Build, options: str) -> Any:
    """What the DSL makes of a host function; its chatter is logged."""
    try:
        import cutlass.cute as cute
    except ImportError as error:
        raise CompileError(
            f"compiling {name} needs the package {COMPILER}, which cannot be imported: {error}"
        ) from error
    said = io.StringIO()
    try:
        with _ONE_COMPILATION, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            host, arguments = build()
            compiled = cute.compile(host, *arguments, options=options)
    except Exception as error:
        raise CompileError(f"compiling {name} for {target} failed: {error}\n{said.getvalue()}".rstrip()) from error
    if said.getvalue().strip():
        _LOG.debug("while compiling %s the DSL said:\n%s", name, said.getvalue())
    return compiled


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
    warnings = tuple(sorted(set(re.findall(r"\((C75\d\d)\)", report))))
    return Resources(int(registers), stores, loads, stack, int(smem.group(1)) if smem else 0, warnings)


def _with_portable_paths(ptx: str) -> str:
    """Make the `.file` paths of this package and of the DSL relative, so that the text is the same everywhere."""
    import cutlass

    roots = (PACKAGE.parent, Path(str(cutlass.__file__)).resolve().parent.parent)

    def relative(match: re.Match[str]) -> str:
        path = Path(match.group(2))
        root = next((root for root in roots if path.is_relative_to(root)), None)
        return f'{match.group(1)}"{path.relative_to(root) if root else path}"'

    return re.sub(r'^(\s*\.file\s+\d+\s+)"([^"]*)"', relative, ptx, flags=re.MULTILINE)
