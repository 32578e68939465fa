"""The kernels before and after the main one, executed on the emulator and held against torch."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from undertow import emulator, ptx
from undertow.kernels.compile import CompiledKernel
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.layouts import padded_rows
from undertow.kernels.sm100.plan import HEAD_DIM, TILE_M, dq_accumulator_index
from undertow.kernels.sm100.tensors import TORCH_TYPES
from undertow.plan.schema import DType

SHAPES = [(1, 1, 1), (1, 127, 1), (1, 128, 2), (2, 129, 3), (1, 300, 1)]  # batch, seqlen_q, heads
DTYPES = [DType.BF16, DType.F16]
LOG2_E = math.log2(math.e)


@pytest.fixture(scope="module", params=DTYPES, ids=lambda dtype: dtype.label)
def preprocess(request) -> tuple[DType, CompiledKernel]:
    return request.param, launch.compile_preprocess(request.param)


@pytest.fixture(scope="module", params=DTYPES, ids=lambda dtype: dtype.label)
def postprocess(request) -> tuple[DType, CompiledKernel]:
    return request.param, launch.compile_postprocess(request.param)


def packed_rows(dtype: DType, batch: int, seqlen: int, heads: int, seed: int) -> tuple[Tensor, ...]:
    """Three (batch, seqlen, heads, 64) views of one buffer, as a fused projection leaves them: strided, interleaved."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(batch, seqlen, 3, heads, HEAD_DIM, generator=generator).to(TORCH_TYPES[dtype])
    return buffer.unbind(2)


def nan_workspaces(q: Tensor) -> launch.Workspaces:
    work = launch.allocate_workspaces(row_tensors(q, q, q[:, :, 0, 0]))
    for buffer in (work.lse_log2, work.d, work.dq_accumulator):
        buffer.fill_(math.nan)
    return work


def row_tensors(out: Tensor, dout: Tensor, lse: Tensor) -> launch.BackwardTensors:
    return launch.BackwardTensors(q=out, k=out, v=out, out=out, dout=dout, lse=lse, dq=out, dk=out, dv=out)


def run_preprocess(kernel: CompiledKernel, out: Tensor, dout: Tensor, lse: Tensor) -> launch.Workspaces:
    work = nan_workspaces(out)
    emulator.launch(kernel.ptx, launch.preprocess_launch(kernel, row_tensors(out, dout, lse), work))
    return work


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_d_is_within_its_documented_error(preprocess, shape):
    dtype, kernel = preprocess
    batch, seqlen, heads = shape
    out, dout, _ = packed_rows(dtype, *shape, seed=0)
    work = run_preprocess(kernel, out, dout, torch.zeros(batch, heads, seqlen))
    products = (out.double() * dout.double()).transpose(1, 2)
    error = (work.d[:, :, :seqlen].double() - products.sum(3)).abs()
    assert (error <= 10.001 * 2.0**-24 * products.abs().sum(3)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lse_changes_its_base(preprocess, shape):
    dtype, kernel = preprocess
    batch, seqlen, heads = shape
    out, dout, _ = packed_rows(dtype, *shape, seed=1)
    lse = 20 * torch.randn(batch, heads, seqlen, generator=torch.Generator().manual_seed(2))
    work = run_preprocess(kernel, out, dout, lse)
    expected = lse.double() * LOG2_E
    assert ((work.lse_log2[:, :, :seqlen] - expected).abs() <= 2.001 * 2.0**-24 * expected.abs()).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding_rows_are_harmless_and_the_accumulator_is_clear(preprocess, shape):
    dtype, kernel = preprocess
    batch, seqlen, heads = shape
    out, dout, _ = packed_rows(dtype, *shape, seed=3)
    work = run_preprocess(kernel, out, dout, torch.zeros(batch, heads, seqlen))
    assert work.d.shape[2] == padded_rows(seqlen)
    assert torch.equal(work.d[:, :, seqlen:], torch.zeros_like(work.d[:, :, seqlen:]))
    assert torch.equal(work.lse_log2[:, :, seqlen:], torch.full_like(work.lse_log2[:, :, seqlen:], math.inf))
    assert torch.equal(work.dq_accumulator, torch.zeros_like(work.dq_accumulator))


def test_a_row_that_attended_nothing_is_harmless_even_if_its_output_is_nan(preprocess):
    """P = exp2(S - inf) = 0 and dS = P (dP - 0) = 0, whatever a forward pass left in O for 0 / 0."""
    dtype, kernel = preprocess
    out, dout, _ = (x.clone() for x in packed_rows(dtype, 1, 40, 2, seed=4))
    lse = torch.zeros(1, 2, 40)
    lse[0, 1, [0, 17, 39]] = -math.inf
    out[0, [0, 17, 39], 1] = math.nan
    work = run_preprocess(kernel, out, dout, lse)
    assert work.lse_log2[0, 1, [0, 17, 39]].tolist() == [math.inf] * 3
    assert work.d[0, 1, [0, 17, 39]].tolist() == [0.0] * 3
    assert torch.isfinite(work.d).all()


def test_nan_is_passed_on_and_not_hidden(preprocess):
    dtype, kernel = preprocess
    out, dout, _ = (x.clone() for x in packed_rows(dtype, 1, 9, 1, seed=5))
    lse = torch.zeros(1, 1, 9)
    lse[0, 0, 3] = math.nan
    dout[0, 5, 0, 63] = math.nan
    work = run_preprocess(kernel, out, dout, lse)
    assert work.lse_log2[0, 0, :9].isnan().nonzero().tolist() == [[3]]
    assert work.d.isnan().nonzero().tolist() == [[0, 0, 5]]


def test_offsets_beyond_32_bits_are_reached(preprocess, tmp_path):
    """The second batch begins 2^32 elements on, where any product in 32 bits would fall back onto the first."""
    dtype, kernel = preprocess
    far = 2**32
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2 * (far + 2 * HEAD_DIM))  # bytes, of which two pages are ever touched
    element = TORCH_TYPES[dtype]
    buffer = torch.from_file(str(tmp_path / "sparse"), shared=True, size=far + 2 * HEAD_DIM, dtype=element)
    out, dout = (buffer[at:].as_strided((2, 1, 1, HEAD_DIM), (far, HEAD_DIM, HEAD_DIM, 1)) for at in (0, HEAD_DIM))
    dout.fill_(1.0)
    out[0], out[1] = 2.0, 3.0
    work = run_preprocess(kernel, out, dout, torch.zeros(2, 1, 1))
    assert work.d[:, 0, 0].tolist() == [2.0 * HEAD_DIM, 3.0 * HEAD_DIM]

    work.dq_accumulator.fill_(5.0)
    kernel = launch.compile_postprocess(dtype)
    emulator.launch(
        kernel.ptx, launch.postprocess_launch(kernel, row_tensors(out, out, torch.zeros(2, 1, 1)), work, 1.0)
    )
    assert out.unique().tolist() == [5.0]


@pytest.mark.parametrize("name", ["preprocess", "postprocess"])
def test_rows_move_in_16_byte_vectors(name):
    """All global accesses are 16 bytes wide but those of LSE, LSE_log2 and D, of which a lane has one each."""
    kernel = {"preprocess": launch.compile_preprocess, "postprocess": launch.compile_postprocess}[name](DType.BF16)
    instructions = ptx.parse_module(kernel.ptx).entry(None).instructions
    accesses = [i.mnemonic for i in instructions if i.mnemonic.startswith(("ld.global", "st.global"))]
    narrow = [access for access in accesses if not access.endswith((".v4.b32", ".v2.b64"))]
    assert len(accesses) > len(narrow)
    expected = ["ld.global.b32", "st.global.b32", "st.global.b32"] if name == "preprocess" else []
    assert sorted(narrow) == expected


def accumulator_of(dq: Tensor, padding: float) -> Tensor:
    """Store (batch, seqlen, heads, 64) fp32 the way the reduce warps leave it, element by element of a tile."""
    batch, seqlen, heads, _ = dq.shape
    rows = torch.full((batch, padded_rows(seqlen), heads, HEAD_DIM), padding)
    rows[:, :seqlen] = dq
    tiles = rows.unflatten(1, (-1, TILE_M)).permute(0, 3, 1, 2, 4)  # batch, heads, tiles, row, column
    order = [dq_accumulator_index(row, column) for row in range(TILE_M) for column in range(HEAD_DIM)]
    flat = torch.empty(*tiles.shape[:3], TILE_M * HEAD_DIM)
    flat[..., order] = tiles.flatten(3)
    return flat


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dq_is_scaled_and_rounded_once_and_nothing_else_is_written(postprocess, shape):
    dtype, kernel = postprocess
    batch, seqlen, heads = shape
    element = TORCH_TYPES[dtype]
    sums = torch.randn(batch, seqlen, heads, HEAD_DIM, generator=torch.Generator().manual_seed(6))
    buffer = torch.full((batch, seqlen, 3, heads, HEAD_DIM), 7.0, dtype=element)
    dq = buffer[:, :, 1]
    tensors = row_tensors(dq, dq, torch.zeros(batch, heads, seqlen))
    work = launch.allocate_workspaces(tensors)
    work.dq_accumulator.copy_(accumulator_of(sums, padding=math.nan))
    emulator.launch(kernel.ptx, launch.postprocess_launch(kernel, tensors, work, 0.3))
    assert torch.equal(dq, (sums * 0.3).to(element))
    assert torch.equal(buffer[:, :, [0, 2]], torch.full_like(buffer[:, :, [0, 2]], 7.0))
