"""Every variant under all observers: no race, no missing fence, no phase missed, no sum that is not in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.kernels.packings import packed_batch
from undertow.backward_case import batch_case
from undertow.campaign import campaign
from undertow.cases import COMPLETIONS, settings
from undertow.inputs import Shape, random_batch
from undertow.kernels.sm100.plan import SCHEDULES
from undertow.reference import Scoring

SINKS = torch.tensor([0.5, -1.0])
BATCHES = {  # the least that has masked and other tiles, several heads of a group, several CTAs to a query tile
    "causal": lambda: random_batch(Shape(1, 300, 260, 1), scoring=Scoring(causal=True)),
    "sliding-grouped-sinks": lambda: random_batch(
        Shape(1, 260, 260, 2, 1), scoring=Scoring(causal=True, window=(100, None), sink=SINKS)
    ),
    "softcap": lambda: random_batch(Shape(1, 150, 130, 1), scoring=Scoring(causal=True, softcap=2.0)),
    "packed": lambda: packed_batch([0, 0, 130, 200], [0, 20, 180, 330], (2, 1), rows=(230, 340), causal=True),
    "nothing-to-do": lambda: random_batch(Shape(1, 128, 300, 1), scoring=Scoring(window=(20, 0))),
}


def in_turn(cases: Sequence[str], schedules: Sequence[str]) -> list[tuple[str, str, str]]:
    """Every case on every schedule, with a completion that each case and each schedule meets with the others."""
    return [
        (case, schedule, COMPLETIONS[(row + column) % len(COMPLETIONS)])
        for row, case in enumerate(cases)
        for column, schedule in enumerate(schedules)
    ]


def findings(batch, schedule: str, completion: str, deterministic: bool) -> list[str]:
    done = campaign({schedule: batch_case(batch, schedule, deterministic)}, settings(1, (completion,)))
    return [f"{found.kernel}: {found.finding.rule}: {found.finding.message}" for found in done.findings]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "schedule", "completion"), in_turn(list(BATCHES), list(SCHEDULES)))
def test_nothing_is_found(case, schedule, completion):
    assert not findings(BATCHES[case](), schedule, completion, deterministic=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "schedule", "completion"), in_turn(["causal", "sliding-grouped-sinks", "packed"], ["aliased", "split"])
)
def test_nothing_is_found_where_ctas_take_turns(case, schedule, completion):
    assert not findings(BATCHES[case](), schedule, completion, deterministic=True)
