"""What an observer is: something that subscribes to event classes and returns findings at the end."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True)
class Access:
    """One side of a finding: who did what to which buffer, and where in the program.

    role, warp: of the warp, or of the warp that issued the engine's operation; lane: its lane, None for all of them.
    engine: "" for a warp's own access. verb: "reads", "writes", ... . buffer: its name with stage and offset, in the
    plan's words where a plan is known. turn: how many times the warp had executed the instruction by then.
    line, source: PTX line, and file:line of the source.
    """

    role: str
    warp: int
    lane: int | None
    engine: str
    verb: str
    buffer: str
    turn: int
    line: int
    source: str
    cta: tuple[int, int, int] = (0, 0, 0)

    def __str__(self) -> str:
        who = f"warp {self.warp}" + (f" ({self.role})" if self.role != f"warp {self.warp}" else "")
        if self.lane is not None:
            who += f" lane {self.lane}"
        if self.engine:
            who = f"{self.engine} issued by {who}"
        where = f"PTX line {self.line}" + (f", {self.source}" if self.source else "")
        return f"{who} {self.verb} {self.buffer}, execution {self.turn}, CTA {self.cta}, {where}"


@dataclass(frozen=True)
class Finding:
    """One thing worth telling.

    rule: stable kebab-case id. where and other: the two places in words. missing: the edge that is not there.
    hint: what may help. accesses: the two sides as data. count: how often, with the same rule and instructions.
    severity: "error", or "advice" for what the ISA does not allow but what cannot change a result; a launch without
    errors is clean.
    """

    rule: str
    message: str
    where: str = ""
    other: str = ""
    hint: str = ""
    missing: str = ""
    accesses: tuple[Access, ...] = ()
    count: int = 1
    severity: str = "error"

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        advice = "advice, " if self.severity == "advice" else ""
        parts = [f"{advice}{self.rule}: {self.message}{times}"]
        for name in ("where", "other", "missing", "hint"):
            if getattr(self, name):
                parts.append(f"  {name}: {getattr(self, name)}")
        return "\n".join(parts)


@dataclass
class Ledger:
    """Findings, one per key (rule and instructions), with how often each was found."""

    findings: dict[tuple, Finding] = field(default_factory=dict)

    def has(self, *key) -> bool:
        """Whether there is such a finding already; counts it if so."""
        found = self.findings.get(key)
        if found is None:
            return False
        self.findings[key] = replace(found, count=found.count + 1)
        return True

    def add(self, key: tuple, finding: Finding) -> None:
        """Keep the first finding of a key."""
        self.findings.setdefault(key, finding)

    def list(self) -> list[Finding]:
        """All of them, in the order in which they were found."""
        return list(self.findings.values())


class Observer(Protocol):
    """Watches a launch. It must not change the machine's state; results with and without it are identical."""

    subscriptions: ClassVar[tuple[type, ...]]

    def start(self, program: Any, launch: Any) -> None:
        """Begin a launch; called once before any event."""

    def observe(self, event: Any) -> None:
        """Take one event of a subscribed class."""

    def finish(self) -> list[Finding]:
        """End the launch and return what was found."""
        ...
