"""Straight pieces of a kernel as an assembler sees them.

ptxas guards the instructions of a short forward branch instead of branching (if-conversion), and asks an mbarrier once
in line before it loops; so neither ends a straight piece, and address arithmetic moves across both.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from undertow import ptx
from undertow.emulator.program import Program

CONVERTED_LENGTH = 8  # PTX instructions behind a branch that are guarded instead; read off SASS of our kernels
_KEPT = ("bar", "barrier", "wgmma", "tcgen05", "cp", "setmaxnreg", "shfl", "bra", "brx", "ret", "exit", "trap")


class Regions:
    """converted: branch -> its target, for branches that do not branch. leaders: where straight pieces begin."""

    def __init__(self, program: Program):
        self._code = program.code
        self._places = program.kernel.labels
        self._labels = [_labels(decoded) for decoded in program.code]
        askers: dict[str, list[int]] = {}
        for index, labels in enumerate(self._labels):
            for label in labels:
                askers.setdefault(label, []).append(index)
        self._asked = Counter({label: len(found) for label, found in askers.items()})
        self._labelled = {self._places[label] for label in askers}
        self.converted: dict[int, int] = {}
        joined: Counter[str] = Counter()
        for decoded in program.code:
            label = self._converts(decoded.index)
            if label is not None:
                self.converted[decoded.index] = self._places[label]
                joined[label] += 1
        retries = {label for label, found in askers.items() if all(self.retries(index) for index in found)}
        self.leaders = np.zeros(len(program.code) + 1, bool)
        self.leaders[0] = True
        names = Counter({name: self._asked[name] for name in self._places})
        names.update(name for table in program.kernel.branch_targets.values() for name in table)
        for name, count in names.items():
            if name not in retries and count > joined[name]:
                self.leaders[self._places[name]] = True
        for decoded in program.code:
            if decoded.row.control and decoded.index not in self.converted and not self.retries(decoded.index):
                self.leaders[decoded.index + 1] = True

    def _converts(self, index: int) -> str | None:
        """The label of a branch that is no branch in the assembly; None for others."""
        decoded, labels = self._code[index], self._labels[index]
        if decoded.instruction.opcode != "bra" or decoded.guard is None or len(labels) != 1:
            return None
        target = self._places[labels[0]]
        between = range(index + 1, target)
        if len(between) == 1 and self.retries(index + 1):
            return labels[0]  # out of the loop around a try_wait
        if not 0 < len(between) <= CONVERTED_LENGTH or not self._labelled.isdisjoint(between):
            return None
        return None if any(self._code[i].instruction.opcode in _KEPT for i in between) else labels[0]

    def retries(self, index: int) -> bool:
        """Whether an instruction is the jump back to a try_wait that has just been asked."""
        labels = self._labels[index]
        if self._code[index].instruction.opcode != "bra" or len(labels) != 1:
            return False
        target = self._places[labels[0]]
        return index - 3 <= target < index and self._code[target].instruction.mnemonic.startswith("mbarrier.try_wait")


def _labels(decoded) -> tuple[str, ...]:
    return tuple(t.operand.name for t in decoded.operands.values() if isinstance(t.operand, ptx.LabelRef))


def expanded(executed: np.ndarray, converted: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A warp's stream with what a converted branch jumped over put in, not executed.

    Returns: PTX indices (~index where nothing was done), and the place in the stream of each, -1 for what was put in.
    """
    index = np.where(executed < 0, ~executed, executed)
    if not converted or not len(index):
        return executed, np.arange(len(executed))
    target = np.full(int(index.max()) + 1, -1)
    for branch, place in converted.items():
        if branch < len(target):
            target[branch] = place
    begins = index[1:] == target[index[:-1]]
    parts, places, at = [], [], 0
    for branch in np.flatnonzero(begins).tolist():
        parts.append(executed[at : branch + 1])
        places.append(np.arange(at, branch + 1))
        skipped = np.arange(index[branch] + 1, converted[int(index[branch])])
        parts.append(~skipped)
        places.append(np.full(len(skipped), -1))
        at = branch + 1
    parts.append(executed[at:])
    places.append(np.arange(at, len(executed)))
    return np.concatenate(parts), np.concatenate(places)
