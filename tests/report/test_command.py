"""`undertow report`: one file, whole or honest about what is missing; exit codes; bad input before any work."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from tests.report.reading import ids, loads, tree, unlabelled
from tests.report.test_sections import PREDICTED, side
from tests.timeline.handmade import timeline
from undertow import cli
from undertow.commands import predicted, report
from undertow.kernels.sm100.plan import SCHEDULES
from undertow.report import hazards
from undertow.report.bars import Bar
from undertow.report.page import Figure, Missing, Section, Table
from undertow.report.throughput import group_of
from undertow.timing.errors import TimingError
from undertow.timing.published import published
from undertow.timing.results import Prediction

RECORD = {"chip": "b200", "draws": 2, "seed": 0, "ports": {"shared": side(1.1), "own": side(1.2)}}
RECORD["throughput_of_cycles"] = {"power": 0.665, "why": "one pair"}


@pytest.fixture
def quick(monkeypatch):
    """The model and the emulator are replaced by what they might say."""

    def predict(chip, arguments: Namespace, step) -> predicted.Predicted:
        made = [timeline(name, barriers=2) for name in SCHEDULES]
        tiles = {one.kernel: Prediction(1000.0, 1000.0, (900.0, 1100.0), (), {"tma_load_latency": 0.5}) for one in made}
        bar = Bar(group_of(published().throughput[0]), "predicted, split", 800.0, (700.0, 900.0))
        return predicted.Predicted(RECORD, made, tiles, [bar], PREDICTED, PREDICTED)

    monkeypatch.setattr(report, "predict", predict)
    monkeypatch.setattr(report, "EVENTS", "none")
    monkeypatch.setattr(hazards, "section", lambda jobs, step: Section("hazards", "Hazards", "undertow check"))


def test_the_file_holds_every_section_and_nothing_from_elsewhere(quick, tmp_path, capsys):
    path = tmp_path / "report.html"
    missing = ["--bench", str(tmp_path / "a"), "--validation", str(tmp_path / "b"), "--events", str(tmp_path / "c")]
    assert cli.main(["report", "--json", "--output", str(path), *missing]) == cli.RIGHT
    told = json.loads(capsys.readouterr().out)
    html = path.read_text()
    assert told["output"] == str(path) and told["bytes"] == path.stat().st_size
    keys = [section["key"] for section in told["sections"]]
    assert keys == list(report.SECTIONS) == [s.get("id") for s in tree(html).iter("section")][1:]
    assert [key for key, section in zip(keys, told["sections"]) if section["missing"]] == [
        "timelines",
        "throughput",
        "errors",
    ]
    assert not unlabelled(html) and not loads(html) and len(ids(html)) == len(set(ids(html)))
    links = [link.get("href") for link in tree(html).iter("a")]
    assert links == [f"#{key}" for key in keys]


def test_the_same_input_gives_the_same_bytes(quick, tmp_path):
    paths = [tmp_path / name for name in ("one.html", "two.html")]
    for path in paths:
        assert cli.main(["report", "--output", str(path)]) == cli.RIGHT
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_what_is_skipped_is_not_made_and_says_so(quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report, "predict", lambda *_: pytest.fail("nothing needs the model"))
    path = tmp_path / "report.html"
    skipped = ("timelines", "ablation", "hazards")
    options = [word for key in skipped for word in ("--skip", key)]
    assert cli.main(["report", "--json", "--output", str(path), *options]) == cli.RIGHT
    missing = {section["key"]: section["missing"] for section in json.loads(capsys.readouterr().out)["sections"]}
    assert all(f"--skip {key}" in missing[key][0] for key in skipped)
    assert "because of --skip timelines" in path.read_text()


def test_what_is_wrong_is_written_and_told(quick, monkeypatch, tmp_path, capsys):
    wrong = Section("hazards", "Hazards", "undertow check", wrong=["`split`: 1 findings"])
    monkeypatch.setattr(hazards, "section", lambda jobs, step: wrong)
    path = tmp_path / "report.html"
    assert cli.main(["report", "--output", str(path)]) == cli.WRONG
    assert "split" in capsys.readouterr().out and 'role="alert"' in path.read_text()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--draws", "1"], "--draws=1: must be at least 2"),
        (["--jobs", "0"], "--jobs=0: must be at least 1"),
        (["--chip", "h200"], "runs sm_90a"),
        (["--chip", "none such"], "none such"),
        (["--output", "no such folder/report.html"], "no such folder"),
    ],
)
def test_bad_input_is_refused_before_any_work(quick, monkeypatch, tmp_path, capsys, options, complaint):
    monkeypatch.setattr(report, "predict", lambda *_: pytest.fail("no work before the options are checked"))
    output = [] if "--output" in options else ["--output", str(tmp_path / "report.html")]
    assert cli.main(["report", *output, *options]) == cli.BAD_INPUT
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_records_of_something_else_are_refused(quick, tmp_path, capsys):
    notes = tmp_path / "notes.jsonl"
    notes.write_text("notes\n")
    for option in ("--bench", "--validation", "--events"):
        assert cli.main(["report", "--output", str(tmp_path / "r.html"), option, str(notes)]) == cli.BAD_INPUT
        assert "notes.jsonl" in capsys.readouterr().err


def test_a_kernel_that_the_model_refuses_is_shown_as_it_was_traced(monkeypatch, tmp_path):
    def refuse(*_):
        raise TimingError("control flow depends on time")

    path = tmp_path / "trace.json"
    path.write_text("{}")
    monkeypatch.setattr(predicted, "read_timeline", lambda *_: timeline("traced"))
    monkeypatch.setattr(predicted, "recorded", refuse)
    figure, missing = predicted.traced(path, Namespace(seed=0), lambda text: None)
    assert isinstance(figure, Figure) and figure.source.label == "measured"
    assert isinstance(missing, Missing) and "control flow depends on time" in missing.what


def test_hazards_are_found_without_a_guard_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(hazards, "COMPLETIONS", ("eager",))
    monkeypatch.setattr(hazards, "SCHEDULES", ("split",))
    section = hazards.section(jobs=1)
    assert section.wrong == []
    (table,) = (part for part in section.parts if isinstance(part, Table))
    counts = {str(row[0]).strip("`"): str(row[2]) for row in table.rows}
    assert list(counts) == ["split", "aliased-without-P-guard", "aliased-without-dS-guard"]
    assert [count == "0" for count in counts.values()] == [True, False, False]
    assert sum(isinstance(part, Figure) for part in section.parts) == 2
