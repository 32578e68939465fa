"""The tool that holds predictions against a GPU: what it reads of a record, and how it counts errors."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from undertow.timing.results import Prediction

TOOL = Path(__file__).resolve().parents[2] / "tools" / "timeline_validate.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("timeline_validate", TOOL)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def predicted(median: float) -> Prediction:
    return Prediction(median, median, (0.9 * median, 1.1 * median), (), {})


@pytest.mark.parametrize(
    ("kernel", "shape", "form", "seqlen", "tiles"),
    [
        ("dense", "dense", ("dense", 1), 8192, 8 * 32 * 64 * 64),
        ("causal", "gqacausal2k", ("causal", 4), 2048, 32 * 32 * 16 * 17 // 2),
        ("fa4_gqa", "gqa32k", ("dense", 4), 32768, 2 * 32 * 256 * 256),
        ("fa4_causal", "causal2k", ("causal", 1), 2048, 32 * 32 * 16 * 17 // 2),
        ("fa4_mqacausal", "mqacausal512", ("causal", 32), 512, 128 * 32 * 4 * 5 // 2),
    ],
)
def test_a_record_says_which_launch_it_is(tool, kernel, shape, form, seqlen, tiles):
    measured = tool.Measured(kernel, shape, 1.0)
    assert (measured.form, measured.seqlen, measured.work.tiles.tiles) == (form, seqlen, tiles)


def test_ctas_of_groups_are_fewer_and_longer_only_where_they_are(tool):
    ours, theirs = (tool.Measured(kernel, "gqa2k", 1.0) for kernel in ("dense", "fa4_gqa"))
    assert (len(ours.work.order), len(theirs.work.order)) == (32 * 8 * 16, 32 * 32 * 16)
    assert ours.recorded == "undertow dense" and theirs.recorded == "flash-attn-4 dense grouped"


def test_later_records_count_and_deterministic_ones_do_not(tool, tmp_path):
    path = tmp_path / "cycles.jsonl"
    about = {"kind": "cycles", "shape": "dense"}
    records = [{"kernel": "dense", "cycles": 2.0}, {"kernel": "dense_deterministic", "cycles": 3.0}]
    records += [{"kernel": "dense_softcap", "cycles": 4.0}, {"kernel": "dense", "cycles": 1.0}]
    path.write_text("".join(json.dumps({**about, **record}) + "\n" for record in records))
    assert tool.read([str(path)]) == [tool.Measured("dense", "dense", 1.0)]


def test_a_document_gets_the_table_in_its_place(tool):
    document = "before\n<!-- validation -->\nold\n<!-- end -->\nafter\n"
    told = tool.filled(document, ["| a |", "| --- |"], "Mean.")
    assert told == "before\n<!-- validation -->\n| a |\n| --- |\n\nMean.\n<!-- end -->\nafter\n"
    assert tool.filled(told, ["| b |"], "Mean.").count("<!-- validation -->") == 1
    with pytest.raises(ValueError, match="0 places"):
        tool.filled("nowhere", ["| a |"], "Mean.")


def test_errors_are_relative_to_what_was_measured(tool):
    pairs = [(tool.Measured("dense", "dense", 100e6), predicted(x)) for x in (95e6, 120e6)]
    *_, line = tool.told(pairs)
    judged = f"mean absolute error 12.5%, worst 20.0%, 1 of 2 in the band in {tool.JUDGED}"
    assert line == f"{judged}."
    more = [(tool.Measured("dense", shape, 100e6), predicted(50e6)) for shape in ("mqa", "dense512")]
    *_, line = tool.told([*pairs, *more])
    assert line == f"{judged}; mean absolute error 31.2%, worst 50.0%, 1 of 4 in the band in all."
