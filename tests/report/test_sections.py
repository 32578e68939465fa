"""What each section shows of its data, and that it says so where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.stand_ins import record
from tests.report.reading import SVG, loads, tree, unlabelled
from tests.timeline.handmade import timeline
from undertow.bench.records import RecordError, RecordFile
from undertow.report import ablation, chips, errors, maps, throughput, timelines
from undertow.report.page import Label, Section, Source, page
from undertow.timing.constants import CONSTANTS
from undertow.timing.published import published
from undertow.timing.results import Prediction

PREDICTED = Source(Label.PREDICTED, "a chip made by hand", "undertow timeline")
CHIP = """
name = "handmade"
what = "a chip for tests"
arch = "sm_100a"
num_sms = 2
[constants.fast]
value = 2.0
range = [1.0, 3.0]
unit = "cycles"
source = "somebody's table"
date = 2026-01-02
confidence = "published"
[constants.mufu_latency]
value = 50.0
range = [50.0, 50.0]
unit = "cycles"
source = "nothing"
date = 2026-01-03
confidence = "assumed"
"""


def html_of(section: Section) -> str:
    html = page("t", "s", [section])
    assert not unlabelled(html) and not loads(html)
    return html


def cells(html: str) -> list[list[str]]:
    """The rows of all tables, as text."""
    return [["".join(cell.itertext()) for cell in row] for body in tree(html).iter("tbody") for row in body]


def hints(html: str) -> list[str]:
    return [title.text or "" for title in tree(html).iter(f"{SVG}title")]


def test_maps_come_from_the_plans():
    rows = cells(html_of(maps.section()))
    assert [row[3] for row in rows[:4]] == ["5", "3", "3", "0"]  # barriers per tile
    assert ["sm100, all schedules", "sdS", "82944", "32768", "1", "128 x 128 bf16"] in rows


def test_measured_bars_have_the_numbers_of_the_records(tmp_path):
    path = tmp_path / "bench.jsonl"
    times = {"median_ms": 2.0, "p20_ms": 1.9, "p80_ms": 2.2}
    RecordFile(path).append(
        [
            record("mha-dense-8k-bf16", "undertow", 600.0, **times),
            record("mha-dense-8k-bf16", "flash-attn-4", 500.0, **times),
            record("mha-dense-8k-bf16", "flex"),
        ]
    )
    html = html_of(throughput.section(path))
    assert "8k, undertow: 600, 545 to 632" in hints(html)
    assert ["mha-dense-8k-bf16", "600", "500", "wrong", "1.200 x flash-attn-4"] in cells(html)


def test_published_bars_stand_beside_what_is_predicted(tmp_path):
    shape = published().throughput[0]
    group = throughput.group_of(shape)
    bar = throughput.Bar(group, "predicted, split", 800.0, (700.0, 900.0))
    html = html_of(throughput.section(tmp_path / "none", [bar], PREDICTED))
    told = hints(html)
    assert "dense 2 x 32k 32:32 heads, published, baseline: 731" in told
    assert "dense 2 x 32k 32:32 heads, predicted, split: 800, 700 to 900" in told
    (figure,) = tree(html).iter("figure")
    assert figure.get("data-label") == "published predicted"


@pytest.mark.parametrize("content", [None, ""])
def test_without_measurements_the_section_says_so(tmp_path, content):
    path = tmp_path / "bench.jsonl"
    if content is not None:
        path.write_text(content)
    section = throughput.section(path)
    (missing,) = section.missing
    assert str(path) in missing and "Not here" in html_of(section)


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("notes\n")
    with pytest.raises(RecordError, match=r"notes\.txt"):
        throughput.section(path)
    with pytest.raises(errors.ErrorsFileError, match=r"notes\.txt: line 1"):
        errors.section(path)


def test_timelines_tell_lengths_units_and_waits():
    made = [timeline("aliased", tile=1250.0, barriers=5), timeline("split", assumed=("tma_load_latency",))]
    known = {
        m.kernel: Prediction(m.cycles_per_tile, 1100.0, (900.0, 1300.0), (), {"tma_load_latency": -0.5}) for m in made
    }
    html = html_of(timelines.section(made, known, PREDICTED))
    rows = cells(html)
    assert ["aliased", "1250", "1100", "900", "1300", "0"] in rows and [
        "split",
        "1000",
        "1100",
        "900",
        "1300",
        "1",
    ] in rows
    assert ["tensor", "50%", "50%"] in rows and ["compute", "mma_compute_s.full", "125", "100"] in rows
    assert ["tma_load_latency", "-0.50", "-0.50"] in rows
    assert len(list(tree(html).iter("figure"))) == 3


def test_a_traced_kernel_stands_below_its_prediction_with_both_sources():
    traced = Source(Label.MEASURED, "a trace", "run-iket")
    part = timelines.traced(timeline("traced"), (timeline("pingpong"), PREDICTED), traced, "in steps of 32 ns")
    (figure,) = tree(html_of(Section("timelines", "Timelines", "", [part]))).iter("figure")
    assert figure.get("data-label") == "predicted measured"
    said = [text.text or "" for text in figure.iter(f"{SVG}text")]
    assert said.index("pingpong") < said.index("traced")
    assert any(text.startswith("measured on made by hand (in steps of 32 ns)") for text in said)


def test_a_traced_kernel_stands_alone_where_nothing_is_predicted():
    part = timelines.traced(timeline("traced"), None, Source(Label.MEASURED, "a trace"), "in steps of 32 ns")
    (figure,) = tree(html_of(Section("timelines", "Timelines", "", [part]))).iter("figure")
    assert figure.get("data-label") == "measured"
    assert not any("predicted" in (text.text or "") for text in figure.iter(f"{SVG}text"))


def side(median: float) -> dict:
    """What the command says of one assumption about the port."""
    run = {"schedule": "split", "mask": "dense", "cycles_per_tile": 2900.0, "band": [2500.0, 3300.0]}
    judged = {"schedule": "split", "mask": "dense", "median": median, "band": [median - 0.1, median + 0.1]}
    return {
        "runs": [{**run, "utilisation": {"tensor": 0.5, "mufu": 0.3}}],
        "in_published_order": {"dense": True},
        "published": [
            {**judged, "quantity": "cycles", "published": [1.235, 1.235], "verdict": "inside", "independent": True},
            {**judged, "quantity": "throughput", "published": [1.13, 1.15], "verdict": "inside", "independent": False},
        ],
    }


def test_the_ablation_shows_both_ports_beside_what_is_published():
    power = {"power": 0.665, "why": "one pair"}
    told = {"chip": "b200", "draws": 8, "seed": 0, "ports": {"shared": side(1.1), "own": side(1.2)}}
    html = html_of(ablation.section({**told, "throughput_of_cycles": power}))
    bars = hints(html)
    assert "split dense, published: 1.14, 1.13 to 1.15" in bars
    assert "split dense, predicted, the port of shared memory for MMA operands, too: 1.10, 1.00 to 1.20" in bars
    assert "split dense, predicted, a port of their own for MMA operands: 1.20, 1.10 to 1.30" in bars
    rows = cells(html)
    assert ["split, dense", "cycles", "own", "1.235", "1.200", "1.100 to 1.300", "inside"] in rows
    assert [
        "split, dense",
        "throughput",
        "own",
        "1.130 to 1.150",
        "1.200",
        "1.100 to 1.300",
        "inside, not independent",
    ] in rows
    assert "not a prediction" in html and "2 of 2 with a port of their own" in html


def test_errors_of_the_model_are_told_one_by_one_and_together(tmp_path):
    path = tmp_path / "errors.jsonl"
    known = {"kernel": "dense", "shape": "dense", "gpu": "NVIDIA H200"}
    good = {**known, "measured": 2e6, "predicted": {"median": 2.1e6, "band": [1.9e6, 2.3e6]}}
    bad = {**known, "measured": 4e6, "predicted": {"median": 3.4e6, "band": [3.2e6, 3.6e6]}}
    path.write_text("".join(json.dumps(one) + "\n" for one in (good, bad)))
    html = html_of(errors.section(path))
    assert ["dense", "dense", "2.00", "2.10", "1.90", "2.30", "+5.0%", "yes"] in cells(html)
    assert "Mean absolute error 10.0%, worst 15.0%; 1 of 2 measurements lie in the band" in html


def test_without_a_validation_the_section_says_so(tmp_path):
    assert errors.section(tmp_path / "none").missing
    (tmp_path / "empty").write_text("")
    assert errors.section(tmp_path / "empty").missing


@pytest.mark.parametrize(
    "line",
    [
        '{"kernel": "a"}',
        '{"kernel": "a", "shape": "b", "gpu": "c", "measured": 0, "predicted": {"median": 1, "band": [1, 2]}}',
    ],
)
def test_records_that_cannot_be_errors_are_refused(tmp_path, line):
    path = tmp_path / "errors.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(errors.ErrorsFileError, match="line 1"):
        errors.read(path)


def test_constants_have_their_own_labels(tmp_path):
    path = Path(tmp_path / "handmade.toml")
    path.write_text(CHIP)
    html = html_of(chips.section([str(path)]))
    (fast, slow) = (row for body in tree(html).iter("tbody") for row in body)
    assert [cell.get("data-label") for cell in fast][1:4] == ["published"] * 3
    assert [cell.get("data-label") for cell in slow][1:4] == ["assumed"] * 3
    assert [cell.text for cell in fast][1:4] == ["2", "1", "3"]
    assert "a chip for tests. 2 constants: 1 published, 1 assumed" in html
    assert [cell.text for cell in (*fast, *slow)][7::8] == [None, CONSTANTS["mufu_latency"].what]
    assert chips.section([]).missing
