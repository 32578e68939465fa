"""Strides and addresses: what is given is read as it lies, copied only where it must be, and never misread.

The gradient of every layout has the bits of the contiguous one, and the strides that autograd and inductor expect.
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

import undertow
from tests.attention.places import EMULATOR, Place, Ran, grad_of, inputs, on, run
from tests.kernels.packings import offsets
from undertow.attention import Problem, settings_from
from undertow.attention.memory import to_copy

NAMES = ("q", "k", "v", "dout")


def problem_of(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Problem:
    lse = torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3])
    return Problem(q, k, v, out=torch.empty(q.shape, dtype=q.dtype), lse=lse, dout=dout, settings=settings_from(64))


def same_bits(a: Ran, b: Ran) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.grads, b.grads))


def stored_as(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """`x` with its dimensions in memory in this order, outermost first."""
    back = tuple(order.index(dim) for dim in range(x.dim()))
    return x.permute(order).contiguous().permute(back)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_dout_in_every_order_of_its_dimensions(order, kernels: Place):
    """Dao-AILab/flash-attention#355, B2 S32 H4 on 1: a copy only where head_dim does not come last."""
    q, k, v, dout = inputs((32, 32), (4, 1), 2, torch.float16)
    stored = stored_as(dout, order)
    assert torch.equal(stored, dout)
    assert list(to_copy(problem_of(q, k, v, stored))) == ([] if order[3] == 3 else ["dout"])
    assert same_bits(run(kernels, (q, k, v, stored)), run(kernels, (q, k, v, dout)))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_last_dimension_that_is_not_contiguous(name, packed, place: Place, caplog):
    """Dao-AILab/flash-attention PR 2777: views by transpose; the copy is told at debug level."""
    cu = offsets(0, 10, 24)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {}
    tensors = dict(zip(NAMES, inputs((24, 24), batch=None if packed else 1)))
    want = run(place, tuple(tensors.values()), **options)
    x = tensors[name]
    tensors[name] = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    with caplog.at_level(logging.DEBUG, logger="undertow.attention"):
        got = run(place, tuple(tensors.values()), **options)
    assert same_bits(got, want)
    if place.backend == "emulator":
        assert f"{name} is copied for the kernels: stride 2 in the last dimension" in caplog.text
    for grad, given in zip(got.grads, tensors.values()):
        assert grad.shape == given.shape and grad.stride() == given.stride()


def test_packed_projections_are_read_in_place(place: Place):
    """Dao-AILab/flash-attention#2541: q, k, v as views of one projection, through autograd to the projection."""
    whole = torch.randn(1, 128, 3, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = whole.unbind(2)
    dout = inputs((128, 128))[3]
    assert to_copy(problem_of(q, k, v, dout)) == {}
    want = run(place, tuple(x.contiguous() for x in (q, k, v, dout)), causal=True)
    leaf = place.leaf(whole)
    out = undertow.flash_attn_func(*leaf.unbind(2), causal=True, backend=place.backend)
    out.backward(dout.to(place.device))
    for position, grad in enumerate(want.grads):
        assert torch.equal(grad_of(leaf)[:, :, position].cpu(), grad)


@pytest.mark.parametrize("layout", ["transposed", "packed", "expanded", "head dim first"])
def test_gradients_have_the_strides_that_the_operator_promises(layout, quick_place: Place):
    """Dao-AILab/flash-attention PR 818: (2, 16, 513, 64) fp16, q and dO transposed, k contiguous."""
    contiguous = torch.randn(2, 513, 16, 64).half()
    q = {
        "transposed": torch.randn(2, 16, 513, 64).half().transpose(1, 2),
        "packed": torch.randn(2, 513, 3, 16, 64).half()[:, :, 1],
        "expanded": torch.randn(1, 513, 1, 64).half().expand(2, 513, 16, 64),
        "head dim first": torch.randn(2, 64, 16, 513).half().permute(0, 3, 2, 1),
    }[layout][:, :33]
    k, dout = contiguous[:, :33], q.sin()
    q, k, dout = (x.to(quick_place.device) if layout == "expanded" else on(quick_place.device, x) for x in (q, k, dout))
    out, lse = undertow.flash_attn_func(q, k, k, return_lse=True)
    grads = undertow.attention_backward(dout, q, k, k, out, lse, backend=quick_place.backend)
    promised = (torch.empty_like(x.to("meta")) for x in (q, k, k))
    assert [x.stride() for x in grads] == [x.stride() for x in promised]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bytes_off", [2, 4, 8, 16])
def test_addresses_that_are_not_aligned(name, bytes_off, place: Place):
    """facebookresearch/xformers#813: right all the same, by a copy below 16 bytes and in place at 16."""
    tensors = dict(zip(NAMES, inputs((16, 16))))
    want = run(place, tuple(tensors.values()))
    x = tensors[name]
    elements = bytes_off // 2
    buffer = torch.cat([torch.zeros(elements, dtype=x.dtype), x.flatten()])
    tensors[name] = buffer[elements:].view(x.shape)
    assert tensors[name].data_ptr() % 16 == bytes_off % 16
    copied = {name: f"address {bytes_off} mod 16"} if bytes_off < 16 else {}
    assert to_copy(problem_of(*tensors.values())) == copied
    leaves = dict(tensors) if place.device == "cpu" else {n: on(place.device, x) for n, x in tensors.items()}
    got = [x.detach().requires_grad_() for x in list(leaves.values())[:3]]
    undertow.flash_attn_func(*got, backend=place.backend).backward(leaves["dout"])
    assert all(torch.equal(grad_of(a).cpu(), b) for a, b in zip(got, want.grads))


def test_out_and_lse_need_not_be_aligned_either():
    """The address of LSE is any, for it is read number by number; out begins at a multiple of 16 bytes or is copied."""
    q, k, v, dout = inputs((16, 16))
    out, lse = undertow.flash_attn_func(q, k, v, return_lse=True)
    want = undertow.attention_backward(dout, q, k, v, out, lse, backend="emulator")
    shifted_out = torch.cat([torch.zeros(1, dtype=out.dtype), out.flatten()])[1:].view(out.shape)
    shifted_lse = torch.cat([torch.zeros(1), lse.flatten()])[1:].view(lse.shape)
    by_row = lse.transpose(1, 2).contiguous().transpose(1, 2)
    for given in ((shifted_out, lse), (out, shifted_lse), (out, by_row)):
        got = undertow.attention_backward(dout, q, k, v, *given, backend="emulator")
        assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_rows_whose_stride_is_no_multiple_of_sixteen_bytes(place: Place):
    """facebookresearch/xformers#813: a row stride of 66 elements."""
    q, k, v, dout = inputs((16, 16))
    wide = torch.zeros(1, 16, 2, 66, dtype=q.dtype)[..., :64].copy_(q)
    assert to_copy(problem_of(wide, k, v, dout)) == {"q": "stride of 264 bytes in dimension 1"}
    assert same_bits(run(place, (wide, k, v, dout)), run(place, (q, k, v, dout)))


@pytest.mark.parametrize("batch", [1, 2])
def test_inputs_that_share_memory_with_themselves_pass_sums_on(batch, place: Place):
    """Expanded heads, as multi-query attention is spelled at times: the gradient of the small tensor is the sum."""
    q, k, v, dout = inputs((40, 40), (4, 1), batch)
    small = place.leaf(k)
    expanded = small.expand(batch, 40, 4, 64)
    q, v, dout = (x.to(place.device) for x in (q, v, dout))
    undertow.flash_attn_func(q, expanded, v.expand(batch, 40, 4, 64), backend=place.backend).backward(dout)
    want = run(place, (q.cpu(), *(x.cpu().expand(batch, 40, 4, 64).contiguous() for x in (k, v)), dout.cpu()))
    summed = want.grads.dk.float().sum(dim=2, keepdim=True)
    assert (grad_of(small).cpu().float() - summed).norm() <= 2**-7 * summed.norm()


def test_offsets_beyond_32_bits_are_not_copied_away(tmp_path: Path):
    """Dao-AILab/flash-attention#2611: dO with rows 9728 elements apart, 220800 of them, in a sparse file."""
    stride, total, used = 9728, 220800, 60
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2 * stride * total)
    storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=stride * total, dtype=torch.bfloat16)
    far = storage.as_strided((total, 1, 64), (stride, 64, 1))
    q, k, v, dout = inputs((used, used), (1, 1), None)
    far[-used:] = dout

    def spread(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(total - used, *x.shape[1:], dtype=x.dtype), x])

    cu_q, cu_k = offsets(0, total - used, total), offsets(0, 0, used)
    assert to_copy(problem_of(spread(q), k, v, far)) == {}
    got = run(EMULATOR, (spread(q), k, v, far), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    want = run(EMULATOR, (q, k, v, dout), cu_seqlens_q=offsets(0, used), cu_seqlens_k=offsets(0, used))
    assert torch.equal(got.grads.dq[-used:], want.grads.dq) and not got.grads.dq[:-used].any()
    assert torch.equal(got.grads.dk, want.grads.dk) and torch.equal(got.grads.dv, want.grads.dv)
