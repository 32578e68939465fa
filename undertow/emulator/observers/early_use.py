"""Registers that are used before the tcgen05.wait::ld of the load that fills them: read off the program text.

The ISA leaves the registers of a tcgen05.ld undefined until tcgen05.wait::ld. Compilers nevertheless put register
moves and packs in between, and the hardware's scoreboard keeps even arithmetic in order, so this is advice, and only
in strict mode. Followed: straight-line code behind the load, moves passing the taint on, up to the wait or a branch.
"""

from __future__ import annotations

from typing import Any, ClassVar

from undertow import ptx

from .base import Finding, Ledger


class EarlyUse:
    """Scans the kernel once at the start of a launch; no events."""

    subscriptions: ClassVar[tuple[type, ...]] = ()

    def __init__(self):
        self.ledger = Ledger()

    def start(self, program: Any, launch: Any) -> None:
        """Scan the program."""
        pending: dict[Any, Any] = {}
        for decoded in program.code:
            mnemonic = decoded.instruction.mnemonic
            if mnemonic.startswith("tcgen05.wait::ld") or decoded.row.control:
                pending.clear()
                continue
            read = {r for o in decoded.sources for r in registers(o.operand)}
            used = sorted(read & pending.keys())
            written = {r for o in decoded.destinations for r in registers(o.operand)}
            if used and decoded.instruction.opcode != "mov":
                self._report(program, decoded.index, pending[used[0]], used[0])
            for name in written:
                pending.pop(name, None)
            if mnemonic.startswith("tcgen05.ld"):
                pending |= dict.fromkeys(written, decoded.index)
            elif used and decoded.instruction.opcode == "mov":
                pending |= dict.fromkeys(written, pending[used[0]])

    def observe(self, event: Any) -> None:
        """Subscribed to nothing."""

    def finish(self) -> list[Finding]:
        """All findings."""
        return self.ledger.list()

    def _report(self, program: Any, index: int, load: int, register: str) -> None:
        if self.ledger.has("tmem-load-not-waited", load):
            return
        self.ledger.add(
            ("tmem-load-not-waited", load),
            Finding(
                "tmem-load-not-waited",
                f"register {register} of a tcgen05.ld is used before tcgen05.wait::ld",
                program.where(index),
                program.where(load),
                "the ISA leaves the registers undefined until the wait",
                severity="advice",
            ),
        )


def registers(operand: Any) -> list[str]:
    """Names of the registers in an operand."""
    if isinstance(operand, ptx.Register):
        return [operand.name]
    if isinstance(operand, (ptx.Vector, ptx.Group)):
        return [name for item in operand.items for name in registers(item)]
    if isinstance(operand, ptx.Address):
        return registers(operand.base)
    return []
