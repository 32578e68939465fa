"""Compiled calls of this process: each variant comes from disk, or else from the compiler, and is loaded once."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undertow import cache
from undertow.kernels.compile import FUNCTION, OBJECT, CompileError, MachineCodeError, compile_object, object_key
from undertow.runtime import apart
from undertow.runtime.architectures import Architecture

_LOG = logging.getLogger(__name__)
_loaded: dict[tuple[str, Any], Loaded] = {}
_refused: dict[tuple[str, Any], str] = {}  # what the compiler made of them is not used: it is not asked again
_loading = threading.RLock()  # one thread compiles and loads; the threads of autograd come here all at once


@dataclass(frozen=True)
class Loaded:
    """function: the compiled call. launched_on: indices of devices that have its kernels in memory."""

    function: Callable[..., None]
    launched_on: set[int] = field(default_factory=set)


def load(architecture: Architecture, variant: Any) -> Loaded:
    """Return the compiled call of a variant, from memory, from disk, or from the compiler.

    Raises: CompileError, CacheError.
    """
    found = _loaded.get((architecture.name, variant))
    if found is None:
        with _loading:
            found = _loaded.get((architecture.name, variant))
            if found is None:
                found = Loaded(_function(architecture, variant))
                _loaded[(architecture.name, variant)] = found
    return found


def is_loaded(architecture: Architecture, variant: Any) -> bool:
    """Whether `load` would answer from memory."""
    return (architecture.name, variant) in _loaded


def is_compiled(architecture: Architecture, variant: Any) -> bool:
    """Whether `load` would answer without the compiler."""
    return is_loaded(architecture, variant) or cached(architecture, variant) is not None


def cached(architecture: Architecture, variant: Any) -> cache.Entry | None:
    """The object of a variant if it is on disk."""
    name = _name(architecture, variant)
    about = _about(architecture, variant)
    return cache.look_up(name, object_key(name, architecture.target, *about))


def refusal(architecture: Architecture, variant: Any) -> str | None:
    """Why this process does not use what the compiler makes of a variant, or None: as far as it has tried."""
    return _refused.get((architecture.name, variant))


def precompile(architecture: Architecture, variant: Any) -> cache.Entry:
    """Have the object of a variant on disk; it is not loaded.

    Raises: CompileError, of which MachineCodeError at once if it was raised before; CacheError.
    """
    if refused := refusal(architecture, variant):
        raise MachineCodeError(refused)
    try:
        if apart.is_patched() and not is_compiled(architecture, variant):
            return apart.precompile_apart(architecture, variant)
        name = _name(architecture, variant)
        about = _about(architecture, variant)
        return compile_object(name, architecture.target, *about)
    except MachineCodeError as error:
        _refused[architecture.name, variant] = str(error)
        raise


def forget() -> None:
    """Let every variant be loaded anew, as in a fresh process."""
    with _loading:
        _loaded.clear()
        _refused.clear()


def _name(architecture: Architecture, variant: Any) -> str:
    return f"{architecture.target}-{variant.name}"


def _about(architecture: Architecture, variant: Any) -> tuple[Any, Callable[[], Any], bool]:
    """What `compile_object` is told besides name and target. Kernels without spans have variants without that field."""
    return (architecture.kernels, variant), _build(architecture, variant), getattr(variant, "events", False)


def _build(architecture: Architecture, variant: Any) -> Callable[[], Any]:
    return lambda: architecture.build(variant)


def _function(architecture: Architecture, variant: Any) -> Callable[..., None]:
    entry = precompile(architecture, variant)
    try:
        return _function_of(entry)
    except Exception as error:  # its bytes are as they were written, and yet it does not load here
        name = _name(architecture, variant)
        _LOG.warning("the cached object of %s does not load (%s): compiling it again", name, error)
        cache.discard(entry)
    entry = precompile(architecture, variant)
    try:
        return _function_of(entry)
    except Exception as error:
        raise CompileError(f"the object of {_name(architecture, variant)} does not load: {error}") from error


def _function_of(entry: cache.Entry) -> Callable[..., None]:
    if entry.folder is not None:
        return load_object(entry.folder / OBJECT)
    with tempfile.TemporaryDirectory(prefix="undertow-object-") as folder:  # the disk could not keep it
        path = Path(folder) / OBJECT
        path.write_bytes(entry.files[OBJECT])
        return load_object(path)


def load_object(path: Path) -> Callable[..., None]:
    """Return the function of an object file; neither a driver nor a GPU is needed yet."""
    import cutlass.cute as cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), FUNCTION)
