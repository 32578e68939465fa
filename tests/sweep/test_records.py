"""Records: the verdict on a cell, its line, and which lines of a file may be used again."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from tests.sweep.judgements import BY_NAME, CELL, DETERMINISTIC, FINDING, RIGHT, SECONDS, measured, record_of
from undertow.record_file import RecordError
from undertow.sweep import records
from undertow.sweep.records import RecordFile


def test_a_line_is_the_contract(tmp_path):
    path = tmp_path / "sweep.jsonl"
    RecordFile(path).append(record_of(RIGHT, cell=BY_NAME["mqa-local-causal-2k-bf16"]))
    (line,) = path.read_text().splitlines()
    values = json.loads(line)
    versions = values.pop("versions")
    assert set(versions) == {"undertow", "python", "nvidia-cutlass-dsl", "numpy", "torch"}
    assert len(values.pop("sources")) == 16
    assert values == {
        "cell": "mqa-local-causal-2k-bf16",
        "ok": True,
        "complaints": [],
        "broken": False,
        "seconds": {"elapsed": 2.0, "processor": 1.5},
        "size": {"heads": {"q": 32, "kv": 1}, "lengths": [200], "packed": False, "window": [180, 0]},
        "watched": {"heads": {"q": 4, "kv": 1}, "lengths": [200], "packed": False, "window": [180, 0]},
        "ideal": {"dq": 1e-3, "dk": 2e-3, "dv": 2e-3},
        "errors": {"dq": 1e-3, "dk": 2e-3, "dv": 3e-3},
        "ratio": 1.5,
        "findings": [],
        "schedules": {
            "split": {
                "errors": {"dq": 1e-3, "dk": 2e-3, "dv": 3e-3},
                "ratio": 1.5,
                "tiles": 4,
                "compute_barriers": 0.0,
                "instructions": {"mma": 160.0},
                "in_loops": {"mma": 120.0},
                "backend": "compiled",
                "setting": "fixed order, eager",
                "bits": None,
            }
        },
    }


def test_errors_are_the_largest_of_the_schedules_and_a_ratio_needs_an_ideal_above_noise():
    record = record_of(RIGHT, measured(schedule="slots", errors=(4e-3, 1e-3, 1e-3)))
    assert record.errors == {"dq": 4e-3, "dk": 2e-3, "dv": 3e-3}
    assert record.ratio == 4.0
    all_noise = records.record(CELL, records.Judged((0.0, 0.0, 0.0), (1e-7,) * 3, [RIGHT]), SECONDS)
    assert all_noise.ratio is None and all_noise.ok


def test_a_wrong_gradient_is_a_complaint_and_a_number_that_is_none_is_null():
    record = record_of(measured(errors=(1e-3, math.nan, math.inf), complaint="dk has an error of nan"))
    assert not record.ok and record.complaints == ["split: dk has an error of nan"]
    assert record.errors == {"dq": 1e-3, "dk": None, "dv": None} and record.ratio is None
    json.dumps(asdict(record), allow_nan=False)


def test_a_machine_that_has_stopped_leaves_a_record():
    stopped = measured(errors=None, backend=None, tiles=None, instructions=None, complaint="Deadlock: mma waits")
    record = record_of(stopped)
    assert not record.ok and not record.broken and record.errors is None and record.ratio is None


def test_a_finding_is_a_complaint():
    record = record_of(RIGHT, measured(schedule="slots", findings=[FINDING]))
    assert record.findings == [{"schedule": "slots", **FINDING, "setting": "fixed order, eager"}]
    assert record.complaints == ["slots, main: race: two warps, one cell"] and not record.ok


@pytest.mark.parametrize(
    ("aliased", "split", "complaints"),
    [
        (["a", "a", "a"], ["a", "a", "a"], []),
        (["a", "b", "c"], ["a", "a", "a"], ["aliased: bits in CTA order 1, 2 are not those of order 0"]),
        (["a", "a", "a"], ["b", "b", "b"], ["split: bits are not those of aliased"]),
    ],
)
def test_bits_must_be_the_same_in_all_orders_and_schedules(aliased, split, complaints):
    record = record_of(measured(schedule="aliased", bits=aliased), measured(bits=split), cell=DETERMINISTIC)
    assert record.complaints == complaints and record.ok == (not complaints)


def usable(path, schedules=("split",)) -> list[str]:
    return list(RecordFile(path).usable(BY_NAME.values(), schedules))


def test_records_of_the_same_sources_and_schedules_are_used_again(tmp_path):
    path = tmp_path / "sweep.jsonl"
    file = RecordFile(path)
    file.append(record_of(RIGHT))
    file.append(record_of(RIGHT, measured(schedule="slots"), cell=DETERMINISTIC))
    assert usable(path) == [CELL.name]
    assert usable(path, ("slots", "split")) == [DETERMINISTIC.name]
    assert not RecordFile(path).usable([DETERMINISTIC], ["split"])


def test_a_wrong_cell_is_known_a_broken_one_is_tried_again(tmp_path):
    path = tmp_path / "sweep.jsonl"
    file = RecordFile(path)
    file.append(record_of(measured(findings=[FINDING])))
    file.append(replace(records.broken(DETERMINISTIC, "MemoryError", SECONDS), schedules={"split": {}}))
    assert usable(path) == [CELL.name]


def test_records_of_other_sources_or_versions_are_not_used_but_kept(tmp_path, monkeypatch):
    path = tmp_path / "sweep.jsonl"
    other = {"cell": CELL.name, "sources": "of some other day", "fields": "of some other day"}
    path.write_text(json.dumps(other) + "\n")
    assert not usable(path)
    RecordFile(path).append(record_of(RIGHT))
    assert usable(path) == [CELL.name]
    assert json.loads(path.read_text().splitlines()[0]) == other


def test_the_fingerprint_follows_every_source_and_version(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "softmax.py"
    prints = []

    def fingerprint() -> str:
        records.fingerprint.cache_clear()
        return records.fingerprint()

    with monkeypatch.context() as patch:
        patch.setattr(records, "PACKAGE", tmp_path)
        for text in ("a = 1", "a = 2", "a = 2"):
            source.write_text(text)
            prints.append(fingerprint())
        (tmp_path / "machine.cpp").write_text("int main;")
        prints.append(fingerprint())
        patch.setattr(records, "versions", lambda: {"torch": "1.0"})
        prints.append(fingerprint())
    assert prints[1] == prints[2] and len(set(prints)) == 4
    fingerprint()


def test_a_line_that_was_not_written_to_its_end_is_dropped(tmp_path):
    path = tmp_path / "sweep.jsonl"
    RecordFile(path).append(record_of(RIGHT))
    whole = path.read_text()
    path.write_text(whole + whole[: len(whole) // 2])
    file = RecordFile(path)
    file.append(record_of(RIGHT, cell=DETERMINISTIC))
    assert usable(path) == [CELL.name, DETERMINISTIC.name]
    assert path.read_text().startswith(whole) and path.read_text().count("\n") == 2


def test_fresh_forgets(tmp_path):
    path = tmp_path / "sweep.jsonl"
    RecordFile(path).append(record_of(RIGHT))
    RecordFile(path, fresh=True)
    assert path.read_text() == ""


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("text", ["# Notes\n", "one line without an end", '{"cells": 3}\n', "[1, 2]\n", "17\n"])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, text, fresh):
    path = tmp_path / "notes.md"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"notes\.md: line 1 is no record of a sweep"):
        RecordFile(path, fresh)
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    with pytest.raises(RecordError, match="cannot be read"):
        RecordFile(tmp_path)
    with pytest.raises(RecordError, match="cannot be written"):
        RecordFile(tmp_path / "nowhere" / "sweep.jsonl")
