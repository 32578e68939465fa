"""setmaxnreg: a warp that asks for more registers waits until others have given enough back.

The pool of a CTA is what its launch was given: `.maxnreg` times threads, or, without the directive, 64 K registers
divided by the threads and rounded down to a multiple of 8. The machine lets every request through; here the sums are
held against each other: all that is ever given back must cover all that is asked for. A warpgroup of four warps has
to execute the instruction together. Source: PTX ISA, "setmaxnreg".
POLICY: warps of a warpgroup that ask for different numbers are advice: the ISA forbids it, flash-attn-4 does it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

from .. import events as ev
from .base import Finding, Ledger

REGISTERS_PER_SM = 64 * 1024
WARPGROUP = 4


class RegisterPool:
    """Checks the sums per CTA."""

    subscriptions: ClassVar[tuple[type, ...]] = (ev.CtaStarted, ev.CtaFinished, ev.RegistersRequested)

    def __init__(self):
        self.ledger = Ledger()

    def start(self, program: Any, launch: Any) -> None:
        """Find what each thread has at launch."""
        self._program = program
        threads = 1
        for extent in launch.block:
            threads *= extent
        (declared,) = program.kernel.directives.get("maxnreg", (0,))
        self._at_launch = declared or min(255, REGISTERS_PER_SM // max(threads, 128)) // 8 * 8
        self._requests: dict[int, dict[int, list[tuple[int, int, str]]]] = {}

    def observe(self, event: Any) -> None:
        """Note requests; judge a CTA at its end."""
        if isinstance(event, ev.CtaStarted):
            self._requests[id(event.cta)] = defaultdict(list)
        elif isinstance(event, ev.CtaFinished):
            self._judge(self._requests.pop(id(event.cta), {}), len(event.cta.warps))
        else:
            for warp in event.lanes.warps:
                self._requests[id(event.lanes.cta)][warp].append((event.decoded.index, event.count, event.action))

    def finish(self) -> list[Finding]:
        """All that was found; CTAs that did not end are judged as they are."""
        for requests in self._requests.values():
            self._judge(requests, max(requests, default=0) + 1)
        self._requests = {}
        return self.ledger.list()

    def _judge(self, requests: dict, num_warps: int) -> None:
        given = asked = 0
        first = ""
        for warp, items in sorted(requests.items()):
            group = range(warp // WARPGROUP * WARPGROUP, min(warp // WARPGROUP * WARPGROUP + WARPGROUP, num_warps))
            for other in group:
                theirs = [item[1:] for item in requests.get(other, [])]
                if theirs != [item[1:] for item in items]:
                    self._partial(items[0][0], (warp, other), bool(theirs))
            before = self._at_launch
            for index, count, _ in items:
                given += max(before - count, 0)
                asked += max(count - before, 0)
                if count > before and not first:
                    first = self._program.where(index)
                before = count
        if asked > given:
            self.ledger.add(
                ("register-pool", first),
                Finding(
                    "register-pool",
                    f"setmaxnreg.inc asks for {asked} registers per lane and warp more than at launch"
                    f" ({self._at_launch} per thread), setmaxnreg.dec gives back only {given}: the warps wait for ever",
                    first,
                    hint="the sum over all warps of the final counts must not exceed what the launch has",
                ),
            )

    def _partial(self, index: int, warps: tuple[int, int], both: bool) -> None:
        """Two warps of a warpgroup differ; `both` ask for something."""
        warp, other = warps
        what = "asks for another number of registers" if both else "does not execute it"
        self.ledger.add(
            ("register-pool", warp // WARPGROUP),
            Finding(
                "register-pool",
                f"warp {warp} executes setmaxnreg, warp {other} of its warpgroup {what}",
                self._program.where(index),
                hint="all four warps of a warpgroup must execute the same setmaxnreg",
                severity="advice" if both else "error",
            ),
        )
