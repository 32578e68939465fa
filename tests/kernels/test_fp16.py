"""fp16 as element type: three bits more than bf16, and a range that dS can leave."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.problems import complaints, run
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.kernels.sm100.plan import SCHEDULES
from undertow.reference import Scoring, attention_backward
from undertow.tolerance import yardstick

F16 = torch.float16
LARGEST = 65504.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_right_in_fp16(schedule, causal):
    batch = random_batch(Shape(1, 200, 300, 2, 1), scoring=Scoring(causal=causal), dtype=F16)
    done = run(batch, schedule)
    assert not complaints(batch, done.gradients)
    assert all(grad.dtype == F16 for grad in done.gradients)
    assert max(yardstick(batch, batch.scoring).ideal) < 4e-4, "bf16 would have 2e-3"


@pytest.mark.parametrize("factor", [1.0, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("dtype", [F16, torch.bfloat16], ids=["fp16", "bf16"])
def test_large_inputs_stay_right(factor, dtype):
    """Scores grow with the square of the factor: at 30 rows are one-hot and D cancels against dP."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = ((factor * torch.randn(1, 150, 1, 64, generator=generator)).to(dtype) for _ in range(3))
    dout = torch.randn(1, 150, 1, 64, generator=generator).to(dtype)
    batch = complete({"q": q, "k": k, "v": v, "dout": dout}, Scoring(causal=True))
    assert not complaints(batch, run(batch).gradients)


def steep_batch(dtype: torch.dtype, dout: float) -> Batch:
    """One row, two keys that differ in sign only: P = 1/2 each, dS = +-32 dout, dQ = 32 dout k / 4, dV = dout / 2."""
    k = torch.full((1, 2, 1, 64), 1e-3, dtype=dtype)
    v = torch.ones(1, 2, 1, 64, dtype=dtype)
    k[:, 1] *= -1
    v[:, 1] *= -1
    rows = (1, 1, 1, 64)
    return complete({"q": torch.zeros(rows, dtype=dtype), "k": k, "v": v, "dout": torch.full(rows, dout, dtype=dtype)})


def test_ds_beyond_fp16_shows_as_infinity():
    """The documented limit: dS is a matrix operand of 16 bits. The true gradients would fit, dS = 9.6e5 does not."""
    batch = steep_batch(F16, 3e4)
    true = attention_backward(batch.q, batch.k, batch.v, batch.dout)
    assert true.dq.abs().max() == pytest.approx(240.1, rel=1e-3)
    gradients = run(batch).gradients
    assert not torch.isfinite(gradients.dq).any(), "an overflow must not look like a number"
    assert torch.equal(gradients.dv.double(), true.dv), "dV does not meet dS"


@pytest.mark.parametrize(("dtype", "dout"), [(F16, 2000.0), (torch.bfloat16, 3e4)])
def test_ds_up_to_the_limit_is_right(dtype, dout):
    """32 x 2000 = 64000 is the last round number below 65504; bf16 has the range of fp32."""
    batch = steep_batch(dtype, dout)
    assert 32 * dout < LARGEST or dtype == torch.bfloat16
    assert not complaints(batch, run(batch).gradients)
