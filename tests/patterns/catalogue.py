"""All patterns, and the ways in which the tests run them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.patterns import clusters, gemm, grids, mbarriers, rings, staging, tensor_cores, tensor_memory, warps
from tests.patterns.pattern import Case, Pattern, Twin
from undertow.emulator import Options

PATTERNS: tuple[Pattern, ...] = tuple(
    pattern
    for room in (rings, mbarriers, staging, tensor_memory, tensor_cores, gemm, warps, grids, clusters)
    for pattern in room.PATTERNS
)


@dataclass(frozen=True)
class Setting:
    """A way to run a launch: order of the warps, moment of asynchronous completions, order of the CTAs."""

    schedule: str | int
    completion: str | tuple[str, int]
    last_cta_first: bool = False

    def options(self, case: Case) -> Options:
        """The emulator's options for one case."""
        ctas = list(range(case.launch.grid[0]))
        return Options(
            schedule=self.schedule, completion=self.completion, cta_order=ctas[::-1] if self.last_cta_first else None
        )

    def __str__(self) -> str:
        completion = self.completion if isinstance(self.completion, str) else "-".join(map(str, self.completion))
        return f"{self.schedule}-{completion}" + ("-reversed" if self.last_cta_first else "")


SETTINGS = (
    Setting("fixed", "eager"),
    Setting("fixed", "late"),
    Setting(1, ("seeded", 1)),
    Setting(2, ("seeded", 2), last_cta_first=True),
    Setting(3, "late", last_cta_first=True),
    Setting(4, ("seeded", 4), last_cta_first=True),
)


TWINS: dict[str, tuple[Pattern, Twin]] = {
    f"{pattern.name}/{twin.failure}": (pattern, twin) for pattern in PATTERNS for twin in pattern.twins
}
"""Every twin beside its pattern, by the name that tests give it."""
