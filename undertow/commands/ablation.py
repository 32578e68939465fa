"""`undertow timeline --ablation`: the four schedules, dense and causal, beside what is published of them.

Both answers to the question that no public source settles are drawn side by side: whether the operands of an MMA share
the port of shared memory with loads and stores. The draws are the same in everything else.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from undertow.cases import CaseError
from undertow.cli import Outcome
from undertow.commands.recorded import Problem, recorded
from undertow.inputs import Shape
from undertow.kernels.backward import schedules_of
from undertow.plan.tiles import Band
from undertow.progress import Progress
from undertow.timing.ablation import BASELINE, CYCLES, FIRST_BAND, POWER, Verdict, in_published_order, judge
from undertow.timing.chip import Chip
from undertow.timing.grid_time import Work, launch_time
from undertow.timing.kernel_time import Kernels, Replayed
from undertow.timing.predict import PORT, PORTS, Draw, Drawer, Draws, draw
from undertow.timing.results import Prediction

ARCH = "sm100"
SHAPE = Shape(batch=8, seqlen_q=8192, seqlen_k=8192, heads=32)  # 64k tokens, as published
MASKS = {"dense": Band(), "causal": Band(None, 0)}
UNKNOWN = "unknown"
Key = tuple[str, str]  # schedule, mask


@dataclass(frozen=True)
class Both:
    """Replays every kernel with both ports; callable, and picklable for other processes. kernels: by mask."""

    kernels: Mapping[str, Kernels]

    def __call__(self, constants: Mapping[str, float], seed: int) -> dict[tuple[str, str, str], Replayed]:
        return {
            (port, schedule, mask): replayed
            for port, shared in PORTS.items()
            for mask, kernels in self.kernels.items()
            for schedule, replayed in kernels({**constants, PORT: shared}, seed).items()
        }


@dataclass(frozen=True)
class Ablation:
    """What the draws say. work: by mask, of the CTAs of the launch."""

    draws: Draws
    work: Mapping[str, Work]

    @property
    def keys(self) -> list[Key]:
        return list(dict.fromkeys((schedule, mask) for _, schedule, mask in self.draws.point.found))

    def port_of(self, drawn: Draw, port: str) -> str:
        """The assumption about the port; where it is unknown, the draw's own coin decides."""
        return (
            next(word for word, value in PORTS.items() if value == drawn.constants[PORT]) if port == UNKNOWN else port
        )

    def replayed(self, drawn: Draw, port: str, key: Key) -> Replayed:
        """What a draw says of a schedule under an assumption about the port."""
        return drawn.found[self.port_of(drawn, port), *key]

    def tile(self, drawn: Draw, port: str, key: Key) -> float:
        """Cycles of a tile, in the mean over those with and without a mask."""
        return self.replayed(drawn, port, key).tile(self.work[key[1]].masked_share)

    def launch(self, drawn: Draw, port: str, key: Key) -> float:
        """Cycles of the launch."""
        return self._launches[id(drawn)][self.port_of(drawn, port), *key]

    @functools.cached_property
    def _launches(self) -> dict[int, dict[tuple[str, str, str], float]]:
        """Cycles of every launch in every draw, which many ratios ask for."""
        sms = self.draws.chip.num_sms
        return {
            id(drawn): {
                name: launch_time(self.work[name[2]], replayed.cta, sms, drawn.constants)
                for name, replayed in drawn.found.items()
            }
            for drawn in (self.draws.point, *self.draws.drawn)
        }

    def tiles(self, port: str) -> dict[Key, Prediction]:
        """Cycles of a tile."""
        return {key: self.draws.predict(lambda drawn, key=key: self.tile(drawn, port, key)) for key in self.keys}

    def ratios(self, port: str, cycles: Callable[[Draw, str, Key], float]) -> dict[Key, Prediction]:
        """The baseline's cycles to those of every other schedule, draw by draw. cycles: `self.tile`, `self.launch`."""

        def ratio(drawn: Draw, key: Key) -> float:
            return cycles(drawn, port, (BASELINE, key[1])) / cycles(drawn, port, key)

        others = [key for key in self.keys if key[0] != BASELINE]
        return {key: self.draws.predict(lambda drawn, key=key: ratio(drawn, key)) for key in others}

    def utilisation(self, port: str, key: Key) -> dict[str, float]:
        """Median share of the time in which each unit is busy."""
        units = self.replayed(self.draws.point, port, key).utilisation
        shares = {
            unit: [self.replayed(d, port, key).utilisation.get(unit, 0.0) for d in self.draws.drawn] for unit in units
        }
        return {unit: statistics.median(each) for unit, each in shares.items()}


def execute(arguments: argparse.Namespace, chip: Chip, progress: Progress) -> Outcome:
    """Predict the ablation with the draws that the command line asks for."""
    problems = {mask: Problem(SHAPE, band) for mask, band in MASKS.items()}
    point, schedules = chip.point(), schedules_of(ARCH)
    kernels = {name: recorded(ARCH, schedules, problem, point, progress.step) for name, problem in problems.items()}
    draws = draw(Drawer(chip, arguments.seed, Both(kernels)), arguments.draws, arguments.jobs, progress.step)
    progress.step("comparing")
    return outcome(Ablation(draws, {name: problem.work for name, problem in problems.items()}), arguments)


def refuse_other_options(arguments: argparse.Namespace) -> None:
    """Everything about an ablation is settled but the chip and the draws.

    Raises: CaseError.
    """
    given = [f"seqlen_{side}" for side in "qk"] + [
        "batch",
        "heads",
        "kv_heads",
        "schedule",
        "causal",
        "softcap",
        "dtype",
    ]
    given = [name for name in (*given, "ptx", "launch", "perfetto", "svg") if getattr(arguments, name)]
    given += ["window"] if tuple(arguments.window) != (None, None) else []
    given += ["arch"] if arguments.arch != ARCH else []
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise CaseError(f"{flags}: not allowed beside --ablation, which has its own launches")


def outcome(found: Ablation, arguments: argparse.Namespace) -> Outcome:
    """Word an ablation. The runs are those of the chip's own range of the port."""
    chip = found.draws.chip
    port = chip.constants[PORT]
    main = UNKNOWN if port.low != port.high else next(word for word, value in PORTS.items() if value == port.value)
    ports = [main] if main != UNKNOWN else [UNKNOWN, *PORTS]
    sides = {name: side(found, name) for name in ports}
    report = {
        "chip": chip.name,
        "label": "predicted",
        "draws": arguments.draws,
        "seed": arguments.seed,
        "port": main,
        "runs": runs(found, main),
        "ports": sides,
        "throughput_of_cycles": {"power": POWER, "why": "ln 1.150 / ln 1.234, one pair of published numbers of split"},
        "first_band": list(FIRST_BAND),
    }
    lines = [f"Predicted for {chip.name}; median, 5th to 95th percentile of {arguments.draws} paired draws."]
    lines += [f"Launch of {SHAPE.batch} x {SHAPE.seqlen_q}, {SHAPE.heads} heads, main kernel. Published: B200.", ""]
    for name in ports:
        lines += [*_told(found, name), ""]
    return Outcome(True, report, "\n".join([*lines, *_closing()]))


def runs(found: Ablation, port: str) -> list[dict[str, Any]]:
    """Cycles of a tile and utilisation, by schedule and mask."""
    return [
        {
            "schedule": key[0],
            "mask": key[1],
            "cycles_per_tile": tile.median,
            "band": list(tile.band),
            "utilisation": found.utilisation(port, key),
        }
        for key, tile in found.tiles(port).items()
    ]


def side(found: Ablation, port: str) -> dict[str, Any]:
    """One assumption about the port: ratios, and what is published beside them."""
    tiles, launches = found.ratios(port, found.tile), found.ratios(port, found.launch)
    return {
        "runs": runs(found, port),
        "in_published_order": {mask: _ordered(found, port, mask) for mask in found.work},
        "ratios": [
            {"schedule": s, "mask": m, "of": "tile", "median": x.median, "band": list(x.band), "point": x.point}
            for (s, m), x in tiles.items()
        ]
        + [
            {"schedule": s, "mask": m, "of": "launch", "median": x.median, "band": list(x.band), "point": x.point}
            for (s, m), x in launches.items()
        ],
        "published": [_verdict_record(verdict) for verdict in judge(tiles, launches)],
        "sensitivity": {f"{s}, {m}": dict(list(x.sensitivity.items())[:10]) for (s, m), x in tiles.items()},
    }


def _ordered(found: Ablation, port: str, mask: str) -> bool:
    return in_published_order({s: x.median for (s, m), x in found.tiles(port).items() if m == mask})


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    published = verdict.published
    return {
        "schedule": published.schedule,
        "mask": published.mask,
        "quantity": published.quantity,
        "published": [published.low, published.high],
        "median": verdict.median,
        "band": list(verdict.band),
        "verdict": verdict.word,
        "independent": published.independent,
        "source": published.source,
    }


def _told(found: Ablation, port: str) -> list[str]:
    lines = [f"Port of MMA operands: {port}"]
    tiles, launches = found.ratios(port, found.tile), found.ratios(port, found.launch)
    for (schedule, mask), x in found.tiles(port).items():
        busy = found.utilisation(port, (schedule, mask))
        most = ", ".join(f"{unit} {share:.0%}" for unit, share in sorted(busy.items(), key=lambda item: -item[1])[:4])
        ratio = tiles.get((schedule, mask))
        gain = "" if ratio is None else f"{ratio.median:.3f} ({ratio.band[0]:.3f} to {ratio.band[1]:.3f})"
        cycles = f"{x.median:.0f} ({x.band[0]:.0f} to {x.band[1]:.0f})"
        lines.append(f"  {mask:<7}{schedule:<9}{cycles:<22}{gain:<25}{most}")
    for mask in found.work:
        lines.append(f"  {mask}: medians are {'' if _ordered(found, port, mask) else 'NOT '}in the published order")
    for verdict in judge(tiles, launches):
        published = verdict.published
        said = f"{published.low:.3f}" + ("" if published.low == published.high else f" to {published.high:.3f}")
        unit = "cycles" if published.quantity == CYCLES else "throughput"
        lines.append(
            f"  {published.schedule + ', ' + published.mask:<18}{unit:<11}published {said:<15}predicted "
            f"{verdict.median:.3f} ({verdict.band[0]:.3f} to {verdict.band[1]:.3f}): {verdict.word}"
            f"{'' if published.independent else ' (not independent)'}"
        )
    return lines


def _closing() -> list[str]:
    return [
        f"Throughput under the power limit is taken as cycles to the power {POWER}, which is the relation of one pair",
        "of published numbers of split (1.150 sustained, 1.234 in a burst); split's own throughput is no test of it.",
        "Which of the two ports the published numbers support is an inference from them, not a prediction.",
    ]
