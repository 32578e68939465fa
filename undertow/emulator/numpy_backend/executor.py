"""Runs warps block by block: whole gangs as long as they agree, diverged warps by their lowest program counter."""

from dataclasses import dataclass
from types import FunctionType

import numpy as np

from undertow import ptx

from ..errors import EmulatorError, ProtocolError, UnsupportedPtx
from ..events import BranchExecuted
from ..program import Program
from ..semantics.mbarrier import SPLIT
from ..state import FULL_MASK, Cta, LaneSet, Warp
from .codegen import FILE_NAME, BlockCode, Observed, bind_block, compile_block


@dataclass(frozen=True)
class Ending:
    """How a block ends. kind: fall, jump, branch, table, exit or trap."""

    kind: str
    target: int = 0
    targets: tuple[int, ...] = ()


@dataclass(eq=False)
class BoundBlock:
    """A block ready for one lane set; `predicate` is the branch condition or table index over its lanes."""

    function: FunctionType
    code: BlockCode
    start: int
    end: int
    ending: Ending
    predicate: np.ndarray | None
    negated: bool


def block_ending(program: Program, last: int) -> Ending:
    """Classify the last instruction of a block."""
    decoded = program.code[last]
    if not decoded.row.control:
        return Ending("fall")
    opcode = decoded.instruction.opcode
    if opcode == "bra":
        label = decoded.operands["target"].operand
        assert isinstance(label, ptx.LabelRef)
        return Ending("branch" if decoded.guard else "jump", program.target(label))
    if opcode == "brx":
        if decoded.guard:
            raise UnsupportedPtx("guarded brx.idx")
        table = decoded.operands["targets"].operand
        assert isinstance(table, ptx.LabelRef)
        names = program.kernel.branch_targets[table.name]
        return Ending("table", 0, tuple(program.kernel.labels[n] for n in names))
    return Ending("exit" if opcode in ("ret", "exit") else "trap")


class Executor:
    """Executes blocks for a machine and counts them."""

    def __init__(self, machine, bus):
        self.machine = machine
        self.program: Program = machine.program
        self.counts: dict[int, int] = dict.fromkeys(self.program.blocks, 0)
        self.num_blocks = 0
        self._branch_sink = bus.sink(BranchExecuted)
        sinks = (machine.instruction_sink, machine.piece_sink, machine.register_sink)
        self._observed = Observed(*(sink is not None for sink in sinks))

    def bind(self, lanes: LaneSet, pc: int) -> BoundBlock:
        """Get the block at pc for a lane set."""
        bound = lanes.bound.get(pc)
        if bound is None:
            block = self.program.blocks[pc]
            code = compile_block(self.program, block, self._observed)
            function = bind_block(code, lanes, self.machine)
            predicate, negated = self._condition(lanes, block.end - 1)
            ending = block_ending(self.program, block.end - 1)
            bound = lanes.bound[pc] = BoundBlock(function, code, pc, block.end, ending, predicate, negated)
        return bound

    def _condition(self, lanes: LaneSet, last: int) -> tuple[np.ndarray | None, bool]:
        decoded = self.program.code[last]
        if not decoded.row.control:
            return None, False
        if decoded.instruction.opcode == "brx":
            register = decoded.operands["index"].operand
            assert isinstance(register, ptx.Register)
            slot = self.program.slots[register.name]
            return lanes.registers.words[slot.file][slot.index, lanes.columns], False
        if decoded.guard is None:
            return None, False
        slot = self.program.slots[decoded.guard.register.name]
        return lanes.registers.p[slot.index, lanes.columns], decoded.guard.negated

    def _call(self, bound: BoundBlock, lanes: LaneSet):
        """Run the block's function and add the place to whatever it raises."""
        try:
            if not lanes.is_scattered:
                return bound.function()
            lanes.copy_in(bound.code.used)
            result = bound.function()
            lanes.copy_out(bound.code.used)
            return result
        except EmulatorError as error:
            raise error.at(self._place(error, bound, lanes)) from None
        except Exception as error:
            error.add_note(f"at {self._place(error, bound, lanes)}")
            raise

    def _place(self, error: BaseException, bound: BoundBlock, lanes: LaneSet) -> str:
        index, trace = bound.start, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == FILE_NAME:
                index = bound.code.line_index[trace.tb_lineno - 1]
            trace = trace.tb_next
        return self.machine.place(lanes, index)

    def run(self, cta: Cta, first: Warp, count: int, budget: int) -> None:
        """Run a gang (or one diverged warp; count 0: lanes may overtake) until it blocks, splits, exits or is out of
        budget."""
        pc = first.converged_at()
        if pc >= 0:
            self._run_gang(cta, cta.warps[first.number : first.number + max(count, 1)], pc, budget)
        else:
            self._run_diverged(cta, first, budget, overtake=count == 0)

    def _run_gang(self, cta: Cta, warps: list[Warp], pc: int, budget: int) -> None:
        lanes = cta.gang(warps[0].number, len(warps))
        counts, count = self.counts, len(warps)
        while True:
            bound = lanes.bound.get(pc) or self.bind(lanes, pc)
            result = self._call(bound, lanes)
            self.num_blocks += 1
            if result is not None:
                self._stop(cta, warps, lanes, pc, result)
                return
            counts[pc] += count
            for warp in warps:
                if warp.waits:
                    warp.waits.clear()
            ending = bound.ending
            if ending.kind == "fall":
                pc = bound.end
            elif ending.kind == "jump":
                pc = ending.target
            elif ending.kind == "branch":
                bits = self._taken(bound, lanes)
                if bits == [FULL_MASK] * count:
                    pc = ending.target
                elif not any(bits):
                    pc = bound.end
                else:
                    for warp, taken in zip(warps, bits, strict=True):
                        warp.groups = {}
                        self._join(warp.groups, bound.end, FULL_MASK & ~taken)
                        self._join(warp.groups, ending.target, taken)  # may be the same place
                    return
            else:
                self._leave(warps, lanes, bound, [FULL_MASK] * count)
                return
            if pc >= len(self.program.code):
                for warp in warps:
                    warp.groups = {}
                return
            budget -= 1
            if budget <= 0:
                for warp in warps:
                    warp.groups = {pc: FULL_MASK}
                return

    def _taken(self, bound: BoundBlock, lanes: LaneSet) -> list[int]:
        """Mask of lanes that take the branch, per warp of whole warps."""
        packed = np.packbits(bound.predicate, bitorder="little").view("<u4").tolist()  # type: ignore[arg-type]
        if bound.negated:
            packed = [FULL_MASK & ~bits for bits in packed]
        if self._branch_sink:
            taken = sum(bits.bit_count() for bits in packed)
            self._branch_sink(BranchExecuted(lanes, self.program.code[bound.end - 1], taken, lanes.n))
        return packed

    def _run_diverged(self, cta: Cta, warp: Warp, budget: int, overtake: bool) -> None:
        """Run the lanes that are furthest behind, block by block, until the warp is together again."""
        while warp.groups and budget > 0:
            pc = self.next_pc(warp, overtake)
            if pc is None:
                return
            mask = warp.groups[pc]
            lanes = cta.part(warp.number, mask)
            bound = lanes.bound.get(pc) or self.bind(lanes, pc)
            result = self._call(bound, lanes)
            self.num_blocks += 1
            if result is not None:
                self._stop(cta, [warp], lanes, pc, result)
                return
            self.counts[pc] += 1
            warp.waits.pop(pc, None)
            del warp.groups[pc]
            self._advance(warp, lanes, bound, mask)
            budget -= 1
            if warp.converged_at() >= 0:
                return

    @staticmethod
    def next_pc(warp: Warp, overtake: bool = False) -> int | None:
        """Where a warp goes on: its lowest program counter, or None if the lanes there wait.

        overtake: lanes further on may go first, so that lanes of one warp can wait for each other.
        """
        if not warp.waits:
            return min(warp.groups, default=None)
        free = (pc for pc in sorted(warp.groups) if pc not in warp.waits or warp.waits[pc].may_go)
        pc = next(free, None)
        return pc if overtake or pc == min(warp.groups) else None

    def _advance(self, warp: Warp, lanes: LaneSet, bound: BoundBlock, mask: int) -> None:
        ending, groups = bound.ending, warp.groups
        if ending.kind == "branch":
            chosen = np.flatnonzero(bound.predicate != bound.negated)  # type: ignore[operator]
            taken = sum(1 << int(i) for i in lanes.index[chosen] % 32)
            if self._branch_sink:
                self._branch_sink(BranchExecuted(lanes, self.program.code[bound.end - 1], len(chosen), lanes.n))
            self._join(groups, ending.target, taken)
            self._join(groups, bound.end, mask & ~taken)
        elif ending.kind in ("fall", "jump"):
            self._join(groups, bound.end if ending.kind == "fall" else ending.target, mask)
        else:
            self._leave([warp], lanes, bound, [mask])

    def _join(self, groups: dict[int, int], pc: int, mask: int) -> None:
        if mask and pc < len(self.program.code):
            groups[pc] = groups.get(pc, 0) | mask

    def _leave(self, warps: list[Warp], lanes: LaneSet, bound: BoundBlock, masks: list[int]) -> None:
        """End of a block by exit, trap or a branch table."""
        last = self.program.code[bound.end - 1]
        guarded = np.ones(lanes.n, bool) if bound.predicate is None else bound.predicate != bound.negated
        if bound.ending.kind == "table":
            assert bound.predicate is not None
            self._branch_table(warps, lanes, bound)
            return
        if bound.ending.kind == "trap" and guarded.any():
            raise ProtocolError(f"{last.instruction.opcode} executed").at(self.machine.place(lanes, last.index))
        for warp, mask in zip(warps, masks, strict=True):
            chosen = lanes.index[guarded & (lanes.index // 32 == warp.number)] % 32
            leaving = sum(1 << int(i) for i in chosen) if bound.ending.kind == "exit" else 0
            groups = {pc: m for pc, m in warp.groups.items() if not m & mask}
            self._join(groups, bound.end, mask & ~leaving)
            warp.groups = groups
            if not groups:
                self._on_exit(lanes.cta)

    def _branch_table(self, warps: list[Warp], lanes: LaneSet, bound: BoundBlock) -> None:
        targets = bound.ending.targets
        assert bound.predicate is not None
        for warp in warps:
            mine = lanes.index // 32 == warp.number
            mask = sum(1 << int(i) for i in lanes.index[mine] % 32)
            groups = {pc: m for pc, m in warp.groups.items() if not m & mask}
            for value in np.unique(bound.predicate[mine]).tolist():
                if value >= len(targets):
                    place = self.machine.place(lanes, bound.end - 1)
                    raise ProtocolError(f"brx.idx with index {value} of {len(targets)} targets").at(place)
                chosen = lanes.index[mine & (bound.predicate == value)] % 32
                self._join(groups, targets[value], sum(1 << int(i) for i in chosen))
            warp.groups = groups

    @staticmethod
    def _on_exit(cta: Cta) -> None:
        cta.cluster.stir()

    def _stop(self, cta: Cta, warps: list[Warp], lanes: LaneSet, pc: int, result) -> None:
        """A blocking instruction did not go through: note why, or ask the warps of a gang one by one."""
        if result is SPLIT:
            for warp in warps:
                warp.groups = {pc: FULL_MASK}
            for warp in warps:
                self._run_gang(cta, [warp], pc, 1)
            return
        for warp, wait in zip(warps, result, strict=True):
            if lanes.full:
                warp.groups = {pc: FULL_MASK}
            warp.waits[pc] = wait
            warp.idle_at = -1
