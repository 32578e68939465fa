"""Which instruction forms ran and which way each branch went; what was not executed has not been checked."""

from collections import Counter
from typing import ClassVar

from ..events import BranchExecuted, InstructionExecuted
from .base import Finding


class Coverage:
    """Counts forms and branch outcomes.

    forms:    syntax line of the row -> warp executions (one per warp, whatever its mask)
    branches: PTX instruction index -> set of "taken", "not taken"
    lines:    PTX instruction indices that executed
    """

    subscriptions: ClassVar[tuple[type, ...]] = (InstructionExecuted, BranchExecuted)

    def __init__(self):
        self.forms: Counter = Counter()
        self.branches: dict[int, set[str]] = {}
        self.lines: set[int] = set()
        self._program = None

    def start(self, program, launch) -> None:
        """Forget earlier launches of other programs."""
        self._program = program

    def observe(self, event) -> None:
        """Count one instruction or one branch."""
        decoded = event.decoded
        if isinstance(event, InstructionExecuted):
            self.forms[decoded.row.syntax] += len(event.lanes.warps)
            self.lines.add(decoded.index)
            return
        sides = self.branches.setdefault(decoded.index, set())
        if event.taken:
            sides.add("taken")
        if event.taken < event.total:
            sides.add("not taken")

    def finish(self) -> list[Finding]:
        """Return no findings: coverage is not a verdict."""
        return []

    @property
    def unexecuted(self) -> list[int]:
        """PTX instruction indices that never ran."""
        total = len(self._program.code) if self._program else 0
        return [i for i in range(total) if i not in self.lines]
