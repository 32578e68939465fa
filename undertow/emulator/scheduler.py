"""Who runs next: warps of a CTA one by one, or a gang of neighbours that stand at the same instruction."""

import random

from .state import Cta, Warp


class FixedScheduler:
    """Round robin over gangs: a run of neighbouring warps at one instruction runs together until it blocks.

    While a gang's warps go different ways, the one that is furthest behind in the text runs first, so that they meet
    again.
    """

    budget = 256

    def __init__(self):
        self._cursor = 0
        self._cohort: set[int] = set()

    def start(self, cta_number: int) -> None:
        """Begin a CTA."""
        self._cursor, self._cohort = 0, set()

    def choose(self, cta: Cta, ready: list[Warp]) -> tuple[Warp, int]:
        """Pick the first warp to run and how many neighbours go with it."""
        cohort = [w for w in ready if w.number in self._cohort]
        if not cohort:
            first = next((w for w in ready if w.number >= self._cursor), ready[0])
            cohort = _neighbours(ready, first, first.number)
            self._cohort = {w.number for w in cohort}
            self._cursor = (cohort[-1].number + 1) % len(cta.warps)
        if len(cohort) == 1:
            return cohort[0], 1
        first = min(cohort, key=lambda w: min(w.groups))
        return first, len(_neighbours(cohort, first, first.number))

    def exhausted(self) -> None:
        """The gang used up its budget without blocking: let others run."""
        self._cohort = set()


def _neighbours(warps: list[Warp], first: Warp, lowest: int) -> list[Warp]:
    """The run of consecutive warps from `first` on that are whole and at the same instruction."""
    pc = first.converged_at()
    if pc < 0:
        return [first]
    run = [first]
    for warp in warps:
        if warp.number == run[-1].number + 1 and warp.converged_at() == pc:
            run.append(warp)
    return run


class SeededScheduler:
    """Random warp, random gang around it, random number of blocks; reproducible by seed."""

    def __init__(self, seed: int):
        self._seed = seed
        self._random = random.Random(seed)

    @property
    def budget(self) -> int:
        """Blocks to run before choosing again."""
        return self._random.choice((1, 2, 4, 16))

    def start(self, cta_number: int) -> None:
        """Begin a CTA: each has its own stream, whatever ran before."""
        self._random = random.Random(self._seed * 1_000_003 + cta_number)

    def choose(self, cta: Cta, ready: list[Warp]) -> tuple[Warp, int]:
        """Pick a warp and extend the gang to a random length."""
        first = self._random.choice(ready)
        gang = _neighbours(ready, first, first.number)
        return first, self._random.randint(1, len(gang))

    def exhausted(self) -> None:
        """Nothing to do: every turn is chosen afresh."""


def make_scheduler(schedule: str | int) -> FixedScheduler | SeededScheduler:
    """Build the scheduler that Options.schedule names: "fixed" or a seed."""
    return FixedScheduler() if schedule == "fixed" else SeededScheduler(int(schedule))
