"""The SM90 kernels under all observers: nothing is found, and what is taken away is missed."""

from __future__ import annotations

import re

import pytest

from tests.kernels.packings import packed_batch
from undertow import emulator
from undertow.backward_case import batch_case
from undertow.cases import Kernel
from undertow.check import check
from undertow.emulator import Options
from undertow.emulator.observers import Finding
from undertow.inputs import Batch, Shape, random_batch
from undertow.reference import Scoring

QUICK = (Options(), Options(completion="late"), Options(schedule=1, completion=("seeded", 1)))
CAUSAL = Scoring(causal=True)


def cases(name: str) -> tuple[Batch, bool]:
    """A batch, and whether it asks for the deterministic mode."""
    batches = {
        "dense": lambda: random_batch(Shape(1, 300, 200, 1)),
        "causal": lambda: random_batch(Shape(1, 300, 300, 2, 1), scoring=CAUSAL),
        "window-packed": lambda: packed_batch([0, 300, 450], [0, 200, 520], (2, 1), window=(100, 20), rows=(500, 520)),
        "deterministic": lambda: random_batch(Shape(1, 300, 300, 2, 1), scoring=CAUSAL),
    }
    return batches[name](), name == "deterministic"


def kernels(name: str) -> tuple[Kernel, ...]:
    batch, deterministic = cases(name)
    return batch_case(batch, "pingpong", deterministic, "sm90")


def findings(kernel: Kernel, options: Options, ptx: str | None = None) -> tuple[Finding, ...]:
    plan = getattr(kernel.launch.labels, "plan", None)  # the main kernel has names
    return check(ptx or kernel.ptx, kernel.launch, options, plan=plan).findings


@pytest.mark.parametrize("options", QUICK, ids=str)
@pytest.mark.parametrize("name", ["dense", "causal", "window-packed", "deterministic"])
def test_nothing_is_found(name, options):
    for kernel in kernels(name):
        assert findings(kernel, options) == (), kernel.name


def without(ptx: str, pattern: str, which: int) -> str:
    """The text without an instruction of a kind."""
    found = [match.span() for match in re.finditer(pattern, ptx)]
    start, end = found[which]
    return ptx[:start] + ptx[end:]


REMOVED = {
    "a-fence-of-registers": (r"wgmma\.fence\.sync\.aligned;", 0, {"wgmma-fence-missing"}),
    "the-wait-for-the-first-scores": (r"wgmma\.wait_group\.sync\.aligned\s+\d;", 0, {"wgmma-register-in-flight"}),
    "the-proxy-fence-of-the-first-dS": (r"fence\.proxy\.async\.shared::cta;", 2, {"missing-proxy-fence"}),
}


@pytest.mark.parametrize("name", REMOVED)
def test_what_is_taken_away_is_missed(name):
    pattern, which, rules = REMOVED[name]
    before, main, _ = kernels("dense")
    emulator.launch(before.ptx, before.launch, Options("auto"))
    found = findings(main, Options(completion="late"), without(main.ptx, pattern, which))
    assert rules <= {finding.rule for finding in found}


def test_a_constant_behind_the_fence_is_found():
    """The compiler likes to write the constants of an operand there; `instructions.opaque` keeps it from doing so."""
    before, main, _ = kernels("dense")
    emulator.launch(before.ptx, before.launch, Options("auto"))
    assert main.ptx.count("wgmma.fence.sync.aligned;") > 1
    constant = re.search(r"mov\.b32 (%r\d+), 0x3f803f80;", main.ptx)
    assert constant
    fence = main.ptx.index("wgmma.fence.sync.aligned;", constant.end()) + len("wgmma.fence.sync.aligned;")
    moved = f"{main.ptx[:fence]}\n{constant.group(0)}{main.ptx[fence:]}"
    assert {finding.rule for finding in findings(main, Options(), moved)} == {"wgmma-fence-missing"}
