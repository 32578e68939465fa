"""Softcap on SM90: scores bent by tanh in the registers of their GEMM, and LSE read from its terms in shared memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.packings import packed_batch
from tests.kernels.test_softcap import steep
from tests.kernels_sm90.passes import complaints, run
from undertow.backward_case import batch_case
from undertow.check import check
from undertow.emulator import Options
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.kernels.backward import compile_backward
from undertow.kernels.sm90 import call
from undertow.kernels.sm100.launch import LaunchInputError
from undertow.plan.schema import DType
from undertow.reference import Scoring

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


def everything() -> Batch:
    """Packed sequences, one of them empty, with sinks, a gradient of LSE, a window and a negative scale."""
    sink = torch.tensor([0.5, -1.0])
    options = {"window": (100, 20), "softcap": 2.0, "softmax_scale": -0.3, "sink": sink}
    batch = packed_batch([0, 0, 130, 300], [0, 20, 180, 370], (2, 1), rows=(330, 370), **options)
    return dataclasses.replace(batch, dlse=torch.randn(batch.lse.shape, generator=torch.Generator().manual_seed(9)))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 300, 200, 4, 2), (1, 130, 333, 2, 1), (2, 200, 150, 1)], ids=str)
def test_gradients_are_right_under_a_softcap(shape, dtype):
    batch = random_batch(Shape(*shape), 3, Scoring(causal=True, softcap=1.5), dtype)
    assert not complaints(batch, run(batch))


def test_gradients_are_right_under_a_softcap_without_a_mask():
    batch = random_batch(Shape(1, 300, 260, 2, 1), scoring=Scoring(softcap=1.5))
    assert not complaints(batch, run(batch))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("causal-softcap", DType.BF16),
        ("causal-softcap", DType.F16),
        ("dense-softcap", DType.BF16),
        ("window-packed-softcap-deterministic", DType.BF16),
    ],
)
def test_a_softcap_spills_no_register(name, dtype):
    """No dP is in flight while tanh, P and its slope are alive; a mask has a loop of its own for each side."""
    resources = compile_backward("sm90", call.variant_named(name, dtype).plan).main.resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert resources.warnings == ()


@DTYPES
@pytest.mark.parametrize(("softcap", "factor"), [(15.0, 4.0), (50.0, 10.0), (0.01, 1.0), (2.0, 30.0), (1e3, 4.0)])
def test_scores_at_and_beyond_the_cap(softcap, factor, dtype):
    batch = steep(softcap, factor, dtype)
    assert not complaints(batch, run(batch))


@DTYPES
@pytest.mark.parametrize("softcap", [1e5, 1e30])
def test_a_cap_out_of_reach_is_no_cap(softcap, dtype):
    """LSE is taken off the exponents by the softmax, not by the tensor cores; the scores are the same."""
    capped, free = steep(softcap, 4.0, dtype), steep(None, 4.0, dtype)
    assert not complaints(free, run(capped))


@DTYPES
@pytest.mark.parametrize("softcap", [1e-16, 1e30])
@pytest.mark.parametrize("scale", [0.0, -5.0, 40.0])
def test_any_scale_will_do_under_the_smallest_and_the_largest_cap(softcap, scale, dtype):
    """Nothing is divided by the scale here, and pairs that are not seen stay out; rows that see nothing, too."""
    batch = random_batch(Shape(1, 190, 150, 1), scoring=Scoring(scale, causal=True, softcap=softcap), dtype=dtype)
    assert not complaints(batch, run(batch))


def test_keys_that_do_not_exist_overflow_nothing():
    """All scores lie far below zero, those of zeros beyond the last key do not: their P would be 2^1100."""
    one, batch = torch.ones(1, 40, 1, 64).bfloat16(), random_batch(Shape(1, 40, 40, 1))
    tensors = {"q": 4 * one, "k": -4 * one, "v": batch.v, "dout": batch.dout}
    batch = complete(tensors, Scoring(softmax_scale=1.0, softcap=1e3))
    assert float(batch.lse.max()) < -700
    assert not complaints(batch, run(batch))


def test_a_softcap_meets_everything_else():
    batch = everything()
    first = run(batch, deterministic=True)
    assert not complaints(batch, first)
    again = run(batch, deterministic=True, options=Options("compiled", 9, ("seeded", 4)))
    assert all(map(torch.equal, first.gradients, again.gradients))


@pytest.mark.parametrize(
    "options", [Options(completion="late"), Options(schedule=1, completion=("seeded", 1))], ids=str
)
def test_nothing_is_found_not_even_advice(options):
    """The reads of LSE come before the copy that takes their slot, in every lane."""
    batch = random_batch(Shape(1, 400, 140, 1), scoring=Scoring(causal=True, softcap=2.0))
    for kernel in batch_case(batch, "pingpong", arch="sm90"):
        plan = getattr(kernel.launch.labels, "plan", None)
        assert check(kernel.ptx, kernel.launch, options, plan=plan, strict=True).findings == (), kernel.name


@pytest.mark.parametrize("softcap", [0.0, float("nan"), float("inf"), 1e-17, 1e31])
def test_a_cap_that_is_no_cap_is_refused(softcap):
    batch = random_batch(Shape(1, 8, 8, 1), scoring=Scoring())
    with pytest.raises(LaunchInputError, match=r"softcap=.*: must be in \[1e-16, 1e\+30\], or None"):
        run(dataclasses.replace(batch, scoring=dataclasses.replace(batch.scoring, softcap=softcap)))
