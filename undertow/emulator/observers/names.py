"""What findings call things: warps by role, shared memory by buffer and stage, TMEM columns by region."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from undertow.plan.description import NumberLabels

from .base import Access

ENGINES = {
    "tensor": "tensor pipe", "bulk_load": "bulk copy", "tensor_load": "TMA copy", "bulk_store": "bulk store",
    "bulk_reduce": "bulk reduce", "cp_async": "cp.async", "wgmma": "asynchronous MMA",
}  # fmt: skip


_SEARCH = 200


class Names:
    """Names of one launch. plan: where given, TMEM accesses are named by what their role does (P, not S/P)."""

    def __init__(self, program: Any, launch: Any, labels: Any = None, plan: Any = None):
        self.program = program
        self.labels = labels or getattr(launch, "labels", None) or NumberLabels()
        self.memory: Any = None
        self.plan = plan or getattr(self.labels, "plan", None)

    def role(self, warp: int) -> str:
        """The role of a warp."""
        return self.labels.role(warp)

    def shared(self, address: int) -> str:
        """The buffer at a shared address."""
        if address < self.program.dynamic_base:
            for name, start in sorted(self.program.shared.items(), key=lambda item: -item[1]):
                if start <= address:
                    return f"{name}+{address - start:#x}"
        return self.labels.smem(address - self.program.dynamic_base)

    def global_memory(self, address: int) -> str:
        """The buffer at a global address, by the name that memory errors give it."""
        if self.memory is None:
            return f"global address {address:#x}"
        region = self.memory.region(address, 1)
        return f"{region.label}+{address - region.base:#x}"

    def barrier_of(self, *roles: str) -> str:
        """The plan's smallest named barrier that joins these roles."""
        barriers = self.plan.barriers if self.plan else ()
        fitting = [b for b in barriers if set(roles) <= set(b.roles)]
        if not fitting:
            return "a barrier of both warps"
        return f"named barrier {min(fitting, key=lambda b: len(b.roles)).name}"

    def source(self, index: int, role: str = "") -> str:
        """Source line of an instruction.

        Compilers give code that a library call emits the place of the whole function (column 0); then the next line
        that is known better follows, one in a file called like the role if there is one nearby.
        """
        code = self.program.code
        span = code[index].instruction.source
        if span is None or span.column:
            return str(span or "")
        following = [d.instruction.source for d in code[index + 1 : index + 1 + _SEARCH]]
        better = [s for s in following if s is not None and s.column]
        of_role = [s for s in better if PurePath(s.file).stem == role]
        return f"{span}, before {(of_role or better)[0]}" if better else str(span)

    def region(self, role: str, engine: str, writes: bool, column: int, details: dict | None = None) -> str | None:
        """The plan's TMEM region that such an access of a column means, if the plan leaves no doubt."""
        if self.plan is None:
            return None
        found = [
            r for r in self.plan.tmem
            if r.column <= column < r.end and r.name in (
                self._engine_regions(writes, details) if engine == "tensor" else self._role_regions(role, writes)
            )
        ]  # fmt: skip
        return found[0].name if len(found) == 1 else None

    def _role_regions(self, role: str, writes: bool) -> set[str]:
        wanted = "Store" if writes else "Load"
        assert self.plan is not None
        programs = dict(self.plan.programs)
        names = (role, "epilogue") if role == "compute" else (role,)
        return {s.region for n in names for s in programs.get(n, ()) if type(s).__name__ == wanted}

    def _engine_regions(self, writes: bool, details: dict | None) -> set[str]:
        assert self.plan is not None
        outputs = {op.d for op in self.plan.mmas}
        if details and "accumulator" in details:
            start, count = details["accumulator"] & 0xFFFF, details["shape"].n
            by_name = {r.name: r for r in self.plan.tmem}
            outputs = {d for d in outputs if (by_name[d].column, by_name[d].columns) == (start, count)}
        return outputs if writes else outputs | {name for op in self.plan.mmas for name in (op.a, op.b)}

    def access(self, order: Any, number: int, lane: int, verb: str, buffer: str) -> Access:
        """One side of a finding from its record."""
        records = order.records
        instruction = self.program.code[int(records.instruction[number])].instruction
        operation = records.operations.get(number)
        warp = operation.thread // 32 if operation else int(records.column[number]) // 32
        engine = ENGINES[operation.engine] if operation else ""
        role = self.role(warp)
        return Access(
            role, warp, None if operation or lane > 31 else lane, engine, verb, buffer, int(records.turn[number]),
            instruction.line, self.source(instruction.index, role), order.position,
        )  # fmt: skip
