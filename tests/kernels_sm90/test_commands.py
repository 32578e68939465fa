"""The commands take the architecture of the kernels."""

from __future__ import annotations

import json

import pytest

from undertow import cli


def answer(capsys, *arguments: str) -> tuple[int, dict]:
    code = cli.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_verify_compares_the_kernels_with_float64(capsys):
    code, report = answer(capsys, "verify", "--arch", "sm90", "--seqlen-q", "200", "--seqlen-k", "130")
    (run,) = report["runs"]
    assert code == 0 and report["ok"] and run["ok"]
    assert (run["schedule"], run["tile_iterations"]) == ("pingpong", 2 * 2 * 2)
    for name, error in run["errors"].items():
        assert error <= 1.25 * run["ideal"][name] + 1e-6


def test_check_finds_nothing_not_even_advice(capsys):
    shape = (
        "--seqlen-q",
        "300",
        "--seqlen-k",
        "130",
        "--strict",
        "--seeds",
        "1",
        "--completion",
        "late",
        "--jobs",
        "1",
    )
    code, report = answer(capsys, "check", "--arch", "sm90", *shape)
    assert (code, report["findings"], report["runs"]) == (0, [], 1)


@pytest.mark.parametrize(("command", "arch", "schedule"), [("verify", "sm90", "split"), ("check", "sm100", "pingpong")])
def test_schedules_of_another_architecture_are_refused(capsys, command, arch, schedule):
    assert cli.main([command, "--arch", arch, "--schedule", schedule]) == 2
    assert f"schedule '{schedule}' is unknown on {arch}; allowed: " in capsys.readouterr().err
