"""Names for synchronisations that outlive edits of the source: who executes them, on which barrier, where.

A PTX line number moves with every change of the compiler or the kernel. What stays is the role that executes a
synchronisation, the function of the source it comes from, its form, what it is about (a pipeline's side, a named
barrier, the TMEM regions that were loaded), and whether it stands before, in or behind the role's loop. All of it but
the form is observed in one run of the unmutated kernel on each problem.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from undertow import ptx
from undertow.emulator import Finding, Launch, Program
from undertow.emulator.events import (
    BarrierOperation,
    BulkGroup,
    InstructionExecuted,
    MbarrierOperation,
    MemoryAccess,
    TmemAccess,
)
from undertow.emulator.observers.names import Names
from undertow.mutate.sites import Site

SOURCES = Path(__file__).resolve().parents[2]  # where the relative paths of `.file` begin
EVERYWHERE = "everywhere"


@dataclass(frozen=True)
class Name:
    """What a synchronisation is called. Equal names are told apart by `ordinal`, from 1 in text order.

    role: who executes it (`all`, or roles joined by `+`). function: of the source, empty if unknown. about: the
    mbarrier without its stage, the named barrier, the TMEM regions, the copied buffers, or what is signalled next.
    place: `before`, `in` or `after` the role's loop, or EVERYWHERE for a barrier that is taken away at all its sites.
    """

    role: str
    function: str
    kind: str
    form: str
    about: str
    place: str
    ordinal: int = 1

    def __str__(self) -> str:
        where = self.place if self.place == EVERYWHERE else f"{self.place} the loop"
        function = f", {self.function}" if self.function else ""
        number = f" #{self.ordinal}" if self.ordinal > 1 else ""
        return f"{self.role}: {self.kind} {self.about or self.form}{number} ({where}{function})"


class Profile:
    """Observes who executes each synchronisation and what it is about, in one launch after another."""

    subscriptions: ClassVar[tuple[type, ...]] = (
        InstructionExecuted, MbarrierOperation, BarrierOperation, TmemAccess, MemoryAccess, BulkGroup,
    )  # fmt: skip

    def __init__(self) -> None:
        self.warps: dict[int, set[int]] = defaultdict(set)  # by instruction index
        self.launches: dict[int, set[int]] = defaultdict(set)  # their numbers, likewise
        self.about: dict[int, set[str]] = defaultdict(set)
        self.num_warps, self._launch = 0, -1
        self._pending: dict[tuple[int, str], set[str]] = defaultdict(set)  # TMEM regions since the warp's last wait
        self._copied: dict[int, set[str]] = defaultdict(set)  # shared buffers that a warp's copies touched

    def start(self, program: Program, launch: Launch) -> None:
        self._labels, self._names = launch.labels, Names(program, launch)
        self._launch += 1

    def observe(self, event: Any) -> None:
        index = event.decoded.index
        if isinstance(event, InstructionExecuted):
            self.num_warps = max(self.num_warps, len(event.lanes.cta.warps))
            self.warps[index].update(event.lanes.warps)
            self.launches[index].add(self._launch)
            self._tmem_wait(index, event)
        elif isinstance(event, MbarrierOperation):
            self.about[index].add(self._shared(event.address))
        elif isinstance(event, BarrierOperation):
            self.about[index].add(self._labels.barrier_id(event.barrier))
        elif isinstance(event, TmemAccess):
            if event.operation is None:
                self._pending[event.warp, event.kind].add(self._labels.tmem(event.column))
        elif isinstance(event, MemoryAccess):
            if event.operation is not None and event.space == "shared":
                for address in event.addresses.reshape(-1)[:1]:
                    self._copied[event.operation.warp].add(self._shared(int(address)).partition("+")[0])
        else:
            self.about[index] |= self._copied[event.thread // 32]

    def finish(self) -> list[Finding]:
        return []

    def _shared(self, address: int) -> str:
        """The buffer or mbarrier at a shared address, without its stage."""
        return re.sub(r"\[\d+\]", "", self._names.shared(address)).removesuffix("+0x0")

    def _tmem_wait(self, index: int, event: InstructionExecuted) -> None:
        mnemonic = event.decoded.instruction.mnemonic
        if mnemonic.startswith("tcgen05.wait::"):
            kind = "read" if "::ld" in mnemonic else "write"
            for warp in event.lanes.warps:
                self.about[index] |= self._pending.pop((warp, kind), set())


def names(program: Program, launch: Launch, profile: Profile, found: Sequence[Site]) -> list[Name]:
    """A name for every site, all different."""
    loops = list(loops_of(program))
    counts: Counter[Name] = Counter()
    result = []
    for position, site in enumerate(found):
        warps = profile.warps.get(site.index, set())
        name = Name(
            _role(launch, warps, profile.num_warps),
            _function(program.code[site.index].instruction.source),
            site.kind,
            site.form,
            _about(profile, found, position),
            _place(site.index, warps, loops, profile),
        )
        counts[name] += 1
        result.append(replace(name, ordinal=counts[name]))
    return result


def _role(launch: Launch, warps: set[int], num_warps: int) -> str:
    if not warps:
        return "nobody"
    if len(warps) == num_warps > 1:
        return "all"
    return "+".join(dict.fromkeys(launch.labels.role(warp) for warp in sorted(warps)))


def _about(profile: Profile, found: Sequence[Site], position: int) -> str:
    """What a synchronisation is about; one without an object of its own is named by the next signal in the text."""
    site = found[position]
    if site.kind in ("fence", "proxy-fence", "init-fence", "warp-sync", "order"):
        for later in found[position:]:
            signals = later.kind in ("arrive", "barrier") and profile.about.get(later.index)
            if signals and profile.warps.get(later.index, set()) & profile.warps.get(site.index, set()):
                return "before " + "+".join(sorted(profile.about[later.index]))
        return ""
    return "+".join(sorted(profile.about.get(site.index, ())))


def loops_of(program: Program) -> Iterator[range]:
    """Instructions of every loop but the spins of a wait, which consist of the wait and branches."""
    for decoded in program.code:
        instruction = decoded.instruction
        targets = [o for o in instruction.operands if isinstance(o, ptx.LabelRef)]
        if instruction.opcode != "bra" or not targets:
            continue
        body = range(program.target(targets[0]), instruction.index + 1)
        if body and any(not _spins(program.code[i].instruction) for i in body):
            yield body


def _spins(instruction: ptx.Instruction) -> bool:
    # the setp is what a mutant has instead of the wait
    return instruction.opcode in ("bra", "mbarrier", "setp", "nanosleep")


def _place(index: int, warps: set[int], loops: Sequence[range], profile: Profile) -> str:
    own = [loop for loop in loops if any(profile.warps.get(i, set()) & warps for i in loop)]
    if any(index in loop for loop in own):
        return "in"
    return "after" if own and all(loop.stop <= index for loop in own) else "before"


def _function(source: ptx.SourceSpan | None) -> str:
    """The function of the source that a line belongs to, methods with their class; empty if it cannot be read."""
    if source is None:
        return ""
    path = Path(source.file)
    for line_range, name in _functions(path if path.is_absolute() else SOURCES / path):
        if source.line in line_range:
            return name
    return ""


@cache
def _functions(path: Path) -> tuple[tuple[range, str], ...]:
    """(lines, qualified name) of every function of a Python file, inner ones first."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    found: list[tuple[range, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
                if not isinstance(child, ast.ClassDef):
                    found.append((range(child.lineno, (child.end_lineno or child.lineno) + 1), prefix + child.name))
            else:
                visit(child, prefix)

    visit(tree, "")
    return tuple(found)
