"""The SM90 main kernel: what is explained as redundant is, all of it at once; and one of each group is needed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest

from undertow import cli
from undertow.backward_case import main_case
from undertow.cases import Kernel, fresh
from undertow.check import Check, check
from undertow.commands.targets import DEFAULT_SHAPES, MORE_SHAPES
from undertow.emulator import Options
from undertow.inputs import Shape
from undertow.kernels.backward import plan_named
from undertow.mutate import FOLDER, Mutant, mutants, read_reasons
from undertow.mutate.sites import mutated

ARCH, SCHEDULE = "sm90", "pingpong"
LATE = Options(schedule=0, completion="late")
ONE_EACH, SEVERAL = DEFAULT_SHAPES[ARCH], Shape(1, 100, 345, 2)  # key/value tiles of a CTA; together they execute all
TAILS = Shape(1, 100, 9, 6)  # no warp has all of its rows
RING = MORE_SHAPES[ARCH][0]
BURST = (1, 2, 3)  # the fences before dQ, dV and dK in the loop of masked tiles
SPARED = {  # what stays when everything else that is explained is gone: role, kind, place, ordinal
    ("load", "init-fence", "before", 1),
    ("compute", "mma-fence", "in", 1),
    ("compute", "mma-fence", "in", 6),
    ("compute", "mma-fence", "in", 11),
    ("compute", "warp-sync", "in", 1),
}


@functools.cache
def kernel(shape: Shape) -> Kernel:
    return main_case(plan_named(ARCH, SCHEDULE), shape, arch=ARCH)


@functools.cache
def every() -> list[Mutant]:
    return mutants([kernel(shape) for shape in (ONE_EACH, SEVERAL)])


@functools.cache
def explained() -> list[Mutant]:
    """The mutants that somebody has given a reason for."""
    names = {name for reason in read_reasons(FOLDER / f"{ARCH}.toml") for name in reason.names}
    found = [mutant for mutant in every() if mutant.name in names]
    assert len(found) == len(names), "a reason that speaks of no synchronisation"
    return found


def without(shape: Shape, gone: list[Mutant], strict: bool = False) -> tuple[Check, dict[str, bytes]]:
    """What the observers say of the kernel without some synchronisations, and its results."""
    (own,) = fresh([kernel(shape)])
    program = own.program(mutated(own.ptx, [edit for mutant in gone for edit in mutant.edits]))
    checked = check(program, own.launch, LATE, strict=strict)
    return checked, {name: array.tobytes() for name, array in own.arrays.items()}


def place(mutant: Mutant) -> tuple[str, str, str, int]:
    return mutant.name.role, mutant.name.kind, mutant.name.place, mutant.name.ordinal


@pytest.mark.parametrize("shape", [ONE_EACH, SEVERAL], ids=["one each", "several"])
def test_nobody_misses_all_that_is_explained_at_once(shape):
    whole, expected = without(shape, [], strict=True)
    spare, found = without(shape, [mutant for mutant in explained() if place(mutant) not in SPARED], strict=True)
    assert not whole.findings and not spare.findings
    assert found == expected


@pytest.mark.parametrize(
    ("shape", "chosen", "rule"),
    [
        (ONE_EACH, lambda mutant: mutant.name.function == "set_up", "missing-proxy-fence"),
        (ONE_EACH, lambda mutant: place(mutant)[1:] in {("mma-fence", "in", n) for n in BURST}, "wgmma-fence-missing"),
    ],
    ids=["fences of the set-up", "fences of a burst"],
)
def test_of_these_one_is_needed(shape: Shape, chosen: Callable[[Mutant], bool], rule: str):
    gone = [mutant for mutant in explained() if chosen(mutant)]
    checked, _ = without(shape, gone)
    assert len(gone) > 1 and {finding.rule for finding in checked.errors} == {rule}


def test_one_join_is_needed_behind_rows_that_a_warp_writes_itself():
    """The last of them stands before dS is stored, whoever has written the rows."""
    joins = [mutant for mutant in explained() if place(mutant)[:3] == ("compute", "warp-sync", "in")]
    (last,) = (m for m in every() if (m.name.function, m.name.kind) == ("wait_until_read", "warp-sync"))
    assert len(joins) > 1 and without(TAILS, joins)[0].clean
    checked, _ = without(TAILS, [*joins, last])
    assert {finding.rule for finding in checked.errors} == {"warp-sync"}


def test_the_join_of_the_reduce_warps_is_spare_beside_a_wait_of_the_schedule_warp():
    """That wait is not missed where the join is there, but by its own protocol."""
    (join,) = (mutant for mutant in explained() if place(mutant) == ("reduce", "warp-sync", "in", 1))
    (wait,) = (m for m in every() if (m.name.role, m.name.about) == ("schedule", "schedule_load_item.empty"))
    checked, _ = without(RING, [join, wait])
    assert {finding.rule for finding in checked.errors} == {"warp-sync", "mbarrier-unobserved-phase"}


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        (("compute", "barrier", "dq_empty0+dq_empty1", "in"), "named-barrier-leftover"),
        (("schedule", "warp-sync", "before schedule_load_item.full", "in"), "warp-sync"),
    ],
    ids=["an arrival left behind", "a join"],
)
def test_what_only_the_letter_of_the_isa_asks_for_is_missed_in_strict_mode(what, rule):
    """The join is spare if the elected lane is the one that wrote."""
    gone = [m for m in every() if (m.name.role, m.name.kind, m.name.about, m.name.place) == what][-1]
    assert without(SEVERAL, [gone])[0].clean
    checked, _ = without(SEVERAL, [gone], strict=True)
    assert {finding.rule for finding in checked.findings} == {rule}


@pytest.mark.slow
def test_waits_for_mmas_are_needed_or_explained(capfd):
    words = ("--kind", "mma-wait", "--seeds", "1", "--completion", "late")
    code = cli.main(["mutate", "--arch", ARCH, "--json", *words])
    report = json.loads(capfd.readouterr().out)
    assert (code, report["unexplained"], report["stale"], report["explained"]) == (0, 0, [], 3)
    rules = {rule for row in report["rows"] for rule in row["rules"]}
    assert rules == {"wgmma-register-in-flight", "race"}
