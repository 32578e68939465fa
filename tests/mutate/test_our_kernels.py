"""The main kernels: every synchronisation is missed by its own rule, or somebody has written why it is not."""

from __future__ import annotations

import json

import pytest

from undertow import cli
from undertow.backward_case import main_case
from undertow.cases import COMPLETIONS, fresh, settings
from undertow.check import check
from undertow.commands.targets import DEFAULT_SHAPE
from undertow.emulator import Options
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.mutate import mutants
from undertow.mutate.sites import mutated

OWN_RULES = {  # kind: the rule that speaks of what is missing, for every mutant of that kind that is killed
    "proxy-fence": {"missing-proxy-fence"},
    "warp-sync": {"warp-sync"},
    "copy-wait": {"race", "global-order"},
    "expect": {"mbarrier-bytes"},
}

IMPLIED = {("compute", "compute_mma_ds.empty"), ("load", "load_compute_lse.empty")}  # see tests/plan/test_waits.py


def mutation_run(capfd, *words: str) -> dict:
    """The JSON object of `undertow mutate`, as cheap as it may be: what it does not notice would be unexplained.

    One CTA, as CTAs of this mode wait for nothing of each other, with three trips and a tail of both kinds; one seed.
    """
    code = cli.main(["mutate", "--json", "--seqlen-k", "72", "--seeds", "1", *words])
    report = json.loads(capfd.readouterr().out)
    assert code == (0 if report["unexplained"] == 0 and not report["stale"] else 1)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["split", "aliased"])
def test_no_survivor_is_unexplained_and_what_guards_something_is_missed_by_its_rule(capfd, schedule):
    report = mutation_run(capfd, "--schedule", schedule)
    assert report["unexplained"] == 0 and report["stale"] == []
    assert report["mutants"] == report["killed"] + report["explained"] >= 90
    assert report["explained"] == {"split": 3, "aliased": 7}[schedule]
    spare = {(row["role"], row["about"]) for row in report["rows"] if row["protocol_only"]}
    assert spare == IMPLIED, "the plan's proof says the same"
    for row in report["rows"]:
        rules = set(row["rules"])
        if row["verdict"] == "survived":
            continue
        assert not rules.isdisjoint(OWN_RULES.get(row["kind"], rules)), row
        if row["kind"] == "tmem-wait":
            wanted = "tmem-load-not-waited" if "::ld" in row["form"] else "tmem-store-not-waited"
            assert wanted in rules, row
        if row["about"] == "compute" and row["ordinal"] in (1, 3):
            assert "alias-lifetime" in rules, "the guards of P and of stage 0 of dS"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - {"split", "aliased"}))
def test_the_barriers_of_the_other_schedules_are_needed_or_explained(capfd, schedule):
    kinds = ("barrier", "narrowed", "warp-sync")
    report = mutation_run(capfd, "--schedule", schedule, *(word for kind in kinds for word in ("--kind", kind)))
    assert (
        report["unexplained"] == 0
        and report["stale"] == []
        and report["explained"] == {"slots": 4, "signals": 3}[schedule]
    )


def test_of_the_two_fences_of_the_set_up_one_is_needed():
    """Each is redundant beside the other; without both, engines meet mbarriers whose init nobody has fenced."""
    kernel = main_case(plan("split"), DEFAULT_SHAPE)
    fences = [m for m in mutants([kernel]) if m.name.function == "set_up" and m.name.kind.endswith("-fence")]
    assert [m.name.kind for m in fences] == ["init-fence", "proxy-fence"]
    both = kernel.program(mutated(kernel.ptx, [edit for m in fences for edit in m.edits]))
    (own,) = fresh([kernel])
    assert {f.rule for f in check(both, own.launch, Options(schedule=0)).errors} == {"missing-proxy-fence"}


def test_what_is_left_of_a_narrowed_signal_barrier_is_the_schedule_signals():
    """`aliased` with its two signal barriers narrowed, and without the second guard of dS, is clean and right."""
    kernel = main_case(plan("aliased"), DEFAULT_SHAPE)
    barriers = [m for m in mutants([kernel]) if m.name.about == "compute"]
    narrowed = [m for m in barriers if m.name.kind == "narrowed" and m.name.ordinal in (2, 5)]
    gone = [m for m in barriers if m.name.kind == "barrier" and m.name.ordinal == 4]
    assert len(narrowed) == 2 and len(gone) == 1
    cheaper = kernel.program(mutated(kernel.ptx, [edit for m in (*narrowed, *gone) for edit in m.edits]))
    results = []
    for program in (kernel.program(), cheaper):
        for options in settings(1, COMPLETIONS):
            (own,) = fresh([kernel])
            assert check(program, own.launch, options).clean
            results.append({name: array.tobytes() for name, array in own.arrays.items()})
    assert all(result == results[0] for result in results)
