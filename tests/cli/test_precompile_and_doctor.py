"""`undertow precompile` fills a folder that needs no compiler afterwards; `undertow doctor` finds what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.kernels.machine_code import code, cubin
from undertow import health
from undertow.cache import Entry
from undertow.cli import main
from undertow.kernels import compile as compiling
from undertow.kernels.compile import OBJECT
from undertow.plan.schema import DType
from undertow.runtime import ahead, objects
from undertow.runtime.architectures import ARCHITECTURES

SM100 = ARCHITECTURES["sm100"]


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "cache"))  # restored after `--output` has changed it
    objects.forget()
    return tmp_path / "cache"


def answer(capsys, *words: str) -> tuple[int, dict]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_what_is_precompiled_needs_no_compiler_at_run_time(own_cache, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "image"
    words = ("precompile", "--arch", "sm_100a", "--dtype", "fp16", "--variant", "causal", "--output", str(folder))
    code, report = answer(capsys, *words)
    assert (code, report["ok"], report["folder"]) == (0, True, str(folder))
    (made,) = report["objects"]
    assert (made["variant"], made["outcome"], made["complaint"]) == ("split-f16-causal", "compiled", None)
    assert made["bytes"] > 10_000 and Path(made["folder"]).parent == folder

    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiling, "_traced", lambda *_: pytest.fail("the compiler is called"))
    assert objects.load(SM100, SM100.call.variant_named("causal", DType.F16)).function is not None

    _, again = answer(capsys, *words)
    assert [row["outcome"] for row in again["objects"]] == ["cached"]


def test_a_variant_that_fails_is_told_and_the_exit_code_is_1(own_cache, monkeypatch, capsys):
    monkeypatch.setattr(ahead, "START_SECONDS", 0.0)
    code, report = answer(capsys, "precompile", "--dtype", "bf16", "--variant", "dense")
    assert (code, report["ok"]) == (1, False)
    assert report["objects"][0]["complaint"] == "the compiler was not ready within 0 s"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--arch", "sm_80"), "arch='sm_80': there are kernels for sm100 (sm_100a)"),
        (("--dtype", "fp8"), "--dtype: 'fp8' is unknown; known are bf16, fp16"),
        (("--variant", "casual"), "variant 'casual': 'casual' is unknown here; known are dense, causal, window, left"),
        (("--variant", "causal-gqa"), "variant 'causal-gqa': 'gqa' is unknown here; known are packed, softcap"),
        (("--output", "/dev/null/folder"), "--output=/dev/null/folder: must be a folder that can be written"),
    ],
)
def test_bad_words_are_refused_by_name(own_cache, capsys, words, said):
    assert main(["precompile", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


def test_doctor_finds_nothing_wrong_here_and_says_what_would_run(own_cache, capsys):
    code, report = answer(capsys, "doctor")
    wrong = [finding for finding in report["findings"] if finding["status"] == health.BAD]
    assert (code, report["ok"], wrong) == (0, True, [])
    found = {finding["subject"]: finding["found"] for finding in report["findings"]}
    assert found["nvidia-cutlass-dsl"] == importlib.metadata.version("nvidia-cutlass-dsl")
    assert str(own_cache) in found["cache"] and "0 kernels and calls" in found["cache"]
    assert "backward by" in next(text for subject, text in found.items() if subject.startswith("call on"))
    assert found["sm_100a split-bf16-causal"].startswith("not compiled")


def test_doctor_prints_a_line_a_finding(own_cache, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("Nothing is wrong.\n") and "\nok     python " in text


def test_doctor_reads_the_machine_code_that_is_in_the_cache(monkeypatch):
    found = {}
    for name, lines in {"good": ("FENCE set=1", "BAR wait=1", "EXIT"), "bad": ("FENCE set=1", "BAR", "EXIT")}.items():
        entry = Entry({OBJECT: cubin(code(*lines))}, None)
        monkeypatch.setattr(objects, "cached", lambda *_, entry=entry: entry)
        found[name] = [finding for finding in health.typical_call() if finding.subject.startswith("sm_")]
    assert [(f.status, f.found) for f in found["good"]] == 2 * [
        (health.GOOD, "in the cache; its machine code awaits every fence")
    ]
    assert [f.status for f in found["bad"]] == [health.BAD, health.BAD]
    assert all("may be incomplete when the BAR at 0x10 is issued" in f.found for f in found["bad"])


def with_versions(monkeypatch, **others: str) -> None:
    version = importlib.metadata.version

    def told(name: str) -> str:
        known = others.get(name.replace("-", "_"))
        if known == "":
            raise importlib.metadata.PackageNotFoundError(name)
        return known or version(name)

    monkeypatch.setattr(importlib.metadata, "version", told)


@pytest.mark.parametrize("release", ["4.6.0", "4.6.1"])
def test_doctor_knows_releases_that_hang(own_cache, monkeypatch, capsys, release):
    with_versions(monkeypatch, nvidia_cutlass_dsl=release)
    code, report = answer(capsys, "doctor")
    assert (code, report["ok"]) == (1, False)
    (finding,) = [f for f in report["findings"] if f["subject"] == "nvidia-cutlass-dsl release"]
    assert finding["found"].startswith(f"{release}: backward passes at head dim 64 never return")


def test_doctor_sees_wheels_of_two_releases(monkeypatch):
    with_versions(monkeypatch, nvidia_cutlass_dsl_libs_base="4.7.0")
    (finding,) = [f for f in health.compiler() if f.status == health.BAD]
    assert finding.subject == "nvidia-cutlass-dsl-libs-base" and "4.7.0, but" in finding.found


@pytest.mark.parametrize(
    ("found", "status"), [("2.13.0+cpu", health.GOOD), ("2.13", health.GOOD), ("2.9.1", health.BAD), ("", health.BAD)]
)
def test_doctor_holds_packages_against_their_floors(monkeypatch, found, status):
    with_versions(monkeypatch, torch=found)
    finding = health.package("torch>=2.13")
    assert finding.status == status
    assert finding.advice == ("pip install 'torch>=2.13'" if status == health.BAD else "")


def test_doctor_tells_a_cache_that_is_not_where_it_is_wanted(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "file"))
    (finding,) = health.cache()
    assert finding.status == health.NOTE and f"{tmp_path / 'file'} cannot be written" in finding.found


def test_a_subject_that_cannot_be_examined_is_a_finding(monkeypatch):
    def broken_subject():
        raise OSError("no such thing")

    monkeypatch.setattr(health, "SUBJECTS", (broken_subject,))
    assert list(health.examine()) == [health.Finding("broken subject", health.BAD, "OSError: no such thing")]
