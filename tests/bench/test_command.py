"""`undertow bench` on a machine without a GPU: it says what is needed, and tells what another machine has measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from tests.bench.stand_ins import H200, FakeMonitor, FakeStopwatch, Ideal, record
from undertow.bench import charts
from undertow.bench.comparison import Lead, by_factor, geometric_mean, leads, table
from undertow.bench.records import CYCLES, TIMES, RecordFile
from undertow.cli import main
from undertow.commands import bench
from undertow.record_file import RecordError

CELL, OTHER = "mha-dense-8k-bf16", "mha-causal-8k-bf16"
RECORDS = [
    record(CELL, "undertow", 600.0, ceiling_tflops=661.2),
    record(CELL, "flash-attn-4", 500.0),
    record(CELL, "torch-cudnn", 400.0),
    record(OTHER, "undertow", 480.0),
    record(OTHER, "flash-attn-3", 500.0),
    record(OTHER, "flex", complaint="dq errs"),
    record(CELL, "undertow", kind=CYCLES, cycles=28e6),
    record(CELL, "flash-attn-4", kind=CYCLES, cycles=32.2e6),
]


@pytest.fixture
def output(tmp_path) -> Path:
    path = tmp_path / "bench.jsonl"
    RecordFile(path).append(RECORDS)
    return path


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_nothing_is_measured_and_no_file_is_made(without_gpu, tmp_path, capsys):
    path = tmp_path / "new.jsonl"
    assert main(["bench", "--output", str(path), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and not path.exists()
    assert "has no CUDA device" in said.err and "--report words, tables and draws" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "--rounds=0: must be at least 1"),
        (["--block-seconds", "0"], "--block-seconds=0.0: must be above 0 and below 60"),
        (["--jobs", "0"], "--jobs=0: must be at least 1"),
        (["--only", "mha-dense-9k-*"], "--only=mha-dense-9k-*: matches none of the 124 cells"),
        (["--report", "--fresh"], "--report --fresh: there would be nothing to report"),
        (["--report", "--output", "none.jsonl"], "none.jsonl: cannot be read: there is no such file"),
        (["--provider", "fa5"], "invalid choice: 'fa5'"),
    ],
)
def test_bad_words_are_refused_by_name(without_gpu, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == "" and not list(tmp_path.iterdir())


def test_records_of_another_machine_are_told(without_gpu, output, tmp_path, capsys):
    listed, drawn = tmp_path / "bench.csv", tmp_path / "plots"
    words = ["bench", "--report", "--output", str(output), "--csv", str(listed), "--plots", str(drawn)]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["records"]) == (True, 8)
    assert report["wrong"] == [{"cell": OTHER, "provider": "flex", "kind": "times", "complaint": "dq errs"}]
    assert report["times"]["geometric_mean_over_best_peer"] == pytest.approx((1.2 * 0.96) ** 0.5)
    assert report["times"]["worst"] == {
        "cell": OTHER,
        "device": H200.device,
        "best_peer": "flash-attn-3",
        "ratio": pytest.approx(0.96),
    }
    assert report["cycles"]["geometric_mean_over_best_peer"] == pytest.approx(1.15)
    assert report["cycles"]["by_factor"]["heads"] == {"mha": {"geometric_mean": pytest.approx(1.15), "cells": 1}}
    with listed.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 8
    assert sorted(path.name for path in drawn.iterdir()) == ["NVIDIA-H200-mha.png", "NVIDIA-H200-mha.svg"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "1.073 x the best of the others (geometric mean, cells by times: 2), worst 0.960 x flash-attn-3 in" in text
    assert "  by mask: dense 1.200 (1), causal 0.960 (1)" in text.splitlines()
    assert "WRONG mha-causal-8k-bf16, flex: dq errs" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith(CELL) and "+-" in line)
    assert row == [CELL, *["600", "+-1.5%", "500", "+-1.5%", "400", "+-1.5%", "-", "-", "661", "1.200"]]


def test_only_what_is_asked_for_is_judged(without_gpu, output, capsys):
    assert main(["bench", "--report", "--output", str(output), "--only", "mha-dense-*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["times"]["cells"] == 1


def test_among_others_alone_who_is_wrong_is_a_finding(without_gpu, tmp_path, capsys):
    path = tmp_path / "bench.jsonl"
    RecordFile(path).append([RECORDS[1], RECORDS[5]])
    assert main(["bench", "--report", "--output", str(path)]) == 1
    assert main(["bench", "--report", "--output", str(path), "--only", CELL]) == 0
    capsys.readouterr()


def test_a_cell_that_ours_did_not_get_through_is_a_finding(without_gpu, tmp_path, capsys):
    path = tmp_path / "bench.jsonl"
    RecordFile(path).append([record(CELL, "undertow", status="unable", complaint="no kernels"), RECORDS[1]])
    assert main(["bench", "--report", "--output", str(path)]) == 1
    assert "UNABLE mha-dense-8k-bf16, undertow: no kernels" in capsys.readouterr().out


def test_a_run_measures_what_is_missing(tmp_path, monkeypatch, capsys):
    measured = []

    class Small(bench.Bench):
        def times(self, cell, say=lambda text: None):
            measured.append(cell.name)
            return [record(cell.name, provider.name, 100.0) for provider in self.providers]

    monkeypatch.setattr(bench, "Bench", Small)
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(bench, "uuid_of_current", lambda: "GPU-0")
    monkeypatch.setattr(bench.warm, "WORTH_TASKS", 2)
    monkeypatch.setattr(bench.warm, "in_processes", lambda work, todo, jobs: [(0, "no compiler"), (1, None)])
    monkeypatch.setattr(bench, "NvmlMonitor", lambda uuid: with_complaint(FakeMonitor()))
    monkeypatch.setattr(bench, "CudaStopwatch", lambda: FakeStopwatch(lambda *_: 0.1))
    monkeypatch.setattr(bench, "examine", lambda revision, monitor: H200)
    absent = Ideal("absent")
    absent.missing = lambda: "not installed"
    monkeypatch.setattr(bench, "PROVIDERS", {"undertow": Ideal("undertow"), "flex": Ideal("flex"), "absent": absent})
    words = ["bench", "--output", str(tmp_path / "bench.jsonl"), "--only", "mha-dense-[12]k-bf16", "--json"]
    assert main(words) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert measured == ["mha-dense-1k-bf16", "mha-dense-2k-bf16"]
    assert (report["records"], report["absent"], report["times"]["cells"]) == (4, {"absent": "not installed"}, 2)
    assert "undertow bench: no clocks" in said.err
    assert "undertow, mha-dense-1k-bf16: no compiler" in said.err
    assert main([*words, "--only", "mha-dense-4k-bf16"]) == 0
    assert measured[2:] == ["mha-dense-4k-bf16"]
    assert main([*words, "--fresh"]) == 0 and len(measured) == 5
    assert main([*words, "--provider", "absent"]) == 2
    assert "--provider=absent: not installed" in capsys.readouterr().err


def with_complaint(monitor: FakeMonitor) -> FakeMonitor:
    vars(monitor)["complaint"] = "no clocks"
    return monitor


def test_leads_are_over_the_best_other_one():
    assert leads(RECORDS, TIMES) == [
        Lead(CELL, H200.device, "flash-attn-4", 600 / 500),
        Lead(OTHER, H200.device, "flash-attn-3", 480 / 500),
    ]
    assert [lead.ratio for lead in leads(RECORDS, CYCLES)] == [pytest.approx(32.2 / 28)]
    assert leads(RECORDS[:1], TIMES) == [] and geometric_mean([]) is None


def test_means_are_told_for_every_value_of_a_factor():
    found = [
        Lead("mha-dense-8k-bf16", "x", "y", 2.0),
        Lead("gqa-dense-8k-fp16", "x", "y", 0.5),
        Lead("mha-varlen-512-bf16-deterministic", "x", "y", 1.5),
        Lead("of another matrix", "x", "y", 9.0),
    ]
    assert {factor: list(values) for factor, values in by_factor(found).items()} == {
        "heads": ["mha", "gqa"],
        "mask": ["dense", "packed"],
        "length": ["8192", "512"],
        "dtype": ["bf16", "fp16"],
        "mode": ["any order", "deterministic"],
    }
    assert by_factor(found)["mask"] == {"dense": (pytest.approx(1.0), 2), "packed": (1.5, 1)}
    assert by_factor(found)["heads"]["mha"] == (pytest.approx(3**0.5), 2)


def test_machines_are_not_compared_with_each_other():
    elsewhere = [record(CELL, "flash-attn-4", 900.0, device="NVIDIA B200")]
    assert leads([RECORDS[0], *elsewhere], TIMES) == []
    lines = table([RECORDS[0], *elsewhere], TIMES)
    assert [line.split(",")[0] for line in lines if "TFLOP/s" in line] == ["NVIDIA H200", "NVIDIA B200"]


def test_pictures_have_the_cells_that_belong_together(tmp_path):
    records = [record(name, "undertow", 500.0) for name in ("gqa-dense-512-bf16", "gqa-causal-8k-fp16")]
    records += [record(name, "flex", 300.0) for name in ("mha-local-512-bf16", "mha-varlen-512-bf16")]
    records += [record("gqa-dense-512-bf16-deterministic", "undertow", 490.0), record(CELL, "flex")]
    found = charts.pictures(records)
    assert {name: len(of_picture) for name, of_picture in found.items()} == {
        "NVIDIA-H200-gqa": 2,
        "NVIDIA-H200-local-varlen": 2,
        "NVIDIA-H200-gqa-deterministic": 1,
    }
    paths = charts.draw(tmp_path / "plots", records)
    assert len(paths) == 6
    svg = (tmp_path / "plots" / "NVIDIA-H200-gqa.svg").read_bytes()
    assert b"<svg" in svg and svg.count(b"<!-- dense -->") + svg.count(b"<!-- causal -->") == 2
    charts.draw(tmp_path / "again", records)
    assert (tmp_path / "again" / "NVIDIA-H200-gqa.svg").read_bytes() == svg


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        charts.draw(tmp_path / "file", RECORDS)
