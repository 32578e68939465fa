"""Names of what a recording only numbers: rows, waits and GEMMs, in the words of the launch's labels."""

from __future__ import annotations

import re
from typing import Any

from undertow.emulator.program import Program
from undertow.plan.description import Launch, NumberLabels

from .observer import Operation, Token

GEMMS = {
    frozenset({"sQ", "sK"}): "QK", frozenset({"sdO", "sV"}): "dP", frozenset({"sdO"}): "PdO", frozenset({"sQ"}): "dK",
    frozenset({"sdS", "sQ"}): "dK", frozenset({"sdS", "sK"}): "dQ",
}  # fmt: skip
"""GEMMs of attention's backward by the shared-memory operands that they read, as plans name these."""


class Namer:
    """Names of one launch."""

    def __init__(self, program: Program, launch: Launch, labels: Any = None):
        self.labels = labels or launch.labels or NumberLabels()
        self._program = program

    def role(self, warp: int) -> str:
        """Name of a warp's row: `compute warp 4`, or `warp 4` where there is no plan."""
        role = self.labels.role(warp)
        return role if role == f"warp {warp}" else f"{role} warp {warp}"

    def shared(self, address: int) -> str:
        """The buffer or barrier word at a shared address, without its stage and offset."""
        name = self.labels.smem(address - self._program.dynamic_base)
        return name if name.startswith("smem+") else re.sub(r"\[\d+\]|\+0x[0-9a-f]+$", "", name)

    def token(self, token: Token) -> str:
        """What a wait is called: `load_mma_q.full`, or the named barrier."""
        return self.shared(token.place) if token.kind == "mbarrier" else self.labels.barrier_id(token.place)

    def gemms(self, operations: list[Operation]) -> list[str]:
        """The GEMM that each operation belongs to; empty for those that are no MMAs."""
        return [self._gemm(o) if o.engine in ("wgmma", "tensor") else "" for o in operations]

    def _gemm(self, operation: Operation) -> str:
        buffers = frozenset(self.shared(address) for address in operation.operands)
        plan = getattr(self.labels, "plan", None)
        accumulators = [r.name for r in plan.tmem if r.column == operation.accumulator] if plan else []
        for op in plan.mmas if plan else ():
            if op.d in accumulators and buffers & {op.a, op.b}:
                return op.name
        if plan and buffers in GEMMS:
            return GEMMS[buffers]
        if plan and "sRow" in buffers:
            return "row terms"
        into = f" to column {operation.accumulator}" if operation.accumulator >= 0 else ""
        return f"MMA n={operation.shape.n}{into}"
