"""The section of the ablation: what each change alone and both together are worth, predicted and published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from undertow.report.bars import Axis, Bar, Look, bars
from undertow.report.page import Cell, Figure, Label, Part, Prose, Section, Source, Table
from undertow.timing.published import published

KEY, TITLE = "ablation", "What each change is worth"
COMMAND = "undertow timeline --ablation"
PUBLISHED = "published"
PORTS = {  # name in the record: what is assumed of the port of MMA operands
    "unknown": "either port",
    "shared": "the port of shared memory for MMA operands, too",
    "own": "a port of their own for MMA operands",
}


def _series(port: str) -> str:
    return f"predicted, {PORTS[port]}"


LOOKS = {
    PUBLISHED: Look("#a77fd1"),
    _series("unknown"): Look("#cfd5dd", hatched=True),
    _series("shared"): Look("#8fb8ea", hatched=True),
    _series("own"): Look("#f2b880", hatched=True),
}
QUANTITIES = {
    "throughput": "Speed-up over the baseline, sustained throughput under the power limit",
    "cycles": "Speed-up over the baseline, cycles of a traced tile",
}


def section(record: Mapping[str, Any]) -> Section:
    """record: what `undertow timeline --ablation --json` prints."""
    ports = {name: record["ports"][name] for name in PORTS if name in record["ports"]}
    draws = f"{record['draws']} paired draws from the ranges of its constants, seed {record['seed']}"
    source = Source(Label.PREDICTED, f"chip `{record['chip']}`, {draws}; medians, 5th to 95th percentile", COMMAND)
    known = published()
    others = Source(Label.PUBLISHED, f"{known.title}, Figures 5, 7 and 8: {known.gpu}")
    parts: list[Part] = []
    for quantity, title in QUANTITIES.items():
        given = _bars(ports, quantity)
        if given:
            drawn = bars(title, Axis("times the baseline", base=1.0, digits=2), LOOKS, given)
            parts.append(Figure(drawn, _caption(record, quantity), source, (others,)))
    parts += [_verdicts(ports, source, others), _tiles(ports, source), *_order(ports, source)]
    return Section(KEY, TITLE, COMMAND, parts)


def _bars(ports: Mapping[str, Any], quantity: str) -> list[Bar]:
    given: list[Bar] = []
    for name, side in ports.items():
        for verdict in side["published"]:
            if verdict["quantity"] != quantity:
                continue
            group = f"{verdict['schedule']}\n{verdict['mask']}"
            low, high = verdict["published"]
            told = Bar(group, PUBLISHED, (low + high) / 2, (low, high) if low != high else None)
            given += [told] * (told not in given)
            given.append(Bar(group, _series(name), verdict["median"], tuple(verdict["band"])))
    return given


def _caption(record: Mapping[str, Any], quantity: str) -> str:
    if quantity == "cycles":
        return "Published: from in-kernel timestamps. Predicted: a tile in the steady state."
    power = record["throughput_of_cycles"]
    return (
        f"A busier chip runs at a lower clock: predicted ratios of cycles are taken to the power {power['power']} "
        f"({power['why']}), so that this row of split is no independent test."
    )


def _verdicts(ports: Mapping[str, Any], source: Source, others: Source) -> Table:
    rows: list[Sequence[str | Cell]] = []
    for name, side in ports.items():
        for verdict in side["published"]:
            low, high = verdict["published"]
            said = f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"
            band = "{:.3f} to {:.3f}".format(*verdict["band"])
            kept = "" if verdict["independent"] else ", not independent"
            what = f"{verdict['schedule']}, {verdict['mask']}"
            rows.append(
                (what, verdict["quantity"], name, said, f"{verdict['median']:.3f}", band, verdict["verdict"] + kept)
            )
    return Table(
        "Published ratios to the baseline, and whether they lie within the predicted band.",
        ("schedule, mask", "of", "port", "published", "predicted median", "predicted band", "published lies"),
        (None, None, None, others, source, source, None),
        rows,
    )


def _tiles(ports: Mapping[str, Any], source: Source) -> Table:
    rows = []
    for name, side in ports.items():
        for run in side["runs"]:
            busy = sorted(run["utilisation"].items(), key=lambda item: (-item[1], item[0]))[:3]
            told = ", ".join(f"{unit} {share:.0%}" for unit, share in busy)
            band = "{:.0f} to {:.0f}".format(*run["band"])
            rows.append((f"{run['schedule']}, {run['mask']}", name, f"{run['cycles_per_tile']:.0f}", band, told))
    return Table(
        "Cycles of a tile, and the busiest units.",
        ("schedule, mask", "port", "median", "band", "busy"),
        (None, None, source, source, source),
        rows,
    )


def _order(ports: Mapping[str, Any], source: Source) -> list[Part]:
    sentences = []
    for name, side in ports.items():
        for mask, kept in side["in_published_order"].items():
            sentences.append(f"{name} port, {mask}: {'yes' if kept else 'no'}")
    told = f"Split fastest, either half alone between it and the baseline, by medians: {'; '.join(sentences)}."
    counts = [f"{_inside(side)} of {len(side['published'])} with {PORTS[name]}" for name, side in ports.items()]
    inferred = (
        f"Published ratios that lie whole within the band: {'; '.join(counts)}. Which port they support is an "
        "inference from what is published, not a prediction."
    )
    return [Prose(told, source), Prose(inferred, source)]


def _inside(side: Mapping[str, Any]) -> int:
    return sum(verdict["verdict"] == "inside" for verdict in side["published"])
