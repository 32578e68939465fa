"""Print what a variant of attention costs the main kernel of `split`: executed instructions, by role.

    python tools/variant_costs.py

Emulated on one CTA, one key tile seen by several query heads of a group: what four further trips of the tile loop
execute, divided by four, is a tile; what is left is the CTA's once. Warp instructions per warp, predicated ones and
those of a satisfied wait included. Time is another matter: an `ex2` and a `mov` count alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from undertow import emulator
from undertow.backward_case import batch_case
from undertow.emulator.events import InstructionExecuted
from undertow.emulator.observers.base import Finding
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm100.plan import TILE_M, TILE_N, plan
from undertow.plan.render_tables import table
from undertow.reference import DENSE, Scoring, Sequences

ROLES = ("load", "mma", "compute", "reduce")
TRIPS = (2, 6)  # of the tile loop, in the two runs whose difference is taken
FAR = 4 * TILE_N  # a bound that hides no pair of a tile

ROWS = torch.tensor([0, TILE_M], dtype=torch.int32)


@dataclass(frozen=True)
class Variant:
    """One row of the table: what is asked for, and whether its tile has pairs that are not seen."""

    name: str
    scoring: Scoring = DENSE
    deterministic: bool = False


VARIANTS = (
    Variant("dense"),
    Variant("causal, all pairs seen", Scoring(window=(None, FAR))),
    Variant("causal, the diagonal", Scoring(causal=True)),
    Variant("window, all pairs seen", Scoring(window=(FAR, FAR))),
    Variant("window, both edges", Scoring(window=(64, 32))),
    Variant("packed", Scoring(sequences=Sequences(ROWS, ROWS))),
    Variant("softcap", Scoring(softcap=15.0)),
    Variant("softcap, causal, the diagonal", Scoring(softcap=15.0, causal=True)),
    Variant("deterministic", deterministic=True),
)


class Executed:
    """Counts the instructions that each warp of the first CTA executes."""

    subscriptions: ClassVar[tuple[type, ...]] = (InstructionExecuted,)

    def __init__(self) -> None:
        self.by_warp: Counter[int] = Counter()

    def start(self, program: Any, launch: Any) -> None:
        """Nothing to prepare."""

    def observe(self, event: Any) -> None:
        """Count an instruction for each of its warps."""
        if not any(event.lanes.cta.position):
            self.by_warp.update(event.lanes.warps)

    def finish(self) -> list[Finding]:
        """Find nothing: a count is not a verdict."""
        return []


def executed(batch: Batch, deterministic: bool) -> dict[str, Counter[int]]:
    """Kernel -> warp -> instructions of its first CTA."""
    counts = {}
    for kernel in batch_case(batch, deterministic=deterministic):
        observer = Executed()
        emulator.launch(kernel.ptx, kernel.launch, emulator.Options(backend="numpy"), [observer])
        counts[kernel.name] = observer.by_warp
    return counts


def main_row(variant: Variant) -> list[str]:
    """A row of the first table: one CTA that visits one tile of each query head of a group, few and many heads."""
    few, many = (
        executed(random_batch(Shape(1, TILE_M, TILE_N, trips, 1), 0, variant.scoring), variant.deterministic)["main"]
        for trips in TRIPS
    )
    trips = TRIPS[1] - TRIPS[0]
    cells, tile = [], 0.0
    for name in ROLES:
        warps = plan().role(name).warps
        of_role = sum(many[w] - few[w] for w in warps) / trips
        tile += of_role
        cells.append(f"{of_role / len(warps):.0f}")
    return [variant.name, *cells, f"{tile:.0f}", f"{sum(few.values()) - TRIPS[0] * tile:.0f}"]


def rows_row(name: str, batch: Batch, deterministic: bool = False) -> list[str]:
    """A row of the second table: the kernels before and after, whose warps all do the same."""
    counts = executed(batch, deterministic)
    return [name, *(f"{sum(counts[kernel].values())}" for kernel in ("preprocess", "postprocess"))]


def report() -> str:
    """Both tables."""
    heading = ("variant and tile", *(f"`{role}`, a warp" for role in ROLES), "all warps", "once a CTA")
    main = table(heading, [main_row(variant) for variant in VARIANTS])
    shape = Shape(1, TILE_M, TILE_N, 1)
    plain, packed = random_batch(shape), random_batch(shape, 0, Scoring(sequences=Sequences(ROWS, ROWS)))
    sink = random_batch(shape, 0, Scoring(sink=torch.zeros(1)))
    rows = [
        rows_row("plain", plain),
        rows_row("gradient of LSE", replace(plain, dlse=torch.ones_like(plain.lse))),
        rows_row("sink", sink),
        rows_row("packed", packed),
        rows_row("deterministic", plain, deterministic=True),
    ]
    return f"{main}\n{table(('variant', 'preprocess', 'postprocess'), rows)}"


if __name__ == "__main__":
    print(report(), end="")
