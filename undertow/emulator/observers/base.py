"""What an observer is: something that subscribes to event classes and returns findings at the end."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True)
class Finding:
    """One thing worth telling. rule: stable kebab-case id; where and other: the two places; hint: what may help."""

    rule: str
    message: str
    where: str = ""
    other: str = ""
    hint: str = ""

    def __str__(self) -> str:
        parts = [f"{self.rule}: {self.message}"]
        if self.where:
            parts.append(f"  where: {self.where}")
        if self.other:
            parts.append(f"  other: {self.other}")
        if self.hint:
            parts.append(f"  hint: {self.hint}")
        return "\n".join(parts)


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
