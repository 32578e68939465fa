"""`undertow sweep`: options, exit codes, the JSON object and what people read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sweep.judgements import FINDING, judged, measured
from undertow import cli
from undertow.kernels.backward import SCHEDULES
from undertow.sweep import run
from undertow.sweep.matrix import CELLS
from undertow.sweep.records import RecordFile

ONE, TWO = "mha-dense-512-bf16", "mha-dense-512-bf16-deterministic"


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Kernels that are right but for the cells named in `wrong`, and a folder to work in; a list of what was run."""
    ran: list[tuple[str, tuple[str, ...]]] = []
    wrong: set[str] = set()

    def judge(cell, schedules, arch):
        assert set(schedules) <= set(SCHEDULES[arch])
        ran.append((cell.name, tuple(schedules)))
        findings = [FINDING] * 5 if cell.name in wrong else []
        worse = {"errors": (1.2e-3, 2e-3, 2e-3)} if cell.name == TWO else {"errors": (1e-3, 2e-3, 2e-3)}
        return judged(*(measured(schedule=name, findings=findings, **worse) for name in schedules))

    monkeypatch.setattr(run, "judge", judge)
    monkeypatch.chdir(tmp_path)
    return ran, wrong


def sweep(*words: str) -> int:
    return cli.main(["sweep", "--jobs", "1", *words])


def test_all_is_well(kernels, capsys, tmp_path):
    assert sweep("--only", "mha-dense-512-*", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("seconds") >= 0
    assert report == {
        "cells": 2,
        "ok": 2,
        "findings": 0,
        "worst": {
            "cell": TWO,
            "ratio": pytest.approx(1.2),
            "errors": {"dq": 1.2e-3, "dk": 2e-3, "dv": 2e-3},
            "ideal": {"dq": 1e-3, "dk": 2e-3, "dv": 2e-3},
        },
    }
    assert len((tmp_path / "sweep.jsonl").read_text().splitlines()) == 2


def test_without_options_everything_runs_on_all_schedules(kernels):
    ran, _ = kernels
    assert sweep() == 0
    assert sorted(ran) == sorted((cell.name, ("aliased", "slots", "signals", "split")) for cell in CELLS)


def test_a_finding_is_exit_code_1_and_told(kernels, capsys):
    _, wrong = kernels
    wrong.add(ONE)
    assert sweep("--only", "mha-dense-512-*", "--schedule", "split") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"NOT OK {ONE}:"
    assert lines[1] == "  split, main: race: two warps, one cell"
    assert lines[4] == "  and 2 more, see its record"
    assert lines[-1].startswith("2 cells: 1 ok, 5 findings, in ")
    assert lines[-1].endswith("; records in sweep.jsonl")


def test_the_worst_cells_are_printed(kernels, capsys):
    assert sweep("--only", "mha-dense-*") == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("Worst cells, by error over that of an ideal pipeline:") + 2 :]
    assert table[0].split() == ["cell", "tiles", "error", "dQ", "dK", "dV", "ideal", "dQ", "dK", "dV", "ratio"]
    assert table[1].split() == [
        TWO,
        "4",
        "1.20e-03",
        "2.00e-03",
        "2.00e-03",
        "1.00e-03",
        "2.00e-03",
        "2.00e-03",
        "1.200",
    ]
    assert table[11] == "", "ten of sixteen"


def test_a_second_call_does_nothing_again_unless_it_is_asked_to(kernels, capsys):
    ran, _ = kernels
    words = ("--only", ONE, "--schedule", "split", "--output", "records.jsonl")
    assert [sweep(*words), sweep(*words)] == [0, 0] and len(ran) == 1
    assert "1 of them known before; records in records.jsonl" in capsys.readouterr().out
    assert sweep(*words, "--fresh") == 0 and len(ran) == 2
    assert len(RecordFile(Path("records.jsonl")).records) == 1
    assert sweep("--only", ONE, "--output", "records.jsonl") == 0 and len(ran) == 3


def test_architectures_share_a_file(kernels):
    ran, _ = kernels
    assert [sweep("--only", ONE, "--arch", arch) for arch in ("sm90", "sm100", "sm90")] == [0, 0, 0]
    assert ran == [(ONE, ("pingpong",)), (ONE, ("aliased", "slots", "signals", "split"))]


def test_several_patterns_are_joined(kernels):
    ran, _ = kernels
    assert sweep("--only", "*-local-512-*", "--only", "mqa-*-16k-fp16", "--schedule", "split") == 0
    assert {name for name, _ in ran} == {
        "mha-local-512-bf16",
        "mha-local-512-bf16-deterministic",
        "mqa-local-16k-fp16",
        "mqa-varlen-16k-fp16",
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--only", "mha-sparse-*"),
            "--only=mha-sparse-*: matches none of the 124 cells, which are called mha-dense-512",
        ),
        (("--jobs", "0"), "--jobs=0: must be at least 1"),
        (("--output", "nowhere/sweep.jsonl"), "nowhere/sweep.jsonl: cannot be written"),
        (("--output", "notes.md", "--fresh"), "notes.md: line 1 is no record of a sweep"),
        (("--schedule", "best"), "invalid choice: 'best'"),
        (("--arch", "sm90", "--schedule", "split"), "schedule 'split' is unknown on sm90; allowed: pingpong"),
    ],
)
def test_bad_input_is_exit_code_2_and_runs_nothing(kernels, capsys, tmp_path, words, told):
    ran, _ = kernels
    (tmp_path / "notes.md").write_text("# Notes\n")
    assert sweep(*words) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.out == "" and not ran
    assert (tmp_path / "notes.md").read_text() == "# Notes\n"
