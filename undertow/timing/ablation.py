"""The published ablation of the four schedules beside its prediction.

Published are lengths of a traced tile, in cycles, and throughputs, under the chip's power limit: a schedule that keeps
the chip busier runs at a lower clock, so that less is left of a gain in cycles. Only a pair of published numbers says
how much (POWER); what is translated with it is no independent test of the schedule that the pair is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from undertow.timing.published import published
from undertow.timing.results import Prediction

BASELINE = "aliased"
CYCLES, THROUGHPUT = "cycles", "throughput"
POWER = 0.665  # ln 1.150 / ln 1.234: gain of `split` in sustained throughput against that in a burst
POWER_OF = ("split", "dense")

TRACED, BARS = "in-kernel trace of one CTA", "ablation bars"


@dataclass(frozen=True)
class Ratio:
    """A published ratio to the baseline, from `low` to `high`. quantity: CYCLES of a tile, or THROUGHPUT.

    independent: of POWER.
    """

    schedule: str
    mask: str
    quantity: str
    low: float
    high: float
    source: str
    independent: bool = True


def published_ratios() -> tuple[Ratio, ...]:
    """Traced tiles, then bars."""
    traced = [
        Ratio(t.schedule, t.mask, CYCLES, t.speedup, t.speedup, f"{TRACED}, figure {t.figure}")
        for t in published().traces
    ]
    bars = [
        Ratio(
            g.schedule, g.mask, THROUGHPUT, *g.speedup, f"{BARS}, figure {g.figure}", (g.schedule, g.mask) != POWER_OF
        )
        for g in published().gains
    ]
    return (*traced, *bars)


FIRST_BAND = (0.96, 1.22)  # of split's ratio, of a first model with what had been published alone


@dataclass(frozen=True)
class Verdict:
    """A published ratio beside the predicted one, in the published quantity."""

    published: Ratio
    median: float
    band: tuple[float, float]

    @property
    def inside(self) -> bool:
        """Whether all of what is published lies within the band."""
        return self.band[0] <= self.published.low and self.published.high <= self.band[1]

    @property
    def word(self) -> str:
        if self.inside:
            return "inside"
        apart = self.published.high < self.band[0] or self.band[1] < self.published.low
        return "outside" if apart else "partly inside"


def judge(tiles: Mapping[tuple[str, str], Prediction], launches: Mapping[tuple[str, str], Prediction]) -> list[Verdict]:
    """Every published ratio that has a prediction. Keys are schedule and mask; ratios of the baseline's cycles to it.

    tiles: of a tile in the steady state. launches: of the whole main kernel, which a throughput is compared with.
    """
    found = []
    for ratio in published_ratios():
        predicted = (tiles if ratio.quantity == CYCLES else launches).get((ratio.schedule, ratio.mask))
        if predicted is not None:
            power = 1.0 if ratio.quantity == CYCLES else POWER
            low, high = predicted.band
            found.append(Verdict(ratio, predicted.median**power, (low**power, high**power)))
    return found


def in_published_order(medians: Mapping[str, float]) -> bool:
    """Whether `split` is the fastest and either half alone lies between it and the baseline. medians: of cycles."""
    split, baseline = medians["split"], medians[BASELINE]
    return all(split < medians[half] < baseline for half in ("slots", "signals"))
