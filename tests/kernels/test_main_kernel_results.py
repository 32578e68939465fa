"""The main kernel's results at the edges that only this kernel has: absent keys and strided views."""

from __future__ import annotations

import re

import pytest
import torch

from undertow import emulated, emulator
from undertow.inputs import Batch, complete
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.reference import Gradients
from undertow.tolerance import yardstick

SPLIT = plan("split")


def complaints(batch: Batch, gradients: Gradients) -> list[str]:
    """The gradients whose error exceeds 1.25 times that of the ideal pipeline."""
    measure = yardstick(batch)
    errors, budgets = measure.errors(gradients), measure.budget
    return [f"{n}: {e:.3e}" for n, e, budget in zip(("dq", "dk", "dv"), errors, budgets) if not e <= budget]


def opposed_batch(seqlen_k: int) -> Batch:
    """Every score is about -520, so 2^-LSE_log2, the P of a key that does not exist, overflows."""
    generator = torch.Generator().manual_seed(3)

    def rows(seqlen: int, offset: float) -> torch.Tensor:
        noise = torch.randn(1, seqlen, 1, 64, generator=generator)
        return (offset + 0.3 * noise).to(torch.bfloat16)

    return complete({"q": rows(130, 8), "k": rows(seqlen_k, -8), "v": rows(seqlen_k, 0), "dout": rows(130, 0)})


def run_main(batch: Batch, ptx: str | None = None) -> Gradients:
    """The backward pass of `split`, with `ptx` in place of its main kernel."""
    compiled = launch.compile_backward(SPLIT)
    results = [torch.full_like(x, torch.nan) for x in (batch.q, batch.k, batch.v)]
    tensors = launch.BackwardTensors(batch.q, batch.k, batch.v, batch.out, batch.dout, batch.lse, *results)
    for kernel, described in launch.launches(compiled, tensors):
        emulator.launch(ptx if ptx and kernel is compiled.main else kernel.ptx, described)
    return Gradients(*results)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seqlen_k", [1, 100, 129])
def test_keys_beyond_the_end_stay_out_of_dq_where_their_p_overflows(schedule, seqlen_k):
    batch = opposed_batch(seqlen_k)
    assert not complaints(batch, emulated.backward(batch, schedule=schedule).gradients)


def test_that_overflow_is_real_without_the_predicate_on_the_ds_stores():
    """Negative control: rows of absent keys are stored like all others."""
    main = launch.compile_backward(SPLIT).main.ptx
    unpredicated, count = re.subn(r"@%p\d+ (st\.shared\.v4\.b32 \[%r\d+\], \{%r)", r"\1", main)
    assert count == 8
    gradients = run_main(opposed_batch(100), unpredicated)
    assert gradients.dq.isnan().any()


def test_results_are_written_through_any_strides_and_nowhere_else():
    """q, k, v and their gradients are slices of packed buffers; dout is a transposed view."""
    generator = torch.Generator().manual_seed(5)
    batch, seqlen, heads = 2, 130, 3
    packed = torch.randn(batch, seqlen, 3, heads, 64, generator=generator).to(torch.bfloat16)
    dout = torch.randn(batch, heads, seqlen, 64, generator=generator).to(torch.bfloat16).transpose(1, 2)
    q, k, v = packed.unbind(2)
    given = complete({"q": q, "k": k, "v": v, "dout": dout})
    written = torch.full((batch, seqlen, 4, heads, 64), torch.nan, dtype=torch.bfloat16)
    *results, untouched = written.unbind(2)
    tensors = launch.BackwardTensors(given.q, given.k, given.v, given.out, given.dout, given.lse, *results)
    for kernel, described in launch.launches(launch.compile_backward(SPLIT), tensors):
        emulator.launch(kernel.ptx, described)
    assert not complaints(given, Gradients(*results))
    assert untouched.isnan().all()
