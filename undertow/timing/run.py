"""Runs a recorded CTA on the C++ engine with a set of constants."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_double, c_int8, c_int32, c_uint64
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np

from undertow.emulator.compiled.build import built

from .constants import CONSTANTS, SM100, checked
from .errors import TimingError
from .trace import ENGINES, Trace
from .uops import Kind, Unit

SOURCES = Path(__file__).resolve().parent / "engine"
CLIENTS = ("mma", "load", "store", "tma", "bulk")
"""Who uses the shared-memory port, in the order of the engine's counts."""


class Reason(IntEnum):
    """Why a warp did not issue before it did. The order is that of the engine's enumeration."""

    NONE = 0
    SLOT = 1
    DATA = 2
    PIPE = 3
    QUEUE = 4
    MMA_QUEUE = 5
    MBARRIER = 6
    BARRIER = 7
    MMA = 8
    COPY = 9
    TMEM = 10
    FENCE = 11
    BRANCH = 12
    HOLD = 13
    STALL = 14


@dataclass(frozen=True)
class Run:
    """What the engine says of one run; times are cycles.

    issued, reason, cause: per instruction of the trace. operations: issued, begun, ended; issuer: the instruction
    that issued each. tokens: when each was complete, token_cause: by what. A cause is an instruction of the trace, or
    -2 - operation, or -1. grants: passes of the shared-memory port by client.
    """

    cycles: float
    issued: np.ndarray
    reason: np.ndarray
    cause: np.ndarray
    operations: np.ndarray
    issuer: np.ndarray
    tokens: np.ndarray
    token_cause: np.ndarray
    grants: dict[str, float]


def run(trace: Trace, constants: Mapping[str, float], seed: int = 0) -> Run:
    """Run the engine once. The same trace, constants and seed give the same run.

    Raises: ConstantError for constants that the trace's architecture lacks; TimingError where nothing can go on;
        CompilerMissing.
    """
    values = checked(constants, trace.arch)
    table = np.array([values.get(name, 0.0) for name in CONSTANTS])
    entries, operations, tokens = len(trace.uop), len(trace.operations), len(trace.tokens)
    issued, reason = np.zeros(entries), np.zeros(entries, np.int8)
    cause, times = np.full(entries, -1, np.int32), np.full((operations, 3), np.nan)
    issuer, token_at = np.full(operations, -1, np.int32), np.full(tokens, np.nan)
    token_cause, grants = np.full(tokens, -1, np.int32), np.zeros(len(CLIENTS))
    arrays = (
        trace.uops, trace.pool, trace.begins, trace.uop, trace.argument, trace.tokens, trace.operations, table
    )  # fmt: skip
    held = [np.ascontiguousarray(array) for array in arrays]
    pointers = [array.ctypes.data for array in held]
    results = [x.ctypes.data for x in (issued, reason, cause, times, token_at, token_cause, issuer, grants)]
    given = _Input(
        trace.num_warps, trace.num_registers, len(trace.uops), tokens, operations, int(trace.arch == SM100),
        *(ctypes.cast(p, kind) for p, kind in zip(pointers, _POINTERS[:8], strict=True)), seed,
        *(ctypes.cast(p, kind) for p, kind in zip(results, _POINTERS[8:], strict=True)),
    )  # fmt: skip
    cycles = _library()(ctypes.byref(given))
    if cycles < 0:
        raise TimingError(f"{trace.kernel}: the replay stands still: {_stuck(trace, issued)}")
    counted: dict[str, float] = dict(zip(CLIENTS, grants.tolist(), strict=True))
    return Run(cycles, issued, reason, cause, times, issuer, token_at, token_cause, counted)


def sources() -> dict[str, str]:
    """The engine's C++ by file name, with the header that names constants, kinds, units and engines."""
    found = {path.name: path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".hpp")}
    return found | {"names.hpp": _names()}


def _names() -> str:
    def enumeration(name: str, words: list[str]) -> str:
        return f"enum class {name} : int {{ {', '.join(words)} }};\n"

    return (
        "#pragma once\nnamespace timing {\n"
        + enumeration("Constant", list(CONSTANTS))
        + enumeration("Kind", [kind.name.lower() for kind in Kind])
        + enumeration("Unit", [unit.name.lower() for unit in Unit])
        + enumeration("Engine", list(ENGINES))
        + f"constexpr int NUM_UNITS = {len(Unit)};\n}}\n"
    )


_POINTERS = (
    *[POINTER(c_int32)] * 7, POINTER(c_double), POINTER(c_double), POINTER(c_int8), POINTER(c_int32), POINTER(c_double),
    POINTER(c_double), POINTER(c_int32), POINTER(c_int32), POINTER(c_double),
)  # fmt: skip


class _Input(Structure):
    """Mirrors `Input` of engine/model.hpp."""

    _fields_ = [
        *((name, c_int32) for name in ("num_warps", "num_registers", "num_uops", "num_tokens", "num_operations",
                                       "is_sm100")),
        *zip(("uops", "pool", "begins", "uop", "argument", "tokens", "operations", "constants"), _POINTERS[:8],
             strict=True),
        ("seed", c_uint64),
        *zip(("issued", "reason", "cause", "operation_times", "token_at", "token_cause", "issuer", "grants"),
             _POINTERS[8:], strict=True),
    ]  # fmt: skip


@cache
def _library():
    library = ctypes.CDLL(str(built("timing-engine", sources())))
    library.undertow_timing_replay.restype = c_double
    library.undertow_timing_replay.argtypes = [POINTER(_Input)]
    return library.undertow_timing_replay


def _stuck(trace: Trace, issued: np.ndarray) -> str:
    """The instruction at which each warp stands."""
    found = []
    for warp, role in enumerate(trace.roles):
        waiting = np.flatnonzero(issued[trace.stream(warp)] == 0)
        if len(waiting):
            entry = int(trace.begins[warp]) + int(waiting[0])
            argument = int(trace.argument[entry])
            kind = Kind(int(trace.uops[trace.uop[entry], 0]))
            on = trace.token_names[argument] if kind in (Kind.WAIT, Kind.BARRIER_SYNC) and argument >= 0 else argument
            found.append(f"{role} at {kind.name.lower()} {on}")
    return "; ".join(found)
