"""Compile variants ahead of time, in a child process that may hang or crash without taking anybody along."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from undertow.runtime import objects
from undertow.runtime.architectures import Architecture

SECONDS = 300.0  # a variant takes 2 to 5 on an idle core
START_SECONDS = 120.0  # of the child, which imports the compiler
_READY = "ready"


@dataclass(frozen=True)
class Made:
    """What became of one variant. complaint: why there is no object, or None. folder: of the cache entry."""

    variant: Any
    seconds: float
    folder: Path | None = None
    num_bytes: int = 0
    complaint: str | None = None


def compile_ahead(arch: Architecture, variants: Sequence[Any], seconds: float = SECONDS) -> Iterator[Made]:
    """Have the objects of all variants on disk; yields each as it is done, in order.

    A variant that takes longer than `seconds`, or takes the child down, has a complaint; the next ones get a new child.
    """
    left = list(variants)
    while left:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        # spawn: a fork would copy the locks of threads that run here
        child = multiprocessing.get_context("spawn").Process(
            target=_compile_all, args=(arch, left, theirs), daemon=True
        )
        child.start()
        theirs.close()
        try:
            for made in _received(ours, left, seconds):
                del left[0]
                yield made
        finally:
            child.kill()
            child.join()
            ours.close()


def _received(ours: Connection, variants: Sequence[Any], seconds: float) -> Iterator[Made]:
    """What the child says, up to its first silence. It is ready first, or says why it never will be."""
    begin = time.perf_counter()
    said = _answer(ours, START_SECONDS, "the compiler was not ready")
    for variant in list(variants):
        if said == _READY:
            begin = time.perf_counter()
            said = _answer(ours, seconds, "not compiled")
        if not isinstance(said, Made):
            yield Made(variant, time.perf_counter() - begin, complaint=said)
            return
        yield said
        said = _READY


def _answer(ours: Connection, seconds: float, late: str) -> Any:
    try:
        return ours.recv() if ours.poll(seconds) else f"{late} within {seconds:g} s"
    except EOFError:
        return "the compiler took its process down"


def _compile_all(arch: Architecture, variants: Sequence[Any], theirs: Connection) -> None:
    try:
        if not all(objects.is_compiled(arch, variant) for variant in variants):
            importlib.import_module("cutlass.cute")
    except Exception as error:
        theirs.send(f"{type(error).__name__}: {error}")
        return
    theirs.send(_READY)
    for variant in variants:
        begin = time.perf_counter()
        try:
            entry = objects.precompile(arch, variant)
            num_bytes = sum(map(len, entry.files.values()))
            theirs.send(Made(variant, time.perf_counter() - begin, entry.folder, num_bytes))
        except Exception as error:
            theirs.send(Made(variant, time.perf_counter() - begin, complaint=f"{type(error).__name__}: {error}"))
