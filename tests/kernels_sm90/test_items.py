"""CTAs that take several key/value tiles: the same bits as one CTA each, whatever is in a row, and nothing is raced."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.packings import packed_batch
from tests.kernels_sm90.passes import complaints, run
from tests.kernels_sm90.test_checks import findings
from tests.runtime.calls import tensors_for
from undertow.backward_case import batch_case
from undertow.emulator import Options
from undertow.inputs import Shape, random_batch
from undertow.kernels.sm90 import call, launch
from undertow.kernels.sm90.plan import ITEM_STAGES
from undertow.kernels.sm100.launch import Settings
from undertow.plan.schema import DType
from undertow.reference import Scoring

CASES = {
    "one query tile each": (Shape(1, 128, 500, 1), Scoring()),
    "causal, several batches": (Shape(2, 300, 300, 2, 1), Scoring(causal=True)),
    "some without rows": (Shape(1, 200, 600, 1), Scoring(window=(None, -100))),
    "the first without rows": (Shape(1, 300, 500, 1), Scoring(window=(70, 20))),
    "none with rows": (Shape(1, 130, 300, 1), Scoring(window=(-500, 600))),
}


@pytest.fixture
def multiprocessors(monkeypatch):
    """Set the multiprocessors of the emulated device, each of which has one CTA."""
    return lambda count: monkeypatch.setattr(launch, "EMULATED_MULTIPROCESSORS", count)


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_how_many_a_cta_takes(name, multiprocessors):
    batch, seen = random_batch(CASES[name][0], 0, CASES[name][1]), []
    for count in (1, 3, 100):
        multiprocessors(count)
        seen.append(run(batch))
        assert not complaints(batch, seen[-1])
    for other in seen[1:]:
        assert all(map(torch.equal, seen[0].gradients, other.gradients))


@pytest.mark.parametrize("options", [Options(), Options(schedule=1, completion="late")], ids=str)
@pytest.mark.parametrize("name", ["one query tile each", "some without rows"])
def test_nothing_is_found_in_a_cta_that_takes_all(name, options, multiprocessors):
    """Items of a single query tile reuse both stages of K before the last dQ but one is done."""
    multiprocessors(1)
    for kernel in batch_case(random_batch(CASES[name][0], 0, CASES[name][1]), "pingpong", False, "sm90"):
        assert findings(kernel, options) == (), kernel.name


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_tiles_without_rows_than_the_ring_is_long_follow_one_another(deterministic, multiprocessors):
    """Behind every packed sequence there is one for each head. A CTA ends an item in the bursts of the next one."""
    multiprocessors(1)
    batch = packed_batch([0, 130, 130, 260], [0, 130, 200, 330], (ITEM_STAGES + 1, ITEM_STAGES + 1))
    assert not complaints(batch, run(batch, deterministic))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("multiprocessors", [2, 132])
def test_there_is_a_cta_for_each_multiprocessor_that_gets_an_item(multiprocessors):
    tensors = tensors_for("dense")
    items = launch.num_items(tensors)
    for name, deterministic in {"dense": False, "dense-deterministic": True}.items():
        variant, settings = call.variant_named(name, DType.BF16), Settings(deterministic=deterministic)
        *_, ctas, most = call.numbers_of(variant, tensors, settings, multiprocessors)
        assert (ctas, most) == (min(items, multiprocessors), items)
