"""Parts of the keys at a time, as context parallel engines call a backward pass: given the whole out and LSE."""

from __future__ import annotations

import math

import pytest
import torch

import undertow
from tests.attention.places import BF16, Place, exact, inputs, run
from tests.kernels.packings import offsets
from tests.public_cases.batches import F16
from undertow.reference import Scoring, Sequences


def in_parts(place: Place, tensors, parts: int, dtype: torch.dtype = torch.float32, partial: bool = False):
    """dq, dk, dv by chunks of keys, dq added up in `dtype`. partial: each chunk with an out and LSE of its own."""
    q, k, v, dout = (x.to(place.device) for x in tensors)
    out, lse = undertow.flash_attn_func(q, k, v, return_lse=True)
    dq, dk, dv = torch.zeros_like(q, dtype=dtype), [], []
    for k_part, v_part in zip(k.chunk(parts, dim=1), v.chunk(parts, dim=1)):
        if partial:
            out, lse = undertow.flash_attn_func(q, k_part, v_part, return_lse=True)
        of_part = undertow.attention_backward(dout, q, k_part, v_part, out, lse, backend=place.backend)
        assert all(x.dtype == q.dtype for x in of_part)
        dq += of_part[0]
        dk.append(of_part[1])
        dv.append(of_part[2])
    return dq.cpu(), torch.cat(dk, dim=1).cpu(), torch.cat(dv, dim=1).cpu()


def error(got, want) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want)]


def test_chunks_add_up_to_one_shot(place: Place):
    """huggingface/picotron#37: D is of the whole row, dO . O with the final O; a partial O gives wrong gradients."""
    tensors = inputs((128, 256))
    want = exact(tensors)
    whole = error(in_parts(place, tensors, 1), want)
    for got, one_shot in zip(error(in_parts(place, tensors, 2), want), whole):
        assert got <= 1.25 * one_shot
    assert all(wrong > 0.1 for wrong in error(in_parts(place, tensors, 2, partial=True), want))


def test_the_error_does_not_grow_with_the_number_of_chunks(quick_place: Place):
    """zhuzilin/ring-flash-attention#42: added up in fp32, within 20 % of one chunk; in 16 bits it grows."""
    tensors = inputs((64, 1024), (1, 1))
    want = exact(tensors)
    one = error(in_parts(quick_place, tensors, 1), want)[0]
    errors = {n: error(in_parts(quick_place, tensors, n), want)[0] for n in (2, 4, 8, 16)}
    assert all(abs(e / one - 1) < 0.2 for e in errors.values()), errors
    assert error(in_parts(quick_place, tensors, 16, dtype=BF16), want)[0] > 1.5 * one


def test_lse_is_a_natural_logarithm(quick_place: Place):
    """meta-pytorch/attention-gym PR 200: exp(S - LSE) sums up to 1; LSE in base 2 does not."""
    q, k, v, _ = (x.to(quick_place.device) for x in inputs((40, 70), (1, 1)))
    _, lse = undertow.flash_attn_func(q, k, v, return_lse=True)
    scores = q[0, :, 0].double() @ k[0, :, 0].double().T / 8
    assert ((scores - lse[0, 0].double()[:, None]).exp().sum(dim=1) - 1).abs().max() < 1e-5
    assert ((scores - lse[0, 0].double()[:, None] / math.log(2)).exp().sum(dim=1) - 1).abs().max() > 0.5


def test_padding_for_context_parallel_gives_nothing(place: Place):
    """NVIDIA/TransformerEngine#2186, #3331: lengths 9, 8, 8, 12, 8, 12 padded to multiples of 4."""
    lengths, padded = [9, 8, 8, 12, 8, 12], [0, 12, 20, 28, 40, 48, 60]
    cu = [0, 9, 17, 25, 37, 45, 57]
    bare = inputs((57, 57), (2, 1), None)
    index = torch.cat([torch.arange(length) + first for length, first in zip(lengths, padded)])

    def pad(x):
        wide = torch.full((60, *x.shape[1:]), 1e4, dtype=x.dtype)
        wide[index] = x
        return wide

    def gradients(tensors, offsets_, **used):
        c = offsets(*offsets_)
        return run(place, tuple(tensors), cu_seqlens_q=c, cu_seqlens_k=c, causal=True, **used).grads

    want = gradients(bare, cu)
    got = gradients([pad(x) for x in bare], padded, seqused_q=offsets(*lengths), seqused_k=offsets(*lengths))
    nobody = torch.ones(60, dtype=torch.bool).index_fill(0, index, False)
    for a, b in zip(got, want):
        # on a GPU another library may make the forward pass of the padded rows, with other roundings of out
        assert max(error([a[index]], [b])) < 0.01 if place.device == "cuda" else torch.equal(a[index], b)
        assert not a[nobody].any()
    scoring = Scoring(causal=True, sequences=Sequences(offsets(*cu), offsets(*cu)))
    assert max(error(want, exact(bare, scoring))) < 0.01


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_gradients_have_the_dtype_of_the_inputs(dtype, place: Place):
    """zhuzilin/ring-flash-attention PR 87: four steps; `in_parts` asserts the dtype of each."""
    tensors = inputs((128, 256), dtype=dtype)
    assert max(error(in_parts(place, tensors, 4), exact(tensors))) < 0.01
