"""The child of `undertow bench --cycles`: makes the calls that ncu counts, each behind a marker.

    ncu ... python -m undertow.bench.counted REQUEST ANSWER

REQUEST is JSON: cells and providers by name, and calls. ANSWER becomes a list of what `facts` says of each cell and
provider, in the order of the calls; those that are measured have been called, the others not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from undertow.bench.cellrun import facts, judge
from undertow.bench.gate import Gates
from undertow.bench.machine import NvmlMonitor, examine, uuid_of_current
from undertow.bench.peers import PROVIDERS
from undertow.bench.records import CYCLES
from undertow.bench.workload import workload
from undertow.sweep.matrix import CELLS

MARKER_CYCLES = 1000


def main(request: Path, answer: Path) -> int:
    """Judge and call every provider in every cell; only the calls are profiled."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    machine = examine(asked["revision"], NvmlMonitor(uuid_of_current()))
    cells = {cell.name: cell for cell in CELLS}
    gates = Gates()
    told: list[dict[str, Any]] = []
    for name in asked["cells"]:
        loaded = workload(cells[name], cells[name].full, "cuda")
        for judged in judge(loaded, gates.of(loaded), [PROVIDERS[provider] for provider in asked["providers"]]):
            told.append(facts(loaded, judged, CYCLES, machine))
            if judged.participant is None:
                continue
            torch.cuda.synchronize()
            with judged.participant.around():
                torch.cuda.profiler.start()
                for _ in range(asked["calls"]):
                    torch.cuda._sleep(MARKER_CYCLES)
                    judged.participant.call()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
        torch.cuda.empty_cache()
    answer.write_text(json.dumps(told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
