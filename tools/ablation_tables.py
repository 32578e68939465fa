"""Tables of what each half of `split` is worth, predicted beside published, for the documents.

    python tools/ablation_tables.py results/b200/ablation_predicted.json [--document docs/timeline.md]

The report is what `undertow timeline --ablation --json` writes; tools/predictions.py does all of it. Prints both
tables, or puts them into a document: between `<!-- ablation: cycles -->` or `<!-- ablation: published -->`, and
`<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEDULES = ("aliased", "slots", "signals", "split")
PORTS = {"unknown": "unknown (a coin)", "shared": "shared", "own": "own"}
TITLES = {"unknown": "port unknown", "shared": "port shared", "own": "port of its own"}


def cycles(report: Mapping[str, Any]) -> Iterator[str]:
    """Cycles of a tile by port and mask, and how much longer the baseline's is."""
    yield f"| port | mask | {' | '.join(SCHEDULES)} | split / aliased |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for port, side in report["ports"].items():
        runs = {(run["mask"], run["schedule"]): run for run in side["runs"]}
        ratios = {(x["mask"], x["schedule"]): x for x in side["ratios"] if x["of"] == "tile"}
        for mask in ("dense", "causal"):
            tiles = [_numbers(runs[mask, s]["cycles_per_tile"], runs[mask, s]["band"], ".0f") for s in SCHEDULES]
            ratio = ratios[mask, "split"]
            cells = [PORTS[port], mask, *tiles, _numbers(ratio["median"], ratio["band"], ".3f")]
            yield f"| {' | '.join(cells)} |"


def published(report: Mapping[str, Any]) -> Iterator[str]:
    """What is published, beside what is predicted of it for each port."""
    sides = {port: side["published"] for port, side in report["ports"].items()}
    yield f"| | quantity | published | {' | '.join(TITLES[port] for port in sides)} |"
    yield f"| --- | --- | --- | {' | '.join('---' for _ in sides)} |"
    for rows in zip(*sides.values(), strict=True):
        one = rows[0]
        low, high = one["published"]
        name = f"{one['schedule']}, {one['mask']}" + ("" if one["independent"] else " (no test)")
        number = f"{low:.3f}" if low == high else f"{low:.2f} to {high:.2f}"
        cells = [f"{_numbers(row['median'], row['band'], '.3f')}, {row['verdict']}" for row in rows]
        yield f"| {' | '.join([name, one['quantity'], number, *cells])} |"


TABLES: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {"cycles": cycles, "published": published}


def filled(document: str, report: Mapping[str, Any]) -> str:
    """The document with both tables.

    Raises: ValueError for one without a place for each.
    """
    for name, table in TABLES.items():
        begin = re.escape(f"<!-- ablation: {name} -->\n")
        text = "".join(f"{line}\n" for line in table(report))
        place = re.compile(rf"({begin}).*?(<!-- end -->)", re.DOTALL)
        document, count = place.subn(lambda found, text=text: found[1] + text + found[2], document)
        if count != 1:
            raise ValueError(f"{count} places for the table {name}: must be 1")
    return document


def _numbers(median: float, band: list[float], form: str) -> str:
    low, high = band
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", metavar="REPORT")
    parser.add_argument("--document", metavar="FILE")
    arguments = parser.parse_args()
    report = json.loads(Path(arguments.report).read_text())
    if arguments.document:
        path = Path(arguments.document)
        path.write_text(filled(path.read_text(), report))
    else:
        print("\n\n".join("\n".join(table(report)) for table in TABLES.values()))


if __name__ == "__main__":
    main()
