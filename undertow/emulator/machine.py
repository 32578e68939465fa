"""The machine: clusters of a grid, one after another, on the NumPy executor; most have one CTA.

CTAs of a cluster run in turns. A cluster that only polls (a spin on global memory) gives way: another one becomes
resident beside it, so that semaphores between CTAs work; otherwise one finishes before the next begins.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .async_agents import AsyncEngines
from .cluster import Cluster, cta_rank
from .description import Resolved
from .errors import Deadlock, EmulatorError, MemoryFault, ProtocolError, UnsupportedPtx
from .events import CtaFinished, CtaStarted, EventBus, InstructionExecuted, PieceExecuted, RegisterAccess
from .memory import ByteMemory
from .numpy_backend.collectives import warp_by_warp
from .numpy_backend.executor import Executor
from .observers.base import Finding
from .report import place, warp_reports
from .scheduler import make_scheduler
from .semantics import data_movement
from .semantics.barriers import CLUSTER_BARRIER
from .state import Cta, LaneSet, NamedBarrier, Warp

MAX_POLLS = 64
"""Fruitless polls after which a CTA counts as spinning."""
MAX_BLOCKS_WITHOUT_PROGRESS = 200_000
MAX_RESIDENT = 148
"""CTAs that may spin side by side: one per multiprocessor of a B200."""


@dataclass
class Tally:
    """What a launch counts."""

    barriers: dict[int, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    noted: set = field(default_factory=set)


class Machine:
    """Runs one launch."""

    def __init__(self, resolved: Resolved, options: Any, bus: EventBus):
        self.resolved = resolved
        self.program = resolved.program
        self.launch = resolved.launch
        self.options = options
        self.bus = bus
        self.global_memory = resolved.memory
        self.shared_base, self.shared_size = resolved.shared_base, resolved.shared_size
        self.parameter_memory = ByteMemory(
            resolved.parameters, 0, self.program.kernel.parameter_bytes, "the parameter block"
        )
        self.instruction_sink = bus.sink(InstructionExecuted)
        self.piece_sink = bus.sink(PieceExecuted)
        self.register_sink = bus.sink(RegisterAccess)
        self.executor = Executor(self, bus)
        self.tally = Tally()
        self._handlers: dict[int, Any] = {}
        self._started, self._finished = bus.sink(CtaStarted), bus.sink(CtaFinished)
        self._idle: list[Cta] = []

    def new_engines(self) -> AsyncEngines:
        """Engines for a CTA."""
        return AsyncEngines(self.options.completion, self.bus)

    def handler(self, index: int):
        """The handler of a machine form, made once per instruction."""
        if index not in self._handlers:
            decoded = self.program.code[index]
            assert decoded.row.make is not None
            try:
                handler = decoded.row.make(decoded, self.bus)
            except UnsupportedPtx as error:
                raise error.at(self.program.where(index)) from None
            if decoded.guard and decoded.row.is_collective:
                handler = warp_by_warp(decoded, handler)
            self._handlers[index] = handler
        return self._handlers[index]

    def note(self, finding: Finding, index: int) -> None:
        """Record a finding of the machine itself, once per rule and instruction."""
        if (finding.rule, index) not in self.tally.noted:
            self.tally.noted.add((finding.rule, index))
            self.tally.findings.append(
                Finding(finding.rule, finding.message, self.program.where(index), finding.other, finding.hint)
            )

    def place(self, lanes: LaneSet, index: int) -> str:
        """Describe where lanes execute an instruction."""
        return place(self, lanes, index)

    def clock(self, name: str) -> int:
        """%clock and its relatives: blocks executed so far, times a nominal 16; only good for monotonicity."""
        ticks = self.executor.num_blocks * 16
        return (
            ticks >> 32
            if name.endswith("_hi")
            else ticks
            if "64" in name or name == "%globaltimer"
            else ticks & 0xFFFFFFFF
        )

    def tensor_map(self, address: int):
        """Find the tensor map whose (parameter or generic) address this is.

        Raises: MemoryFault if no parameter described as a tensor map is there.
        """
        offset = address - data_movement.PARAM_WINDOW if address >= data_movement.PARAM_WINDOW else address
        found = self.resolved.tensor_maps.get(offset)
        if found is None:
            if data_movement.PARAM_WINDOW > address >= 1 << 32:
                raise UnsupportedPtx(f"tensor map in global memory at {address:#x}: pass it as a parameter")
            raise MemoryFault(f"no TensorMap was described for the parameter at offset {offset}")
        return found

    def parameter_value(self, offset: int, dtype: str) -> np.ndarray:
        """A value of the parameter block as an array of one element."""
        size = np.dtype(dtype).itemsize
        if offset + size > self.program.kernel.parameter_bytes:
            raise MemoryFault(f"ld.param of {size} bytes at offset {offset} past the parameter block")
        return self.resolved.parameters[offset : offset + size].view(dtype)

    def symbol_address(self, name: str) -> int:
        """Address of a variable or parameter within its state space."""
        program = self.program
        for table in (program.shared, program.local, self.resolved.variables):
            if name in table:
                return table[name]
        for parameter in program.kernel.parameters:
            if parameter.name == name:
                return parameter.offset
        raise UnsupportedPtx(f"address of {name}")

    def special(self, lanes: LaneSet, name: str, dtype: str) -> np.ndarray:
        """A special register: one value per lane, or one cell per CTA that is refilled when the CTA changes."""
        index = lanes.index
        block = self.resolved.block
        per_lane = {
            "%tid.x": lambda: index % block[0],
            "%tid.y": lambda: index // block[0] % block[1],
            "%tid.z": lambda: index // (block[0] * block[1]),
            "%laneid": lambda: index % 32,
            "%warpid": lambda: index // 32,
            "%lanemask_eq": lambda: 1 << index % 32,
            "%lanemask_le": lambda: (2 << index % 32) - 1,
            "%lanemask_lt": lambda: (1 << index % 32) - 1,
            "%lanemask_ge": lambda: 0xFFFFFFFF & ~((1 << index % 32) - 1),
            "%lanemask_gt": lambda: 0xFFFFFFFF & ~((2 << index % 32) - 1),
        }
        if name in per_lane:
            values = per_lane[name]().astype(np.uint64)
            return values.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
        cells = lanes.cta.specials
        if (name, dtype) not in cells:
            cells[name, dtype] = np.array([self.cta_value(lanes.cta, name)], dtype)
        return cells[name, dtype]

    def cta_value(self, cta: Cta, name: str) -> int:
        """A special register that all threads of a CTA share.

        Raises: UnsupportedPtx for registers that the emulator does not know.
        """
        axis = {"x": 0, "y": 1, "z": 2}.get(name[-1], 0)
        base = name.rpartition(".")[0] or name
        grid, block, cluster = self.resolved.grid, self.resolved.block, self.resolved.cluster
        size = cluster[0] * cluster[1] * cluster[2]
        values = {
            "%ctaid": cta.position[axis], "%nctaid": grid[axis], "%ntid": block[axis],
            "%clusterid": cta.position[axis] // cluster[axis], "%nclusterid": grid[axis] // cluster[axis],
            "%cluster_ctaid": cta.position[axis] % cluster[axis], "%cluster_nctaid": cluster[axis],
            "%cluster_ctarank": cta_rank(cta.position, cluster), "%cluster_nctarank": size,
            "%is_explicit_cluster": int(size > 1), "%nwarpid": len(cta.warps), "%smid": cta.number % MAX_RESIDENT,
            "%nsmid": MAX_RESIDENT, "%gridid": 0, "%dynamic_smem_size": self.launch.dynamic_smem,
            "%total_smem_size": self.shared_size, "%aggr_smem_size": self.shared_size,
        }  # fmt: skip
        if base not in values:
            raise UnsupportedPtx(f"special register {name}")
        return values[base]

    def run(self) -> None:
        """Run every CTA of the grid."""
        queue = self.resolved.clusters(self.options.cta_order)
        resident: list[Cluster] = []
        fruitless = 0
        with np.errstate(all="ignore"):
            while queue or resident:
                if not resident:
                    resident.append(self._begin(queue.pop(0)))
                before = sum(c.progress for c in resident)
                for cluster in list(resident):
                    if self._run_cluster(cluster):
                        resident.remove(cluster)
                        self._end(cluster)
                        before = -1
                fruitless = fruitless + 1 if before == sum(c.progress for c in resident) else 0
                if resident and queue and len(resident) * len(resident[0].ctas) < MAX_RESIDENT:
                    resident.append(self._begin(queue.pop(0)))
                elif fruitless > 3:
                    ctas = [cta for cluster in resident for cta in cluster.ctas]
                    self._report_deadlock(ctas, "every resident CTA spins and nothing is in flight")

    def _begin(self, numbers: list[int]) -> Cluster:
        ctas, schedulers = [], []
        for number in numbers:
            cta = self._idle.pop() if self._idle else Cta(self, self.resolved.num_threads, self.program.num_slots)
            cta.reset(self.resolved.position(number), number)
            scheduler = make_scheduler(self.options.schedule)
            scheduler.start(number)
            ctas.append(cta)
            schedulers.append(scheduler)
        cluster = Cluster(ctas, schedulers, NamedBarrier())
        for cta in ctas:
            cta.barriers[CLUSTER_BARRIER] = cluster.barrier
            if self._started:
                self._started(CtaStarted(cta))
        return cluster

    def _end(self, cluster: Cluster) -> None:
        for cta in cluster.ctas:
            for warpgroup in cta.warpgroups.values():
                try:
                    warpgroup.check_end()
                except ProtocolError as error:
                    raise error.at(f"{self.program.name}, CTA {cta.position}") from None
            for key, barrier in cta.barriers.items():
                if key < CLUSTER_BARRIER:
                    self.tally.barriers[key] = self.tally.barriers.get(key, 0) + barrier.generation
        for cta in cluster.ctas:
            if self._finished:
                self._finished(CtaFinished(cta))
            self._idle.append(cta)

    def _run_cluster(self, cluster: Cluster) -> bool:
        """Run the CTAs of a cluster in turns until all finish (True) or they spin without effect (False)."""
        executor = self.executor
        progress, polls, since = cluster.progress, cluster.polls, executor.num_blocks
        expired_at = -1
        turns = list(zip(cluster.ctas, cluster.schedulers, strict=True))
        while True:
            ran = False
            for cta, scheduler in turns:
                if self._turn(cta, scheduler):
                    ran = True
            if not ran:
                if pending := cluster.pending():
                    self._step(pending[0], pending[0].engines.step)
                    continue
                if cluster.finished:
                    return True
                if any(self._overtake(cta) for cta in cluster.ctas):
                    continue
                if expired_at == cluster.progress or not self._expire(cluster.ctas):
                    self._report_deadlock(cluster.ctas, "no warp can run and nothing is in flight")
                expired_at = cluster.progress
                continue
            if cluster.progress != progress:
                progress, polls, since = cluster.progress, cluster.polls, executor.num_blocks
            elif cluster.polls - polls > MAX_POLLS or executor.num_blocks - since > MAX_BLOCKS_WITHOUT_PROGRESS:
                polls, since = cluster.polls, executor.num_blocks
                if pending := cluster.pending():
                    self._step(pending[0], pending[0].engines.step)
                else:
                    return False

    def _turn(self, cta: Cta, scheduler) -> bool:
        """Let some warps of a CTA run until they block; False if none can."""
        self._step(cta, cta.engines.maybe_step)
        ready = self._ready_warps(cta)
        if not ready:
            return False
        executor = self.executor
        first, count = scheduler.choose(cta, ready)
        budget = scheduler.budget
        before = executor.num_blocks
        executor.run(cta, first, count, budget)
        if executor.num_blocks - before >= budget:
            scheduler.exhausted()
        return True

    def _overtake(self, cta: Cta) -> bool:
        """Let lanes go on before those of their warp that wait; where a collective needs the whole warp, nobody can."""
        for warp in cta.warps:
            if not warp.groups or self.executor.next_pc(warp, overtake=True) is None:
                continue
            try:
                self.executor.run(cta, warp, 0, 1)
            except ProtocolError as error:
                if error.rule != "partial-warp":
                    raise
                continue
            return True
        return False

    def _ready_warps(self, cta: Cta) -> list[Warp]:
        """Warps whose lanes furthest behind can go on."""
        ready = []
        for warp in cta.warps:
            if not warp.groups or (warp.waits and warp.idle_at == cta.progress):
                continue
            if warp.waits and self.executor.next_pc(warp) is None:
                warp.idle_at = cta.progress
            else:
                ready.append(warp)
        return ready

    def _step(self, cta: Cta, step: Callable[[], object]) -> None:
        """Let the engines complete an asynchronous operation; errors name where it was issued."""
        try:
            step()
        except EmulatorError as error:
            operation = cta.engines.current
            assert operation is not None
            raise error.at(f"{place(self, operation.lanes, operation.decoded.index)}, when it completed") from None

    @staticmethod
    def _expire(ctas: list[Cta]) -> bool:
        """Let every try_wait come back false once; say whether there was one."""
        waits = [w for cta in ctas for warp in cta.warps for w in warp.waits.values() if w.can_expire]
        for wait in waits:
            wait.expired = True
        for cta in ctas:
            for warp in cta.warps:
                warp.idle_at = -1
        return bool(waits)

    def _report_deadlock(self, ctas: list[Cta], fact: str) -> None:
        entries = [entry for cta in ctas for entry in warp_reports(self, cta)]
        where = ", ".join(f"CTA {c.position}" for c in ctas[:4]) + (" ..." if len(ctas) > 4 else "")
        table = "\n".join(f"    {entry}" for entry in entries)
        raise Deadlock(f"deadlock: {fact}\n{table}", entries).at(f"{self.program.name}, {where}")
