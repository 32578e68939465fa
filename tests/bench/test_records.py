"""Records are lines that survive whatever comes later; only those of the same sources and device are built upon."""

from __future__ import annotations

import csv
import json

import pytest

from tests.bench.stand_ins import H200, record
from undertow.bench.records import CYCLES, TIMES, Record, RecordFile, write_csv
from undertow.record_file import RecordError

CELL = "mha-dense-8k-bf16"


def done(file: RecordFile, *providers: str, kind: str = TIMES, device: str = H200.device) -> set[str]:
    return file.done(kind, device, H200.sources, providers)


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "bench.jsonl"
    written = [record(CELL, "undertow", 500.0, blocks_ms=[1.0, 2.0]), record(CELL, "flex")]
    RecordFile(path).append(written)
    assert RecordFile(path).records == written
    assert RecordFile(path, fresh=True).records == [] and path.read_text() == ""


def test_a_cell_is_done_when_everybody_has_a_record_in_it(tmp_path):
    file = RecordFile(tmp_path / "bench.jsonl")
    file.append([record(CELL, "undertow", 500.0), record(CELL, "flex")])
    assert done(file, "undertow", "flex") == {CELL}  # that flex was wrong is a result
    assert done(file, "undertow", "flex", "torch-cudnn") == set()
    assert done(file, "undertow", kind=CYCLES) == set()
    assert done(file, "undertow", device="NVIDIA B200") == set()
    assert file.done(TIMES, H200.device, "other sources", ["undertow"]) == set()


def test_the_last_record_counts(tmp_path):
    file = RecordFile(tmp_path / "bench.jsonl")
    file.append([record(CELL, "undertow", 400.0), record(CELL, "flex", 300.0)])
    file.append([record(CELL, "undertow", 500.0), record(CELL, "undertow", kind=CYCLES, cycles=3e7)])
    assert [(r.provider, r.kind, r.tflops) for r in file.latest()] == [
        ("flex", TIMES, 300.0),
        ("undertow", TIMES, 500.0),
        ("undertow", CYCLES, None),
    ]


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "bench.jsonl"
    RecordFile(path).append([record(CELL, "undertow", 500.0)])
    whole = path.read_text()
    path.write_text(whole + whole[:100])
    assert len(RecordFile(path).records) == 1
    assert path.read_text() == whole


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"cell": "a"}\n', "not ours"])
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(RecordError, match="line 1 is no record of a benchmark"):
        RecordFile(path)
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path):
    with pytest.raises(RecordError, match="cannot be written"):
        RecordFile(tmp_path / "none" / "bench.jsonl")


def test_no_record_holds_what_is_no_number(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        RecordFile(tmp_path / "bench.jsonl").append([record(CELL, "undertow", float("nan"))])


def test_a_table_has_a_column_for_every_field(tmp_path):
    path = tmp_path / "bench.csv"
    write_csv(path, [record(CELL, "undertow", 500.0, blocks_ms=[1.0, 2.0])])
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row.keys() == Record.__dataclass_fields__.keys()
    assert (row["cell"], row["tflops"], json.loads(row["blocks_ms"]), row["cycles"]) == (CELL, "500.0", [1.0, 2.0], "")
