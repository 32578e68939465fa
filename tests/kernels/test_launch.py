"""Host side of the backward pass: what it refuses, and that its descriptions fit the compiled parameters."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from undertow import ptx
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.description import TensorMap


def tensors(batch: int = 1, seqlen_k: int = 333, heads: int = 2, kv_heads: int = 2) -> launch.BackwardTensors:
    seqlen_q = 200
    q, out, dout, dq = (torch.zeros(batch, seqlen_q, heads, 64, dtype=torch.bfloat16) for _ in range(4))
    k, v, dk, dv = (torch.zeros(batch, seqlen_k, kv_heads, 64, dtype=torch.bfloat16) for _ in range(4))
    return launch.BackwardTensors(q, k, v, out, dout, torch.zeros(batch, heads, seqlen_q), dq, dk, dv)


def replaced(**changes) -> launch.BackwardTensors:
    return dataclasses.replace(tensors(), **changes)


bf16 = torch.bfloat16
MISALIGNED = torch.zeros(200 * 2 * 64 + 1, dtype=bf16)[1:].view(1, 200, 2, 64)
ODD_STRIDE = torch.zeros(1, 200, 2, 68, dtype=bf16)[..., :64]
REFUSED = {
    "rank": (replaced(q=torch.zeros(200, 2, 64, dtype=bf16)), r"q has shape \(200, 2, 64\)"),
    "head_dim": (
        replaced(q=torch.zeros(1, 200, 2, 128, dtype=bf16)),
        r"q has shape .*128\): must be .* 64\)",
    ),
    "heads": (replaced(v=torch.zeros(1, 333, 1, 64, dtype=bf16)), r"v has shape"),
    "group": (tensors(heads=3, kv_heads=2), r"k has 2 heads, q has 3: heads of k must divide those of q"),
    "seqlen": (replaced(dout=torch.zeros(1, 199, 2, 64, dtype=bf16)), r"dout has shape"),
    "no-heads": (tensors(heads=0), r"heads=0: must be in \[1, "),
    "dtype": (replaced(k=torch.zeros(1, 333, 2, 64)), r"k has dtype torch.float32: must be torch.bfloat16"),
    "lse-dtype": (replaced(lse=torch.zeros(1, 2, 200, dtype=torch.float64)), r"lse has dtype torch.float64"),
    "lse-shape": (replaced(lse=torch.zeros(1, 200, 2)), r"lse has shape \(1, 200, 2\): must be \(1, 2, 200\)"),
    "device": (replaced(out=torch.zeros(1, 200, 2, 64, dtype=bf16, device="meta")), r"out is on meta: must be on cpu"),
    "last-stride": (replaced(v=torch.zeros(1, 333, 64, 2, dtype=bf16).mT), r"v has stride 2 in its last dimension"),
    "address": (replaced(out=MISALIGNED), r"out begins at an address that is 2 mod 16"),
    "stride": (replaced(dout=ODD_STRIDE), r"dout has a stride of 136 bytes in dimension 2: must be a multiple of 16"),
    "shared-result": (replaced(dq=torch.zeros(1, 200, 1, 64, dtype=bf16).expand(1, 200, 2, 64)), r"dq has stride 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernels_cannot_take_is_named(case):
    given, message = REFUSED[case]
    with pytest.raises(launch.LaunchInputError, match=message):
        launch.check_tensors(plan("split"), given)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -2e20])
def test_a_scale_that_is_no_number_is_refused(scale):
    compiled = launch.compile_backward(plan("split"))
    with pytest.raises(launch.LaunchInputError, match=r"softmax_scale=.*: must be in \[-1e\+20, 1e\+20\]"):
        launch.launches(compiled, tensors(), launch.Settings(softmax_scale=scale))


def test_settings_of_another_variant_are_refused():
    """A kernel without a mask would silently attend everything."""
    compiled = launch.compile_backward(plan("split"))
    with pytest.raises(launch.LaunchInputError, match=r"right=True.*compiled for .*right=False"):
        launch.launches(compiled, tensors(), launch.Settings(causal=True))


def test_windows_are_integers():
    with pytest.raises(launch.LaunchInputError, match=r"window: right=0.5: must be an integer or None"):
        launch.launches(launch.compile_backward(plan("split")), tensors(), launch.Settings(window=(None, 0.5)))  # type: ignore[arg-type]


def test_inputs_may_be_views_and_broadcast():
    batch, seqlen, heads = 2, 130, 3
    packed = torch.zeros(batch, seqlen, 3, heads, 64, dtype=bf16)
    q, k, v = packed.unbind(2)
    transposed = torch.zeros(batch, heads, seqlen, 64, dtype=bf16).transpose(1, 2)
    broadcast = torch.zeros(1, 1, 1, 64, dtype=bf16).expand(batch, seqlen, heads, 64)
    results = (torch.zeros(batch, seqlen, heads, 64, dtype=bf16) for _ in range(3))
    lse = torch.zeros(batch, heads, seqlen)
    launch.check_tensors(plan("split"), launch.BackwardTensors(q, k, v, transposed, broadcast, lse, *results))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_descriptions_fit_the_compiled_parameters(schedule):
    """Entry by entry: the size and the alignment class of what is described are those of the PTX `.param`."""
    compiled = launch.compile_backward(plan(schedule))
    for kernel, described in launch.launches(compiled, tensors()):
        entry = ptx.parse_module(kernel.ptx).entry(described.kernel)
        assert [getattr(value, "num_bytes", 4) for value in described.params] == [p.size for p in entry.parameters]
        maps = [isinstance(value, TensorMap) for value in described.params]
        assert maps == [p.align == 64 for p in entry.parameters]
        assert entry.directives["reqntid"] == described.block


def test_strides_of_extents_of_one_are_legal_whatever_torch_says():
    one = torch.zeros(1, 64, dtype=bf16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    assert launch.legal_strides(one) == (64, 64, 64, 1)
    plain = torch.zeros(2, 3, 4, 64)
    assert launch.legal_strides(plain) == plain.stride()
