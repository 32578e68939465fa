"""The tables of docs/timeline.md are those of the records in results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "timeline.md"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_the_h200_is_that_of_its_records():
    validate = tool("timeline_validate")
    measured = validate.read([ROOT / "results" / "hopper" / "cycles.jsonl"])
    pairs = list(validate.earlier(ROOT / "results" / "hopper" / "timeline.jsonl", measured))
    *table, summary = validate.told(pairs)
    assert validate.filled(DOCUMENT.read_text(), table, summary) == DOCUMENT.read_text()


def test_what_was_promised_of_the_h200_holds():
    """Mean absolute error at most 10%, worst 20%, and four fifths of the measurements in the bands."""
    validate = tool("timeline_validate")
    measured = validate.read([ROOT / "results" / "hopper" / "cycles.jsonl"])
    pairs = [
        pair for pair in validate.earlier(ROOT / "results" / "hopper" / "timeline.jsonl", measured) if pair[0].is_judged
    ]
    errors = [abs(validate.error(*pair)) for pair in pairs]
    inside = [predicted.band[0] <= one.cycles <= predicted.band[1] for one, predicted in pairs]
    assert len(pairs) >= 20
    assert sum(errors) / len(errors) <= 0.1 and max(errors) <= 0.2 and sum(inside) >= 0.8 * len(inside)


def test_the_tables_of_the_ablation_are_those_of_its_report():
    tables = tool("ablation_tables")
    report = json.loads((ROOT / "results" / "b200" / "ablation_predicted.json").read_text())
    assert tables.filled(DOCUMENT.read_text(), report) == DOCUMENT.read_text()
    with pytest.raises(ValueError, match="0 places for the table cycles"):
        tables.filled("nowhere", report)
