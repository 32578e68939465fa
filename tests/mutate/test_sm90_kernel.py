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
from undertow.commands.targets import DEFAULT_SHAPES
from undertow.emulator import Options
from undertow.kernels.backward import plan_named
from undertow.mutate import FOLDER, Mutant, mutants, read_reasons
from undertow.mutate.sites import mutated

ARCH = "sm90"
LATE = Options(schedule=0, completion="late")
BURST = (3, 4, 5)  # the fences before dQ, dV and dK in the loop of masked tiles
SPARED = {  # what stays when everything else that is explained is gone: kind, place, ordinal
    ("init-fence", "before", 1),
    ("mma-fence", "in", 3),
    ("mma-fence", "in", 8),
    ("mma-fence", "after", 1),
}


@functools.cache
def kernel() -> Kernel:
    return main_case(plan_named(ARCH, "pingpong"), DEFAULT_SHAPES[ARCH], arch=ARCH)


@functools.cache
def explained() -> list[Mutant]:
    """The mutants that somebody has given a reason for."""
    names = {name for reason in read_reasons(FOLDER / f"{ARCH}.toml") for name in reason.names}
    found = [mutant for mutant in mutants(kernel()) if mutant.name in names]
    assert len(found) == len(names), "a reason that speaks of no synchronisation"
    return found


def without(chosen: Callable[[Mutant], bool], strict: bool = False) -> tuple[Check, dict[str, bytes]]:
    """What the observers say without the chosen ones, and the results."""
    edits = [edit for mutant in explained() if chosen(mutant) for edit in mutant.edits]
    (own,) = fresh([kernel()])
    checked = check(kernel().program(mutated(kernel().ptx, edits)), own.launch, LATE, strict=strict)
    return checked, {name: array.tobytes() for name, array in own.arrays.items()}


def place(mutant: Mutant) -> tuple[str, str, int]:
    return mutant.name.kind, mutant.name.place, mutant.name.ordinal


@pytest.mark.parametrize("strict", [False, True])
def test_nobody_misses_all_that_is_explained_at_once(strict):
    whole, expected = without(lambda mutant: False, strict)
    spare, found = without(lambda mutant: place(mutant) not in SPARED, strict)
    assert whole.clean and spare.clean
    assert found == expected


@pytest.mark.parametrize(
    ("chosen", "rule"),
    [
        (lambda mutant: mutant.name.function == "set_up", "missing-proxy-fence"),
        (lambda mutant: place(mutant) in {("mma-fence", "in", which) for which in BURST}, "wgmma-fence-missing"),
    ],
    ids=["of the set-up", "of a burst"],
)
def test_of_these_fences_one_is_needed(chosen, rule):
    checked, _ = without(chosen)
    assert {finding.rule for finding in checked.errors} == {rule}


@pytest.mark.slow
def test_waits_for_mmas_are_needed_or_explained(capfd):
    words = ("--kind", "mma-wait", "--seeds", "1", "--completion", "late")
    code = cli.main(["mutate", "--arch", ARCH, "--json", *words])
    report = json.loads(capfd.readouterr().out)
    assert (code, report["unexplained"], report["stale"], report["explained"]) == (0, 0, [], 2)
    rules = {rule for row in report["rows"] for rule in row["rules"]}
    assert rules == {"wgmma-register-in-flight", "race"}
