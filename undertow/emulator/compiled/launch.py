"""Run a decoded kernel on the compiled back end and report as the NumPy machine does."""

from __future__ import annotations

import ctypes
import time
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..description import Launch, Resolved, resolve
from ..errors import Deadlock, EmulatorError, LaunchError, MemoryFault, ProtocolError, UnsupportedPtx
from ..program import Program
from ..report import place, warp_reports
from ..semantics.mbarrier import parity_finding
from ..state import FULL_MASK, Wait, Warp
from ..tensor_map import TensorMapGeometry
from . import library
from .build import num_processors
from .encode import Encoded, Encoder
from .encode_machine import encode_machine
from .form_parts import ATOMIC_TYPES

if TYPE_CHECKING:
    from .. import Options, Result

_FAULTS = {1: MemoryFault, 2: ProtocolError, 3: Deadlock, 4: UnsupportedPtx, 5: LaunchError}
_WAIT_KINDS = ("", "mbarrier", "barrier", "bulk_group", "cp_async_group", "tmem_alloc", "wgmma_group")
_COMPLETIONS = {"eager": 0, "late": 1, "seeded": 2}
_NUM_BARRIERS = 17
_MAX_NOTES = 256


@dataclass(eq=False)
class _Loaded:
    """An encoded kernel inside the library, which forgets it when the Program goes."""

    handle: int
    encoded: Encoded
    is_ordered: bool


_LOADED: dict[tuple, _Loaded] = {}
"""Encoded kernels by the identity of their Program and the addresses of its variables."""


def run(program: Program, description: Launch, options: Options) -> Result:
    """Run a launch to its end.

    Raises: CompilerMissing if the back end cannot be built; else what `emulator.launch` raises.
    """
    from .. import Result

    compiled = library.load()
    resolved = resolve(program, description)
    loaded = _load_program(resolved)
    arguments, kept = _arguments(resolved, options, loaded.is_ordered)
    executions = np.zeros(len(program.code) + 1, np.int64)
    completions = np.zeros(_NUM_BARRIERS, np.int64)
    notes = np.zeros(2 * _MAX_NOTES, np.int64)
    max_blocked = 4096
    blocked = (library.Blocked * max_blocked)()
    outcome = library.Outcome(
        executions=executions.ctypes.data, completions=completions.ctypes.data, blocked=blocked,
        max_blocked=max_blocked, max_notes=_MAX_NOTES, notes=notes.ctypes.data,
    )  # fmt: skip
    start = time.perf_counter()
    compiled.undertow_run(loaded.handle, ctypes.byref(arguments), ctypes.byref(outcome))
    seconds = time.perf_counter() - start
    del kept
    if outcome.fault_kind:
        raise _error(resolved, loaded.encoded, outcome)
    barriers = {i: int(n) for i, n in enumerate(completions[:16]) if n}
    findings = _findings(program, notes[: 2 * outcome.num_notes].reshape(-1, 2))
    executions = executions[:-1]
    return Result(int(executions.sum()), executions, barriers, findings, seconds, "compiled")


def _load_program(resolved: Resolved) -> _Loaded:
    """Encode a kernel and hand it to the library, once per kernel and placement of its variables."""
    program = resolved.program
    key = (id(program), *sorted(resolved.variables.items()))
    loaded = _LOADED.get(key)
    if loaded is None:
        encoder = Encoder(program, library.machine_op, encode_machine, lambda name: _symbol_address(resolved, name))
        encoded = encoder.encode()
        arguments = library.ProgramArguments(
            code=encoded.code.ctypes.data, consts=encoded.constants.ctypes.data,
            lists=encoded.lists.ctypes.data, specials=encoded.specials.ctypes.data, num_code=len(encoded.code),
            consts_bytes=len(encoded.constants), num_lists=len(encoded.lists), num_specials=len(encoded.specials) // 2,
            regs_bytes=encoded.register_bytes, predicate_bytes=encoded.predicate_bytes,
            local_bytes=program.local_bytes, num_instructions=len(program.code) + 1,
        )  # fmt: skip
        handle = library.load().undertow_program(ctypes.byref(arguments))
        loaded = _LOADED[key] = _Loaded(handle, encoded, _is_ordered(program))
        weakref.finalize(program, _forget, key, handle)
    return loaded


def _forget(key: tuple, handle: int) -> None:
    _LOADED.pop(key, None)
    library.load().undertow_free_program(handle)


def _is_ordered(program: Program) -> bool:
    """Whether CTAs may talk to each other through global memory, so that they must run on one thread."""
    for decoded in program.code:
        mods = decoded.mods
        speaks = decoded.instruction.opcode in ("atom", "red") or mods.get("volatile") or mods.get("order")
        is_local = (mods.get("space") or "generic").startswith("shared")
        if speaks and not is_local and decoded.instruction.opcode in ("atom", "red", "ld", "st"):
            return True
    return False


def _symbol_address(resolved: Resolved, name: str) -> int:
    """Address of a variable or parameter within its state space."""
    program = resolved.program
    for table in (program.shared, program.local, resolved.variables):
        if name in table:
            return table[name]
    for parameter in program.kernel.parameters:
        if parameter.name == name:
            return parameter.offset
    raise UnsupportedPtx(f"address of {name}")


def _arguments(resolved: Resolved, options: Options, is_ordered: bool) -> tuple[library.LaunchArguments, Any]:
    """Build the C structures; the second value keeps alive what they point to."""
    regions = resolved.memory.regions
    labels = [region.label.encode() for region in regions]
    buffers = (library.BufferArguments * max(len(regions), 1))()
    for place_, (region, label) in enumerate(zip(regions, labels, strict=True)):
        buffers[place_] = library.BufferArguments(
            region.base, region.num_bytes, region.pointer, int(region.writable), label
        )
    maps = (library.MapArguments * max(len(resolved.tensor_maps), 1))()
    for place_, (offset, geometry) in enumerate(resolved.tensor_maps.items()):
        maps[place_] = _map_arguments(offset, geometry)
    order = np.array([n for cluster in resolved.clusters(options.cta_order) for n in cluster], np.int32)
    completion, completion_seed = (
        options.completion if isinstance(options.completion, tuple) else (options.completion, 0)
    )
    is_random = options.schedule != "fixed"
    threads = 1 if is_ordered or resolved.cluster != (1, 1, 1) else num_processors()
    arguments = library.LaunchArguments(
        grid=resolved.grid, block=resolved.block, cluster=resolved.cluster, dynamic_smem=resolved.launch.dynamic_smem,
        shared_base=resolved.shared_base, shared_size=resolved.shared_size,
        parameters=resolved.parameters.ctypes.data, buffers=buffers, maps=maps, cta_order=order.ctypes.data,
        parameter_bytes=resolved.program.kernel.parameter_bytes, num_buffers=len(regions),
        num_maps=len(resolved.tensor_maps), num_ctas=len(order), completion=_COMPLETIONS[completion],
        random_schedule=int(is_random), threads=threads, completion_seed=completion_seed,
        schedule_seed=int(options.schedule) if is_random else 0,
    )  # fmt: skip
    return arguments, (buffers, maps, order, labels)


def _map_arguments(offset: int, geometry: TensorMapGeometry) -> library.MapArguments:
    rank = len(geometry.dims)

    def padded(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values, *(1,) * (5 - len(values)))

    reducible = geometry.dtype not in ("tf32", "u8", "u16")
    return library.MapArguments(
        place=offset, address=geometry.base, dims=padded(geometry.dims),
        strides=padded((geometry.element, *geometry.strides)), box=padded(geometry.box), rank=rank,
        element_bytes=geometry.element, swizzle=geometry.swizzle,
        type=ATOMIC_TYPES[geometry.dtype] if reducible else -1, fill_nan=int(geometry.fill_nan),
    )  # fmt: skip


def _findings(program: Program, notes: np.ndarray) -> list:
    found = {}
    for index, parity in notes.tolist():
        finding = parity_finding(parity)
        found.setdefault(
            index, type(finding)(finding.rule, finding.message, program.where(index), finding.other, finding.hint)
        )
    return list(found.values())


def _error(resolved: Resolved, encoded: Encoded, outcome: library.Outcome) -> EmulatorError:
    """Turn a fault into the error that the NumPy machine would raise."""
    machine = SimpleNamespace(launch=resolved.launch, program=resolved.program)
    kind, fact = _FAULTS[outcome.fault_kind], outcome.fact.decode()
    if kind is Deadlock:
        return _deadlock(resolved, encoded, outcome, machine, fact)
    lanes: Any = SimpleNamespace(
        cta=SimpleNamespace(position=resolved.position(outcome.cta)), warps=[outcome.warp], masks=[outcome.mask],
        full=outcome.mask == FULL_MASK,
    )  # fmt: skip
    where = place(machine, lanes, int(encoded.instruction_of[outcome.code]))
    return kind(fact, outcome.rule.decode()).at(where + (", when it completed" if outcome.is_completion else ""))


def _deadlock(resolved: Resolved, encoded: Encoded, outcome, machine: Any, fact: str) -> EmulatorError:
    warps: dict[tuple[int, int], Warp] = {}
    for blocked in outcome.blocked[: outcome.num_blocked]:
        key = (blocked.cta, blocked.warp)
        if key not in warps:
            warps[key] = Warp(blocked.warp, 0)
            warps[key].groups.clear()
        index = int(encoded.instruction_of[blocked.code])
        warps[key].groups[index] = blocked.mask
        if blocked.kind:
            detail = blocked.detail.decode()
            warps[key].waits[index] = Wait(_WAIT_KINDS[blocked.kind], blocked.subject, detail, lambda: False)
    ctas = list(dict.fromkeys(cta for cta, _ in warps))
    entries = []
    for cta in ctas:
        members: Any = SimpleNamespace(warps=[w for (c, _), w in warps.items() if c == cta])
        entries += warp_reports(machine, members)
    where = ", ".join(f"CTA {resolved.position(c)}" for c in ctas[:4]) + (" ..." if len(ctas) > 4 else "")
    table = "\n".join(f"    {entry}" for entry in entries)
    return Deadlock(f"{fact}\n{table}", entries).at(f"{resolved.program.name}, {where}")
