"""One CTA as the engine replays it: what each warp issues in order, what it waits for, and the engines' operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from undertow import emulator
from undertow.cases import Kernel, fresh
from undertow.emulator.program import Program
from undertow.plan.description import Launch

from .constants import checked
from .errors import TimingError
from .lower import Lowering, Node
from .naming import Namer
from .observer import Operation, Recorder, Token
from .order import scheduled
from .regions import expanded
from .uops import Form, Kind, Unit

MMA_DEPTH = 16  # k of one 16-bit MMA instruction
ELEMENT_BYTES = 2
WGMMA_ROWS = 64
WARPGROUP_WARPS = 4
MBARRIER_BYTES = 8
ENGINES = ("wgmma", "tensor", "commit", "tensor_load", "bulk_load", "bulk_reduce", "bulk_store", "cp_async")
"""Engines of operations, in the order of the engine's enumeration."""
UOP_COLUMNS = ("kind", "unit", "issues", "amount", "read_begin", "read_end", "write_begin", "write_end")
OPERATION_COLUMNS = ("engine", "warp", "multiply_adds", "bytes", "a_elsewhere", "token", "gemm")


@dataclass(frozen=True)
class Trace:
    """A recorded CTA. Arrays are int32.

    uops: a row of UOP_COLUMNS for each instruction as it issues; pool: its registers. begins: where each warp's stream
    begins in uop, argument and place. argument: passes, bytes, token or operation, -1 for none. place: PTX index.
    tokens: arrivals that complete each. operations: rows of OPERATION_COLUMNS. gemms: names; their MMAs say which.
    tile_tokens: what the consumer of the query tiles waits for, in order. segment: straight piece of each.
    assumptions: what was taken for granted about control flow that depends on time.
    """

    kernel: str
    arch: str
    roles: tuple[str, ...]
    num_registers: int
    uops: np.ndarray
    pool: np.ndarray
    begins: np.ndarray
    uop: np.ndarray
    argument: np.ndarray
    place: np.ndarray
    tokens: np.ndarray
    operations: np.ndarray
    gemms: tuple[str, ...]
    token_names: tuple[str, ...]
    tile_tokens: tuple[int, ...]
    segment: np.ndarray
    assumptions: tuple[str, ...] = ()

    @property
    def num_warps(self) -> int:
        return len(self.roles)

    def stream(self, warp: int) -> slice:
        """Where a warp's instructions are."""
        return slice(int(self.begins[warp]), int(self.begins[warp + 1]))


def record(kernel: Kernel, point: Mapping[str, float], cta: int = 0, labels: Any = None) -> Trace:
    """Execute one CTA of a launch on the NumPy emulator and lower what it executes.

    Args:
        kernel: the launch; copies of its arrays are written.
        point: constants at their best guesses (Chip.point()), with whose latencies instructions are put in order.
        cta: linear number of the CTA (x fastest). The others do not run.
        labels: names of warps, shared memory and barriers; those of the launch by default.

    Raises: TimingError for control flow that depends on time (turns on global memory, an answer of try_wait used for
        anything but asking again) and for clusters; Deadlock and whatever else the emulator raises. Work that a CTA
        claims by an atomic addition is recorded as it is claimed here, which the trace says.
    """
    (copy,) = fresh((kernel,))
    program = copy.program()
    arch = architecture(program)
    constants = checked(point, arch)
    lowering = Lowering(program)
    recorder = Recorder()
    emulator.launch(program, copy.launch, emulator.Options(cta_order=[cta]), [recorder])
    return _Builder(program, copy.launch, lowering, recorder, constants, labels).trace(kernel.name, arch)


def architecture(program: Program) -> str:
    """The architecture that a kernel was compiled for, such as sm_90a."""
    return program.module.target[0]


class _Builder:
    """Turns a recording into arrays."""

    def __init__(
        self, program: Program, launch: Launch, lowering: Lowering, recorder: Recorder, constants: Mapping[str, float],
        labels: Any,
    ):  # fmt: skip
        self.program, self.lowering, self.recorder = program, lowering, recorder
        self.constants = constants
        self.namer = Namer(program, launch, labels)
        self.rows: list[tuple[int, ...]] = []
        self.pool: list[int] = []
        self._uop_of: dict[tuple, int] = {}
        self._pieces: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._piece_number: dict[tuple[int, int], int] = {}

    def trace(self, name: str, arch: str) -> Trace:
        """Build the trace."""
        recorder = self.recorder
        streams = [self._stream(warp) for warp in range(len(recorder.streams))]
        lengths = [len(uop) for uop, *_ in streams]
        uop, argument, place, segment = (np.concatenate(part).astype(np.int32) for part in zip(*streams, strict=True))
        gemm_names = self.namer.gemms(recorder.operations)
        names = tuple(dict.fromkeys(gemm_names))
        return Trace(
            name, arch, tuple(self._row_name(w, stream[0]) for w, stream in enumerate(streams)),
            len(self.lowering.registers),
            np.array(self.rows, np.int32).reshape(-1, len(UOP_COLUMNS)), np.array(self.pool, np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), uop, argument, place,
            np.array([token.needed for token in recorder.tokens], np.int32),
            np.array([self._operation(o, names.index(g)) for o, g in zip(recorder.operations, gemm_names, strict=True)],
                     np.int32).reshape(-1, len(OPERATION_COLUMNS)),
            names, tuple(self.namer.token(token) for token in recorder.tokens),
            tile_tokens(recorder.operations, recorder.tokens), segment, tuple(recorder.assumptions),
        )  # fmt: skip

    def _operation(self, operation: Operation, gemm: int) -> tuple[int, ...]:
        if operation.engine == "wgmma":
            m, n, elsewhere = WGMMA_ROWS, operation.shape.n, int(operation.shape.a_in_registers)
        elif operation.engine == "tensor":
            m, n = operation.shape.m, operation.shape.n
            elsewhere = int("[a]" in self.program.code[self._place(operation)].row.syntax)
        else:
            m = n = elsewhere = 0
        work = m * n * MMA_DEPTH
        bytes_ = (n + (0 if elsewhere else m)) * MMA_DEPTH * ELEMENT_BYTES if work else operation.bytes
        return (ENGINES.index(operation.engine), operation.warp, work, bytes_, elsewhere, operation.token, gemm)

    def _place(self, operation: Operation) -> int:
        return self.recorder.streams[operation.warp][operation.place]

    def _stream(self, warp: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """uop, argument, PTX index and piece of every instruction that a warp issues."""
        regions = self.lowering.regions
        executed, origin = expanded(np.array(self.recorder.streams[warp], np.int64), regions.converted)
        index = np.where(executed < 0, ~executed, executed)
        facts = np.append(self._arguments(warp, len(self.recorder.streams[warp])), -1)
        cuts = np.flatnonzero((np.diff(index) != 1) | regions.leaders[index[1:]]) + 1
        empty = np.zeros(0, np.int32)
        uops, positions, pieces = [], [], []
        for begin, end in pairwise([0, *cuts.tolist(), len(index)]):
            if begin == end:
                continue
            key = (int(index[begin]), int(index[end - 1]) + 1)
            if key not in self._pieces:
                self._piece_number[key] = len(self._pieces)
                self._pieces[key] = self._piece(*key)
            uop, offset = self._pieces[key]
            uops.append(uop)
            positions.append(offset + begin)
            pieces.append(np.full(len(uop), self._piece_number[key]))
        if not uops:
            return empty, empty, empty, empty
        uop, position = np.concatenate(uops), np.concatenate(positions)
        argument = self._answered(facts[origin], index)[position]
        self._branches(uop, position, index, argument)
        idle = executed[position] < 0
        if idle.any():
            uop[idle] = [self._idle(int(i)) for i in uop[idle]]
            argument[idle] = -1
        return uop, argument, index[position], np.concatenate(pieces)

    def _answered(self, facts: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The facts of a stream, those of a try_wait also at the branch on its answer, where the warp waits."""
        kinds = np.array([-1 if node is None else node.form.kind for node in self.lowering.nodes])[index]
        places = np.arange(len(index))
        asked = np.maximum.accumulate(np.where(kinds == Kind.ASK, places, 0))
        return np.where(kinds == Kind.WAIT, facts[asked], facts)

    def _branches(self, uop: np.ndarray, position: np.ndarray, index: np.ndarray, argument: np.ndarray) -> None:
        """A branch's argument is 1 where it is taken."""
        branch = np.array([self.rows[i][0] == Kind.BRANCH for i in range(len(self.rows))])[uop]
        following = np.append(index[1:], index[-1] + 1)
        argument[branch] = (following != index + 1)[position[branch]]

    def _arguments(self, warp: int, length: int) -> np.ndarray:
        """The one number that the engine needs of each executed instruction."""
        facts = np.full(length, -1, np.int64)
        for place, kind, number in self.recorder.facts[warp]:
            code = self.program.code[self._index(warp, place)]
            if kind in ("passes", "bytes") and facts[place] >= 0:
                facts[place] += number
                continue
            if kind == "passes" and code.row.effects and self._kind(code.index) not in (Kind.LOAD, Kind.STORE):
                continue
            if kind == "mma":
                number = self.recorder.mma_of(warp // WARPGROUP_WARPS, number)
            elif kind == "need" and self._kind(code.index) is Kind.WGMMA_WAIT:
                number = self.recorder.mma_of(warp // WARPGROUP_WARPS, number) if number else -1
            if facts[place] >= 0:
                raise TimingError(f"an instruction that does two things, {self.program.where(code.index)}")
            facts[place] = number
        return facts

    def _index(self, warp: int, place: int) -> int:
        index = self.recorder.streams[warp][place]
        return ~index if index < 0 else index

    def _kind(self, index: int) -> Kind | None:
        node = self.lowering.nodes[index]
        return None if node is None else node.form.kind

    def _piece(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """uop and offset from the beginning, of the instructions [begin, end) in the order in which they issue."""
        nodes = [node for node in self.lowering.nodes[begin:end] if node is not None]
        uops, offsets = [], []
        for node in scheduled(nodes, self.constants):
            uops.append(self._uop(node))
            offsets.append(node.place - begin)
        return np.array(uops, np.int64), np.array(offsets, np.int64)

    def _uop(self, node: Node) -> int:
        key = (node.place, node.form)
        if key not in self._uop_of:
            numbers = self.lowering.registers
            reads, writes = [numbers[n] for n in node.reads], [numbers[n] for n in node.writes]
            self._uop_of[key] = self._row(node.form, self._amount(node), reads, writes)
        return self._uop_of[key]

    def _row(self, form: Form, amount: int, reads: list[int], writes: list[int]) -> int:
        begin = len(self.pool)
        self.pool += reads + writes
        middle = begin + len(reads)
        self.rows.append((form.kind, form.unit, form.issues, amount, begin, middle, middle, middle + len(writes)))
        return len(self.rows) - 1

    def _idle(self, uop: int) -> int:
        """The same instruction where its guard is false: it issues, and nothing else."""
        key = ("idle", uop)
        if key not in self._uop_of:
            *_, read_begin, read_end, _, _ = self.rows[uop]
            self.rows.append((Kind.SKIP, Unit.NONE, 1, 0, read_begin, read_end, read_end, read_end))
            self._uop_of[key] = len(self.rows) - 1
        return self._uop_of[key]

    def _amount(self, node: Node) -> int:
        """32-bit registers of a load or tensor-memory access; 1 for a global load, a wait for reads only."""
        kind, decoded = node.form.kind, self.program.code[node.place]
        if kind is Kind.LOAD:
            slots = self.program.slots
            return sum(max(1, int(slots[n].file) // 32) for n in node.writes if slots[n].file.isdigit())
        if kind is Kind.TMEM_LOAD:
            return len(node.writes)
        if kind is Kind.TMEM_STORE:
            return int(decoded.instruction.mnemonic.partition(".x")[2].partition(".")[0] or 1)
        if kind is Kind.COPY_WAIT:
            return int(".read" in decoded.instruction.mnemonic)
        return int(kind is Kind.GLOBAL and bool(node.writes))

    def _row_name(self, warp: int, uop: np.ndarray) -> str:
        """A warp's row; where nobody named its role, it is called after what it does."""
        name = self.namer.role(warp)
        if name != f"warp {warp}":
            return name
        kinds = {self.rows[i][0] for i in set(uop.tolist())}
        units = {self.rows[i][1] for i in set(uop.tolist()) if self.rows[i][0] == Kind.ARITHMETIC}
        engines = {o.engine for o in self.recorder.operations if o.warp == warp}
        if Unit.MUFU in units and kinds & {Kind.LOAD, Kind.STORE, Kind.WGMMA}:
            role = "compute"
        elif kinds & {Kind.MMA, Kind.WGMMA}:
            role = "mma"
        elif "bulk_reduce" in engines or Kind.TMEM_LOAD in kinds:
            role = "reduce"
        else:
            role = "load" if engines else "other"
        return f"{role} {name}"


def tile_tokens(operations: list[Operation], tokens: list[Token]) -> tuple[int, ...]:
    """Phases that hand over one query tile after another, in that order.

    They are those of the copies' mbarriers that complete most often; neighbouring ones that complete equally often are
    the stages of one pipeline. Of several such pipelines the one that is filled first counts.
    """
    filled: dict[int, list[int]] = {}
    for load in operations:
        if load.engine in ("tensor_load", "bulk_load") and load.token >= 0:
            found = filled.setdefault(tokens[load.token].place, [])
            if load.token not in found[-1:]:
                found.append(load.token)
    pipelines: list[list[int]] = []
    for place in sorted(filled):
        last = pipelines[-1][-1] if pipelines else None
        if last is not None and place - last == MBARRIER_BYTES and abs(len(filled[place]) - len(filled[last])) <= 1:
            pipelines[-1].append(place)
        else:
            pipelines.append([place])
    sets = [[token for place in places for token in filled[place]] for places in pipelines]
    if not sets:
        return ()
    order = {}
    for number, load in enumerate(operations):
        order.setdefault(load.token, number)
    chosen = min(sets, key=lambda found: (-len(found), min(order[token] for token in found)))
    return tuple(sorted(chosen, key=order.__getitem__))
