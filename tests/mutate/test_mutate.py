"""On a kernel whose needs are known: what is needed is missed, and by its own rule; what is not, is not."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from tests.mutate.kernels import (
    HANDOVER,
    MEET_APART,
    ROUNDS,
    SURVIVORS,
    WAITS_TWICE,
    expected,
    handover,
    rounds,
    without_the_wait_for_full,
)
from undertow import emulator
from undertow.cases import COMPLETIONS, CaseError, Kernel, fresh, settings
from undertow.check import check
from undertow.mutate import BY_RESULT, BY_RULE, SURVIVED, Report, mutants, mutate, read_reasons, reasons_for
from undertow.mutate.sites import mutated
from undertow.mutate.trial import differences, trial

SETTINGS = settings(2, COMPLETIONS)
WANTED = {  # role, kind, about, place: rules that may say so; empty if nobody may notice
    ("all", "barrier", "barrier 0", "before"): {"race", "mbarrier-not-initialised"},
    ("all", "narrowed", "barrier 0", "before"): {"race", "mbarrier-not-initialised"},
    ("producer", "wait", "empty", "before"): set(),
    ("producer", "wait", "empty", "in"): {"race", "mbarrier-doubled-phase"},
    ("producer", "proxy-fence", "before full", "in"): set(),
    ("producer", "arrive", "full", "in"): {"deadlock"},
    ("consumer", "wait", "full", "in"): {"race"},
    ("consumer", "arrive", "empty", "in"): {"deadlock"},
    ("all", "barrier", "end", "after"): set(),
    ("all", "narrowed", "end", "after"): set(),
}


@pytest.fixture(scope="module")
def reasons(tmp_path_factory):
    path = tmp_path_factory.mktemp("reasons") / "survivors.toml"
    path.write_text(SURVIVORS)
    return reasons_for(read_reasons(path), "handover")


@pytest.fixture(scope="module")
def report(reasons) -> Report:
    return mutate([handover()], SETTINGS, reasons)


def test_the_kernel_itself_is_right():
    (own,) = fresh([handover()])
    emulator.launch(own.ptx, own.launch)
    assert np.array_equal(own.arrays["y"], expected())


def test_every_synchronisation_has_one_mutant_with_a_name_of_its_own(report):
    names = [row.mutant.name for row in report.rows]
    assert len(set(names)) == len(names)
    assert {(name.role, name.kind, name.about, name.place) for name in names} == set(WANTED)


def test_what_is_needed_is_missed_and_what_is_not_is_not(report):
    for row in report.rows:
        name = row.mutant.name
        wanted = WANTED[name.role, name.kind, name.about, name.place]
        assert row.verdict.how == (BY_RULE if wanted else SURVIVED), name
        assert not wanted or wanted & set(row.verdict.rules), (name, row.verdict)
        assert row.verdict.runs == (len(SETTINGS) + 1 if row.survived else 1), "the first finding is enough"


def test_survivors_with_a_reason_are_explained(report):
    assert report.ok and not report.unexplained and not report.stale
    assert sorted(row.reason.category for row in report.survivors) == ["first-pass", "redundant", "tail", "tail"]
    assert [row.mutant.name.kind for row in report.redundant] == ["proxy-fence"]


def test_a_survivor_without_a_reason_fails(reasons):
    fewer = {name: reason for name, reason in reasons.items() if reason.category != "first-pass"}
    report = mutate([handover()], SETTINGS[:1], fewer)
    assert not report.ok and [row.mutant.name.about for row in report.unexplained] == ["empty"]


def test_a_reason_for_what_is_needed_is_stale(reasons):
    (wait,) = (m.name for m in mutants([handover()]) if m.name.kind == "wait" and m.name.role == "consumer")
    report = mutate([handover()], SETTINGS[:1], {**reasons, wait: next(iter(reasons.values()))})
    assert not report.ok and report.stale == [f"{wait}: has a reason, but {BY_RULE}"]


def test_a_reason_for_what_does_not_exist_is_stale(reasons):
    without = HANDOVER.replace("    fence.proxy.async.shared::cta;\n", "")
    report = mutate([handover(without)], SETTINGS[:1], reasons)
    (line,) = report.stale
    assert not report.ok and line.startswith("producer: proxy-fence before full") and "no such" in line
    chosen = mutate([handover(without)], SETTINGS[:1], reasons, lambda mutant: mutant.name.kind == "wait")
    assert chosen.ok, "where only some mutants are tried, the others' reasons are not judged"


def test_a_barrier_of_two_roles_is_also_taken_away_as_a_whole():
    """One side gone is a deadlock, which says nothing about the barrier; both gone says that it is not needed."""
    report = mutate([handover(MEET_APART)], SETTINGS, {}, lambda mutant: mutant.name.about == "end")
    got = {(row.mutant.name.role, row.mutant.name.kind, row.mutant.name.place): row.verdict for row in report.rows}
    assert set(got) == {
        *((role, kind, "after") for role in ("producer", "consumer") for kind in ("barrier", "narrowed")),
        ("producer+consumer", "barrier", "everywhere"),
    }
    assert got["producer", "barrier", "after"].rules == got["consumer", "barrier", "after"].rules == ("deadlock",)
    assert got["producer+consumer", "barrier", "everywhere"].how == SURVIVED


def test_waits_that_imply_each_other_are_missed_by_their_protocol_only():
    """The store comes before both arrivals, so either wait orders it; the wait for the empty tile has no such twin."""
    report = mutate([handover(WAITS_TWICE)], SETTINGS, {}, lambda mutant: mutant.name.kind == "wait")
    spare = {row.mutant.name.about: row.verdict for row in report.protocol_only}
    assert set(spare) == {"full", "again"}
    for verdict in spare.values():
        assert verdict.rules == ("mbarrier-unobserved-phase",) and verdict.runs == len(SETTINGS)
    neither = mutated(WAITS_TWICE, [edit for row in report.protocol_only for edit in row.mutant.edits])
    (own,) = fresh([handover(neither)])
    assert "race" in {finding.rule for finding in check(own.program(), own.launch).errors}


def test_what_one_problem_does_not_execute_another_may_miss():
    """The consumer's rounds are a number of the launch: without any, nobody misses the wait for a full tile."""
    idle, busy = (rounds(count) for count in (0, ROUNDS))
    every = {(m.name.role, m.name.kind): m for m in mutants([idle, busy]) if m.name.place == "in"}
    assert every["consumer", "wait"].problems == (1,)
    report = mutate([idle, busy], SETTINGS, {}, lambda mutant: mutant.name.about == "full")
    by = {row.mutant.name.kind: row.verdict for row in report.rows}
    assert by["wait"].problem == busy.name and by["wait"].runs == 1 and "race" in by["wait"].rules
    (fence,) = mutate([idle, busy], SETTINGS, {}, lambda mutant: mutant.name.kind == "proxy-fence").rows
    assert fence.survived and fence.verdict.runs == 1 + 1, "the second problem under one setting, then in strict mode"


def test_a_wrong_result_kills_where_no_rule_speaks():
    kernel = handover()
    judge = trial([kernel], SETTINGS)
    (arrive,) = (m for m in mutants([kernel]) if m.name.kind == "proxy-fence")
    (edit,) = arrive.edits
    wrong = replace(arrive, edits=(replace(edit, text="st.shared.b32 [%r5], %r2;"),))
    verdict = judge(wrong)
    assert verdict.how == BY_RESULT and verdict.shown.startswith("y: 64 of 96 elements differ") and verdict.runs == 1


def test_a_trial_travels_to_other_processes():
    kernel = handover()
    judge = pickle.loads(pickle.dumps(trial([kernel], SETTINGS[:1])))
    mutant = next(m for m in mutants([kernel]) if m.name.kind == "wait" and m.name.role == "consumer")
    assert judge(pickle.loads(pickle.dumps(mutant))).how == BY_RULE


def test_a_kernel_with_findings_cannot_be_mutated():
    with pytest.raises(CaseError, match=r"handover has findings before anything is taken away .*, first race: "):
        mutate([handover(without_the_wait_for_full())], SETTINGS, {})


def test_other_orders_of_sums_are_no_difference():
    right = {"y": np.full(1000, 1.0, np.float32), "n": np.arange(4)}
    assert not differences(right, right)
    noise = {"y": right["y"] + np.float32(2.0**-22), "n": right["n"]}
    assert not differences(noise, right)
    wrong = {"y": right["y"] + np.float32(2.0**-15), "n": right["n"] + (right["n"] == 2)}
    assert differences(wrong, right) == "y: relative error 3.1e-05; n: 1 of 4 elements differ"
    unwritten = {"y": np.where(np.arange(1000) < 3, np.nan, right["y"]).astype(np.float32), "n": right["n"]}
    assert differences(unwritten, right) == "y: 3 elements are or are not numbers"


def test_fresh_launches_share_what_the_originals_share():
    kernel = handover()
    pair = (kernel, Kernel("again", kernel.ptx, kernel.launch))
    one, two = fresh(pair)
    assert one.arrays["y"] is two.arrays["y"] and one.arrays["y"] is not kernel.arrays["y"]
