"""What can go wrong in an emulated kernel; every message ends with the place.

A handler deep inside raises with the fact alone ("load of 16 bytes at 0x4c1 is not aligned"); the machine adds kernel,
CTA, warps with their roles, PTX line and source line on the way out.
"""


class EmulatorError(ValueError):
    """Base of everything that stops an emulation.

    fact: the message without the place; place: the place. rule: id of the finding that the error amounts to.
    findings: what the observers had found by then, and the error itself as the last of them.
    """

    default_rule = "emulator-error"

    def __init__(self, fact: str, rule: str = ""):
        super().__init__(fact)
        self.fact = fact
        self.place = ""
        self.rule = rule or self.default_rule
        self.findings: list = []

    def at(self, place: str) -> "EmulatorError":
        """Add the place once; the innermost call wins."""
        if not self.place:
            self.place = place
            self.args = (f"{self.fact}\n  at {place}",)
        return self


class UnsupportedPtx(EmulatorError):
    """The emulator has no semantics for this PTX, or for this use of it."""


class MemoryFault(EmulatorError):
    """Access out of bounds, misaligned, to memory outside a live allocation, or by the wrong kind of instruction."""

    default_rule = "memory-fault"


class ProtocolError(EmulatorError):
    """A synchronisation rule is broken: over-arrival, uninitialised mbarrier, partial warp at a collective."""

    default_rule = "protocol"


class LaunchError(EmulatorError):
    """The launch description does not fit the kernel; names the argument, its value and what is allowed."""


class Deadlock(EmulatorError):
    """No warp can run and nothing is in flight. `report` has one entry per warp that has not exited."""

    default_rule = "deadlock"

    def __init__(self, fact: str, report: list | None = None):
        super().__init__(fact)
        self.report = report or []
