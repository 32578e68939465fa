"""`undertow check`: clean and broken kernels, coverage, the JSON object, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.mutate.kernels import HANDOVER, LAUNCH, without_the_wait_for_full
from undertow import cli
from undertow.campaign import campaign
from undertow.cases import COMPLETIONS, settings
from undertow.commands.check import outcome
from undertow.kernels.sm100.plan import plan

FINDING_KEYS = {"rule", "message", "where", "other", "missing", "hint", "case", "kernel", "settings", "accesses"}
NO_WAIT = without_the_wait_for_full()
NO_ARRIVAL = HANDOVER.replace("    mbarrier.arrive.shared.b64 _, [smem+8];\n", "")


@pytest.fixture
def run(capfd, tmp_path):
    """run(text, *words) -> exit code, stdout, stderr of `undertow check` on the tiny kernel's text."""

    def run_check(text: str, *words: str, launch: str = LAUNCH) -> tuple[int, str, str]:
        (tmp_path / "k.ptx").write_text(text)
        (tmp_path / "k.toml").write_text(launch)
        code = cli.main(["check", "--ptx", str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "k.toml"), *words])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run_check


def test_a_clean_kernel(run):
    code, out, _ = run(HANDOVER, "--json")
    report = json.loads(out)
    assert code == 0 and set(report) == {"findings", "runs", "coverage", "seconds"}
    assert report["findings"] == [] and report["runs"] == 9 and report["seconds"] > 0
    coverage = report["coverage"]
    assert set(coverage) == {"forms", "branches", "synchronisations"}
    assert coverage["synchronisations"] == {"executed": 8, "total": 8, "missing": []}
    assert coverage["branches"] == {"executed": 4, "total": 4, "missing": []}
    assert coverage["forms"]["executed"] == coverage["forms"]["total"] > 10


def test_a_missing_wait_is_a_finding_in_the_words_of_the_launch_file(run):
    code, out, _ = run(NO_WAIT, "--json")
    report = json.loads(out)
    assert code == 1
    (race,) = [f for f in report["findings"] if f["rule"] == "race" and "consumer" in f["accesses"][1]["role"]][:1]
    assert set(race) >= FINDING_KEYS and race["kernel"] == race["case"] == "k.ptx"
    assert {access["role"] for access in race["accesses"]} == {"producer", "consumer"}
    assert all("tile" in access["buffer"] for access in race["accesses"])
    assert len(race["settings"]) == len(set(race["settings"])) >= 1


def test_the_text_names_both_sides(run):
    code, out, _ = run(NO_WAIT)
    assert code == 1
    assert "race: " in out and "(producer)" in out and "(consumer)" in out and "missing: " in out
    assert "k.ptx: " in out and " findings in 9 runs" in out


def test_a_deadlock_is_a_finding(run):
    code, out, _ = run(NO_ARRIVAL, "--json", "--seeds", "1")
    report = json.loads(out)
    assert code == 1 and [f["rule"] for f in report["findings"]] == ["deadlock"]
    assert "waits for empty" in report["findings"][0]["message"]


def test_code_that_did_not_run_is_told(run):
    unreachable = HANDOVER.replace("    bra END;\n", "    bra END;\n    bar.warp.sync -1;\n    nanosleep.u32 5;\n")
    code, out, _ = run(unreachable, "--json", "--seeds", "1")
    coverage = json.loads(out)["coverage"]
    assert code == 0
    assert coverage["synchronisations"]["executed"] == 8 and coverage["synchronisations"]["total"] == 9
    (missing,) = coverage["synchronisations"]["missing"]
    assert missing.startswith("bar.warp.sync, k.ptx, PTX line ")
    code, out, _ = run(unreachable, "--seeds", "1")
    assert "8 of 9 synchronisations" in out and missing in out


def test_a_branch_that_goes_one_way_only_is_told(run):
    one_round = HANDOVER.replace("setp.lt.s32 %p1, %r6, 3;", "setp.lt.s32 %p1, %r6, 1;")
    code, out, _ = run(one_round, "--json", "--seeds", "1")
    branches = json.loads(out)["coverage"]["branches"]
    assert code == 0 and branches["executed"] == 2 and branches["total"] == 4
    assert all(line.endswith(": only not taken") for line in branches["missing"])


@pytest.mark.parametrize(
    ("text", "launch", "complaint"),
    [
        ("not PTX", LAUNCH, "k.ptx"),
        (HANDOVER.replace("xor.b32", "xor.b33"), LAUNCH, "no semantics for"),
        (HANDOVER, LAUNCH.replace("block = [64]", "block = [32]"), "block: (32, 1, 1)"),
        (HANDOVER, LAUNCH.replace("[[params]]", "[[param]]"), "k.toml: the file: unknown key 'param'"),
        (HANDOVER, LAUNCH + "[[params]]\nkind = 'int'\nvalue = 1\n", "params: 2 values for 1 parameters"),
    ],
    ids=["syntax", "unsupported", "block", "key", "params"],
)
def test_what_cannot_be_run_is_exit_code_2(run, text, launch, complaint):
    if "[[params]]\nkind = 'int'" in launch:  # tables of the description stand behind its parameters
        extra = "[[params]]\nkind = 'int'\nvalue = 1\n"
        launch = LAUNCH.replace("[roles]", extra + "[roles]")
    code, out, err = run(text, launch=launch)
    assert code == 2 and out == "" and complaint in err


def test_seeds_and_processes_are_checked_by_name(run):
    for words, complaint in ((("--seeds", "-1"), "seeds=-1"), (("--jobs", "0"), "--jobs=0")):
        code, out, err = run(HANDOVER, *words)
        assert code == 2 and out == "" and complaint in err


def test_a_schedule_of_ours_is_clean(capfd):
    words = ["--schedule", "split", "--seqlen-q", "130", "--seqlen-k", "100", "--seeds", "1", "--completion", "late"]
    code = cli.main(["check", "--json", *words])
    report = json.loads(capfd.readouterr().out)
    assert code == 0 and report["findings"] == [] and report["runs"] == 1
    assert report["coverage"]["synchronisations"]["missing"] == []


def test_a_schedule_without_an_alias_guard_is_not():
    from undertow.backward_case import backward_case
    from undertow.inputs import Shape

    broken = plan("aliased").without_guard("P")
    done = campaign({broken.name: backward_case(broken, Shape(1, 128, 128, 1))}, settings(1, COMPLETIONS))
    assert not outcome(done).ok
    assert {found.kernel for found in done.findings} == {"main"} and done.runs == 3
    assert {found.finding.rule for found in done.findings} == {"alias-lifetime"}
    assert len({name for found in done.findings for name in found.settings}) == 3, "in every setting"
