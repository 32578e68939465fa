"""flash-attn-4's backward kernels: the same bits and the same counts on both back ends, whatever the schedule."""

from __future__ import annotations

import pytest
import torch

from tests.flash_attn_4 import launches
from tests.flash_attn_4.conftest import flash_attn_4_ptx  # noqa: F401  a fixture
from undertow import emulator as emu

STAGES = {"preprocess": launches.preprocess, "main": launches.main, "postprocess": launches.postprocess}
HOW = {
    "fixed": emu.Options(backend="compiled"),
    "late": emu.Options(backend="compiled", completion="late"),
    "seeds": emu.Options(backend="compiled", schedule=7, completion=("seeded", 11)),
}


@pytest.fixture(scope="module")
def programs(flash_attn_4_ptx):  # noqa: F811
    return {stage: emu.load_program(flash_attn_4_ptx[stage]) for stage in STAGES}


def problem(seqlen_q: int, seqlen_k: int) -> launches.Problem:
    generator = torch.Generator().manual_seed(seqlen_q)
    q, k, v, out, dout = (
        torch.randn(1, n, 2, 64, generator=generator).to(torch.bfloat16)
        for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q, seqlen_q)
    )
    lse = torch.randn(1, 2, seqlen_q, generator=generator) + 8
    return launches.Problem(q, k, v, out, dout, lse, *(torch.zeros_like(x) for x in (q, k, v)))


def run(programs, seqlens: tuple[int, int], options: emu.Options):
    case = problem(*seqlens)
    buffers = launches.Buffers.for_problem(case)
    results = {stage: emu.launch(programs[stage], build(case, buffers), options) for stage, build in STAGES.items()}
    tensors = (case.dq, case.dk, case.dv, buffers.d, buffers.lse_log2, buffers.dq_accumulator)
    bits = [t.contiguous().view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32) for t in tensors]
    return results, bits


@pytest.mark.parametrize("seqlens", [(256, 256), (200, 333)])
def test_flash_attn_4_gives_the_same_bits_on_both_back_ends(programs, seqlens):
    expected, expected_bits = run(programs, seqlens, emu.Options(backend="numpy"))
    assert expected_bits[0].any() and expected_bits[1].any()
    for options in HOW.values():
        actual, bits = run(programs, seqlens, options)
        assert all(torch.equal(a, b) for a, b in zip(bits, expected_bits, strict=True))
        for stage in STAGES:
            assert actual[stage].barriers == expected[stage].barriers
            assert (actual[stage].executions == expected[stage].executions).all()
