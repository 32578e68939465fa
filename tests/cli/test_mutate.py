"""`undertow mutate` on a tiny kernel: exit codes, the JSON object, the words, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.mutate.kernels import HANDOVER, LAUNCH, SURVIVORS, without_the_wait_for_full
from undertow import cli

ROW_KEYS = {
    "role", "function", "kind", "form", "about", "place", "ordinal", "lines", "verdict", "rules", "strict", "problem",
    "setting", "shown", "runs", "category", "because", "protocol_only",
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """The words that name the tiny kernel, its launch and its reasons."""
    for name, text in (("k.ptx", HANDOVER), ("k.toml", LAUNCH), ("survivors.toml", SURVIVORS)):
        (tmp_path / name).write_text(text)
    return ["--ptx", str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "k.toml")]


@pytest.fixture
def explained(files, tmp_path):
    return [*files, "--survivors", str(tmp_path / "survivors.toml")]


def run(capfd, *words: str) -> tuple[int, str, str]:
    code = cli.main(["mutate", *words])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def test_with_reasons_for_all_survivors_all_is_well(capfd, explained):
    code, out, _ = run(capfd, *explained, "--json")
    report = json.loads(out)
    rows, seconds = report.pop("rows"), report.pop("seconds")
    assert code == 0 and seconds > 0
    assert report == {
        "schedule": "k.ptx", "mutants": 10, "killed": 6, "explained": 4, "unexplained": 0, "redundant": 1,
        "protocol_only": 0, "stale": [], "runs": 6 + 4 * 7,
    }  # fmt: skip
    assert len(rows) == 10 and all(set(row) == ROW_KEYS for row in rows)
    survivors = [row for row in rows if row["verdict"] == "survived"]
    assert {row["category"] for row in survivors} == {"first-pass", "redundant", "tail"}
    assert all(row["because"] and not row["rules"] for row in survivors)
    killed = [row for row in rows if row["verdict"] != "survived"]
    assert all(row["rules"] and row["shown"] and row["setting"] and row["because"] is None for row in killed)


def test_an_unexplained_survivor_is_exit_code_1(capfd, files):
    code, out, _ = run(capfd, *files, "--json", "--seeds", "1", "--completion", "late")
    report = json.loads(out)
    assert code == 1 and report["unexplained"] == 4 and report["explained"] == 0
    code, out, _ = run(capfd, *files, "--seeds", "1", "--completion", "late")
    assert code == 1
    assert "UNEXPLAINED: producer: wait empty (before the loop), PTX line 27: nothing noticed that it is gone" in out
    assert "k.ptx: 10 mutants, 6 killed, 0 survivors explained, 4 unexplained" in out


def test_reasons_are_printed_beside_the_table(capfd, explained):
    code, out, _ = run(capfd, *explained, "--seeds", "1")
    assert code == 0
    table = out.splitlines()
    assert table[0].split()[:5] == ["verdict", "role", "kind", "about", "place"]
    assert sum(line.startswith("killed-by-rule") for line in table) == 6
    assert "Survived, first-pass: producer: wait empty (before the loop), PTX line 27" in out
    assert "  A fresh barrier passes parity 1, so the wait for the first round never blocks." in out


def test_only_some_kinds(capfd, explained):
    code, out, _ = run(capfd, *explained, "--json", "--kind", "wait", "--kind", "arrive", "--seeds", "1")
    report = json.loads(out)
    assert code == 0 and {row["kind"] for row in report["rows"]} == {"wait", "arrive"} and report["mutants"] == 5


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ptx", "none.ptx", "--launch", "none.toml"], "none.ptx: cannot be read"),
        (["--ptx", "none.ptx"], "--ptx: needs --launch, too"),
        (["--launch", "none.toml"], "--launch: needs --ptx, too"),
        (["--seeds", "0"], "seeds=0: must be at least 1"),
        (["--jobs", "0"], "--jobs=0: must be at least 1"),
        (["--survivors", "none.toml"], "none.toml: cannot be read"),
        (["--seqlen-q", "0", "--seeds", "1"], "seqlen_q=0: must be at least 1"),
        (["--schedule", "best"], "argument --schedule: invalid choice: 'best'"),
        (["--kind", "waits"], "argument --kind: invalid choice: 'waits'"),
    ],
    ids=" ".join,
)
def test_bad_input_is_exit_code_2(capfd, words, complaint):
    code, out, err = run(capfd, *words)
    assert code == 2 and out == "" and complaint in err


def test_a_kernel_with_findings_is_bad_input(capfd, files, tmp_path):
    (tmp_path / "k.ptx").write_text(without_the_wait_for_full())
    code, out, err = run(capfd, *files)
    assert code == 2 and out == "" and "k.ptx has findings before anything is taken away" in err


def test_options_of_schedules_exclude_a_kernel_of_ones_own(capfd, files):
    code, _, err = run(capfd, *files, "--schedule", "split", "--heads", "2")
    assert code == 2 and "--heads, --schedule: not allowed beside --ptx" in err
