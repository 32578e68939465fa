"""`undertow timeline` end to end with few draws: what it says, what it refuses, what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from undertow import cli

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
RESULTS = Path(__file__).resolve().parents[2] / "results" / "hopper"
FEW = ("--draws", "4", "--jobs", "1")


def answer(capsys, *arguments: str) -> tuple[int, dict]:
    code = cli.main(["timeline", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments: str) -> str:
    assert cli.main(["timeline", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_a_schedule_has_its_time_and_where_it_goes(capsys, tmp_path):
    picture, trace = tmp_path / "tile.svg", tmp_path / "tile.pftrace"
    code, report = answer(capsys, "--schedule", "split", *FEW, "--svg", str(picture), "--perfetto", str(trace))
    (run,) = report["runs"]
    assert (code, report["chip"], report["port"], run["schedule"], run["mask"]) == (
        0,
        "b200",
        "unknown",
        "split",
        "dense",
    )
    low, high = run["band"]
    assert 1280 < low <= run["cycles_per_tile"] <= high < 6000  # the tensor cores alone need 1280
    tiles_of_an_sm = 8 * 32 * 64 * 64 / 148
    assert run["launch_cycles"]["median"] > tiles_of_an_sm * low
    assert 0 < run["utilisation"]["tensor"] < 1
    assert {"mma", "compute", "load", "reduce"} <= run["stalls"].keys()
    assert "mma_shares_port" in run["assumed"]
    assert all(-1 <= rank <= 1 for rank in run["sensitivity"].values())
    assert picture.read_text().startswith("<svg")
    assert trace.stat().st_size > 1000


def test_sm90_is_predicted_for_an_h200(capsys):
    """What was measured there, of the same launch, is no more than 20% away: the worst that is promised."""
    code, report = answer(capsys, "--arch", "sm90", *FEW)
    (run,) = report["runs"]
    assert (code, report["chip"], report["port"], run["mask"]) == (0, "h200", "shared", "dense")
    records = (json.loads(line) for line in (RESULTS / "cycles.jsonl").read_text().splitlines())
    measured = next(x["cycles"] for x in records if (x["kernel"], x["shape"]) == ("dense", "dense"))
    assert run["launch_cycles"]["point"] == pytest.approx(measured, rel=0.2)


def test_any_kernel_has_the_time_of_a_cta(capsys):
    own = ("--ptx", str(EXAMPLES / "scale.ptx"), "--launch", str(EXAMPLES / "scale.toml"))
    code, report = answer(capsys, *own, *FEW)
    (run,) = report["runs"]
    assert (code, report["chip"]) == (0, "b200")
    assert 100 < run["cta_cycles"]["median"] < 100_000
    assert run["cycles_per_tile"] is None  # it has no loop over tiles


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--deterministic",), "--deterministic: not modelled; CTAs add to dQ in turns"),
        (("--cu-seqlens-q", "0,100"), "--cu-seqlens-q: the launch of packed sequences has no timing model"),
        (("--draws", "1"), "--draws=1: must be at least 2"),
        (("--jobs", "0"), "--jobs=0: must be at least 1"),
        (("--chip", "h200"), "chip h200 runs sm_90a: the kernel is for sm_100a"),
        (("--chip", "h300"), "chip 'h300': no such chip and no such file"),
        (("--kv-heads", "5"), "kv_heads=5: must divide heads=32"),
        (("--batch", "0"), "batch=0: must be at least 1"),
        (("--arch", "sm90", "--schedule", "split"), "schedule 'split' is unknown on sm90"),
        (("--arch", "sm90", "--softcap", "30"), "softcap is not there on sm_90a"),
        (("--ablation", "--causal"), "--causal: not allowed beside --ablation"),
        (("--ablation", "--arch", "sm90"), "--arch: not allowed beside --ablation"),
        (("--ptx", "x.ptx"), "--ptx: needs --launch, too"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(capsys, arguments, complaint):
    assert complaint in refusal(capsys, *arguments)


def test_a_kernel_that_fetches_its_work_is_refused(capsys, tmp_path):
    ptx = tmp_path / "fetches.ptx"
    ptx.write_text("// clusterlaunchcontrol.try_cancel.async\n" + (EXAMPLES / "scale.ptx").read_text())
    complaint = refusal(capsys, "--ptx", str(ptx), "--launch", str(EXAMPLES / "scale.toml"))
    assert "clusterlaunchcontrol" in complaint and "not modelled" in complaint


@pytest.mark.parametrize("name", ["mufu_interval", "launch_cycles"])
def test_a_chip_file_that_lacks_a_constant_is_refused(capsys, tmp_path, name):
    path = tmp_path / "mine.toml"
    text = (Path(cli.__file__).parent / "timing" / "chips" / "b200.toml").read_text()
    path.write_text(text.replace(f"[constants.{name}]", "[constants.something_else]"))
    assert f"chip b200 lacks {name}" in refusal(capsys, "--chip", str(path))
