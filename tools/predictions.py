"""Predict anew all that the documents say of the timing model, from the chip files and the records in results.

    python tools/predictions.py           the H200's launches, the ablation, their tables, the pictures; minutes
    python tools/predictions.py --h200    only the H200's launches, after new records of `hopper_measure.py`

Writes results/hopper/timeline.jsonl, results/b200/ablation_predicted.json, docs/timeline.md and docs/images. Needs
flash-attn-4 and no GPU. What docs/timeline.md says around its tables is for whoever runs this to read again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

DOCUMENT, REPORT = "docs/timeline.md", Path("results/b200/ablation_predicted.json")
CYCLES, PREDICTED = "results/hopper/cycles.jsonl", "results/hopper/timeline.jsonl"


def run(*command: str) -> str:
    """What a command of this Python prints.

    Raises: CalledProcessError for one that fails; what it complained of has been shown.
    """
    return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--h200", action="store_true")
    arguments = parser.parse_args()
    print(run("tools/timeline_validate.py", CYCLES, "--output", PREDICTED, "--document", DOCUMENT))
    if not arguments.h200:
        report = json.loads(run("-m", "undertow", "timeline", "--ablation", "--json"))
        REPORT.write_text(json.dumps(report, indent=1) + "\n")
        print(run("tools/ablation_tables.py", str(REPORT)))
        run("tools/ablation_tables.py", str(REPORT), "--document", DOCUMENT)
        run("tools/regen.py", "--predict")


if __name__ == "__main__":
    main()
