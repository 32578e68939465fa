"""Named barriers that two groups share: rounds with different participants must be ordered.

A hardware barrier counts arrivals and does not know whose they are. If warps that did not take part in the last round
of an id arrive although nothing tells them that it is over, the two groups can complete each other's rounds.
Different thread counts within a round, and more threads than expected, stop the machine (`named-barrier-count`).

POLICY: advice where a CTA ends with arrivals that completed no round (`named-barrier-leftover`): the ISA does not say
what becomes of them. Nobody waits for them, or it would be a deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .base import Finding, Ledger
from .clocks import ORDER, SEVERAL, Order
from .names import Names


@dataclass
class _Round:
    """Arrivals of one round: warp -> moment."""

    generation: int
    arrivals: dict[int, int] = field(default_factory=dict)
    instruction: int = 0


class NamedBarrierRounds:
    """Follows the rounds of every id in one CTA; driven by `race`, whose clocks it asks."""

    def __init__(self, order: Order, names: Names, ledger: Ledger):
        self._order, self._names, self._ledger = order, names, ledger
        self._rounds: dict[int, tuple[_Round | None, _Round]] = {}

    def arrive(self, event: Any) -> None:
        """A warp is about to arrive."""
        before, now = self._rounds.get(event.barrier, (None, None))
        if now is None or now.generation != event.generation:
            before, now = now, _Round(event.generation)
            self._rounds[event.barrier] = (before, now)
        if before is not None and event.warp not in before.arrivals:
            self._check(event, before)
        now.arrivals[event.warp] = self._order.tick()
        now.instruction = event.decoded.index

    def end(self, cta: Any) -> None:
        """The CTA has ended: tell of rounds that have not."""
        for barrier, (_, now) in self._rounds.items():
            state = cta.barriers[barrier]
            if not state.arrived or self._ledger.has("named-barrier-leftover", barrier):
                continue
            name, role = self._names.labels.barrier_id(barrier), self._names.role
            warps = ", ".join(f"{w} ({role(w)})" for w in sorted(now.arrivals))
            message = (
                f"the CTA ends in the middle of a round of named barrier {barrier} ({name}): {state.arrived} of"
                f" {state.expected or 'all'} threads have arrived, of warps {warps}"
            )
            where = self._names.program.where(now.instruction)
            self._ledger.add(
                ("named-barrier-leftover", barrier),
                Finding("named-barrier-leftover", message, where, severity="advice"),
            )

    def _check(self, event: Any, before: _Round) -> None:
        clock = self._order.knows(event.warp, SEVERAL, ORDER)
        unknown = [w for w, moment in before.arrivals.items() if clock[32 * w : 32 * w + 32].max() <= moment]
        if not unknown:
            return
        key = ("named-barrier-shared", event.barrier)
        if self._ledger.has(*key):
            return
        name, role = self._names.labels.barrier_id(event.barrier), self._names.role
        others = ", ".join(f"{w} ({role(w)})" for w in sorted(before.arrivals))
        message = (
            f"named barrier {event.barrier} ({name}): warp {event.warp} ({role(event.warp)}) joins round"
            f" {event.generation}, and nothing tells it that round {before.generation} of warps {others} is over"
        )
        where = self._names.program.where
        self._ledger.add(
            key,
            Finding(
                "named-barrier-shared",
                message,
                where(event.decoded.index),
                where(before.instruction),
                "give each group an id of its own, or put a barrier of both between their rounds",
                f"an edge from warps {', '.join(map(str, unknown))} to warp {event.warp}",
            ),
        )
