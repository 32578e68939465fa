"""Chip files: what was measured replaces, what was not stays; and the command around them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from undertow.calibrate.benchmark import Measured
from undertow.calibrate.chipfile import About, CalibrationError, chip_of, from_records, records, to_toml
from undertow.cli import main
from undertow.timing.chip import Chip, Constant, read_chip
from undertow.timing.constants import constants_of

ABOUT = About("here", 'a "GPU"', 132, "sm_90a", "580.1", "undertow calibrate", date(2026, 11, 30))
OLD = date(2020, 1, 1)


def base(**more: float) -> Chip:
    numbers = {"fma_interval": 9.0, "unmeasured": 7.0, **more}
    constants = {
        name: Constant(name, value, value - 1, value + 1, "cycles", "somewhere", OLD, "assumed")
        for name, value in numbers.items()
    }
    return Chip("believed", "what is said", "sm_90a", 132, constants)


def one(name: str, value: float, spread: float = 0.0, is_constant: bool = True) -> Measured:
    return Measured(name, value, value - spread, value + spread, "cycles", "so and so", is_constant)


def test_a_chip_file_reads_back_as_it_was_measured(tmp_path):
    path = tmp_path / "chip.toml"
    path.write_text(to_toml(chip_of(ABOUT, [one("fma_interval", 1.00004, 0.0001)], base())))
    chip = read_chip(str(path))
    measured, carried = chip.constants["fma_interval"], chip.constants["unmeasured"]
    assert (measured.value, measured.confidence, measured.date) == (1.0, "measured", ABOUT.day)
    assert measured.source == 'undertow calibrate on a "GPU", driver 580.1: so and so'
    assert (carried.value, carried.low, carried.high, carried.confidence) == (7.0, 6.0, 8.0, "assumed")
    assert (carried.source, carried.date) == ("somewhere", OLD)
    assert chip.num_sms == 132 and "believed" in chip.what


def test_what_only_a_sum_shows_is_what_the_other_part_leaves():
    found = [one("mbarrier_hand_off_one_to_one", 85.0, is_constant=False)]
    chip = chip_of(ABOUT, found, base(mbarrier_arrive_latency=36.0))
    wake = chip.constants["mbarrier_wake_latency"]
    assert (wake.value, wake.low, wake.high, wake.confidence) == (49.0, 48.0, 50.0, "inferred")
    assert "mbarrier_hand_off_one_to_one" not in chip.constants
    assert "mbarrier_wake_latency" not in chip_of(ABOUT, found, base()).constants


def test_the_tail_of_an_mma_is_believed_and_the_fill_remains():
    chip = chip_of(ABOUT, [one("mma_fill_and_tail_registers", 46.0, is_constant=False)], base(wgmma_tail=40.0))
    assert chip.constants["wgmma_fill_register"].value == 6.0


def test_what_is_no_number_is_refused():
    with pytest.raises(CalibrationError, match="fma_interval was measured as nan"):
        chip_of(ABOUT, [one("fma_interval", float("nan"))], base())


def test_a_chip_without_constants_is_refused():
    with pytest.raises(CalibrationError, match="nothing was measured"):
        to_toml(chip_of(ABOUT, [], None))


def test_records_tell_constants_from_measurements():
    rows = records(ABOUT, [one("fma_interval", 1.0), one("sm_clock_mma", 1.6, is_constant=False)])
    assert [row["kind"] for row in rows] == ["constant", "measurement"]
    assert all(row["gpu"] == 'a "GPU"' and row["date"] == "2026-11-30" for row in rows)


def test_the_command_needs_a_gpu_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["calibrate"]) == 2
    said = capsys.readouterr()
    assert "has no CUDA device" in said.err and "--compile-only" in said.err and not said.out


def test_the_command_names_the_benchmarks(capsys):
    assert main(["calibrate", "--list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["benchmarks"]}
    assert rows["tensor-memory"]["targets"] == ["sm_100a"]
    assert len(rows["shared-port"]["targets"]) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--compile-only", "sm_90a", "--only", "fences"], "--only=fences: no such benchmark for sm_90a; allowed: "),
        (["--repetitions", "0"], "--repetitions=0: must be at least 1"),
    ],
)
def test_bad_input_is_refused(capsys, arguments, complaint):
    assert main(["calibrate", *arguments]) == 2
    assert complaint in capsys.readouterr().err


RESULTS = Path(__file__).resolve().parents[2] / "results" / "hopper"


def test_what_was_measured_on_an_h200_is_in_the_chip_file_beside_it():
    rows = [json.loads(line) for line in (RESULTS / "calibrate.jsonl").read_text().splitlines()]
    chip = read_chip(str(RESULTS / "calibrate.toml"))
    measured = {row["name"]: row["value"] for row in rows if row["kind"] == "constant"}
    assert len(measured) > 40 and chip.arch == "sm_90a"
    assert {name: chip.constants[name].value for name in measured} == measured
    assert all(chip.constants[name].confidence == "measured" for name in measured)


def test_records_make_the_same_chip_file_anywhere(tmp_path, capsys):
    source, path = RESULTS / "calibrate.jsonl", tmp_path / "chip.toml"
    assert main(["calibrate", "--from-records", str(source), "--output", str(path)]) == 0
    assert "of them measured here" in capsys.readouterr().out
    made, kept = read_chip(str(path)), read_chip(str(RESULTS / "calibrate.toml"))
    names = [name for name, constant in kept.constants.items() if constant.confidence == "measured"]
    again = {name: constant for name, constant in made.constants.items() if "undertow calibrate" in constant.source}
    assert made.name == "h200" and len(again) > 40
    assert all(again[name] == kept.constants[name] for name in names if name in again)


@pytest.mark.parametrize(("text", "kind"), [("", "IndexError"), ("{}", "KeyError"), ("[", "JSONDecodeError")])
def test_records_that_are_none_are_refused(tmp_path, text, kind):
    path = tmp_path / "records.jsonl"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=f"no records of measurements: {kind}"):
        from_records(path, None)


def test_records_of_two_machines_make_no_chip(tmp_path):
    path = tmp_path / "records.jsonl"
    rows = [*records(ABOUT, [one("fma_interval", 1.0)]), *records(replace(ABOUT, gpu="other"), [one("x", 1.0)])]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(CalibrationError, match="holds 2 machines or days"):
        from_records(path, None)


def test_the_timing_model_knows_every_constant_that_was_measured():
    rows = [json.loads(line) for line in (RESULTS / "calibrate.jsonl").read_text().splitlines()]
    assert {row["name"] for row in rows if row["kind"] == "constant"} <= set(constants_of("sm_90a"))
