"""What autograd may ask: every subset of gradients, LSE, no gradient at all, checkpoints, and not twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import undertow
from tests.attention.places import REFERENCE, complaints, exact, grad_of, inputs, run
from tests.kernels.packings import offsets
from undertow.attention import AttentionInputError, counts, forward_counts
from undertow.attention.autograd import Request
from undertow.reference import Scoring

DOUBLE = torch.float64


def through_operator(q, k, v, return_lse=False, learnable_sink=None, **options):
    """The operator that a graph would record."""
    results = torch.ops.undertow.forward(q, k, v, *Request(sink=learnable_sink, **options).options())
    return results if return_lse else results[0]


EAGER_AND_OPERATOR = pytest.mark.parametrize(
    "function", [undertow.flash_attn_func, through_operator], ids=["eager", "operator"]
)


@EAGER_AND_OPERATOR
def test_the_mean_of_lse_has_a_gradient(function):
    """Dao-AILab/flash-attention#1817: dQ = scale (P dLSE) K, dV = 0. The numbers are the report's, for 32 rows."""
    q, k, v = (x.double().requires_grad_() for x in inputs((32, 32), (1, 1))[:3])
    function(q, k, v, return_lse=True)[1].mean().backward()
    p = torch.softmax(q[0, :, 0] @ k[0, :, 0].T / 8, dim=1)
    assert torch.allclose(grad_of(q)[0, :, 0], p @ k[0, :, 0] / 8 / 32, rtol=1e-12, atol=1e-15)
    assert torch.allclose(grad_of(k)[0, :, 0], p.T @ q[0, :, 0] / 8 / 32, rtol=1e-12, atol=1e-15)
    assert not grad_of(v).any()
    assert [round(float(grad_of(x).abs().max()), 5) for x in (q, k)] == [0.00511, 0.00582]


def test_lse_and_out_pass_their_gradients_together(place):
    """Dao-AILab/flash-attention#889, #1137."""
    tensors = inputs((70, 90), (4, 2))
    dlse = torch.randn(1, 4, 70, generator=torch.Generator().manual_seed(4))
    ran = run(place, tensors, dlse)
    assert not complaints(tensors, ran, dlse=dlse)
    alone = exact(tensors)
    assert (ran.grads.dq.double() - alone.dq).norm() > 0.1 * alone.dq.norm(), "dLSE moves dQ"


@EAGER_AND_OPERATOR
def test_a_result_that_nobody_uses_passes_nothing(function):
    q, k, v = (x.double().requires_grad_() for x in inputs((5, 5))[:3])
    out, lse = function(q, k, v, return_lse=True)
    of_lse = torch.autograd.grad(lse.sum(), (q, k, v), retain_graph=True)
    of_out = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    of_both = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    for a, b, both in zip(of_lse, of_out, of_both):
        assert torch.allclose(a + b, both, rtol=1e-12, atol=1e-14)


@EAGER_AND_OPERATOR
def test_attention_is_not_differentiated_twice(function):
    """pytorch#116350."""
    q, k, v = (x.double().requires_grad_() for x in inputs((5, 5))[:3])
    (dq,) = torch.autograd.grad(function(q, k, v).pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice|attention cannot be differentiated twice"):
        dq.sum().backward()


def test_forward_mode_is_refused_and_not_dropped():
    q, k, v = (x.double() for x in inputs((5, 5))[:3])
    with pytest.raises(AttentionInputError, match="k carries a tangent: attention has no forward-mode derivative"):
        torch.func.jvp(lambda k: undertow.flash_attn_func(q, k, v), (k,), (k,))


def test_a_function_transform_gives_right_values_or_refuses():
    q, k, v = (x.double() for x in inputs((5, 5))[:3])
    many = torch.stack([q, 2 * q])
    mapped = torch.func.vmap(lambda q: undertow.flash_attn_func(q, k, v, causal=True))(many)
    for got, one in zip(mapped, many):
        assert torch.equal(got, undertow.flash_attn_func(one, k, v, causal=True))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: undertow.flash_attn_func(q, k, v).sum())(q)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "negative bound": {"window_size": (4, -2)},
    "scale": {"softmax_scale": -0.3},
    "softcap": {"softcap": 2.0},
    "sink": {"learnable_sink": True},
    "all": {
        "causal": True,
        "window_size": (3, None),
        "softmax_scale": 0.4,
        "softcap": 1.5,
        "learnable_sink": True,
        "deterministic": True,
    },
}


@EAGER_AND_OPERATOR
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_of_the_forward_pass_is_one_of_the_backward_pass(function, options):
    """Dao-AILab/flash-attention PR 2101: the derivative of our own forward pass in random directions."""
    q, k, v = (x.requires_grad_() for x in inputs((6, 9), (4, 2), dtype=DOUBLE, head_dim=8)[:3])
    sink = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=DOUBLE, requires_grad=True)
    fixed = {name: value for name, value in options.items() if name != "learnable_sink"}

    def attention(q, k, v, sink):
        given = {"learnable_sink": sink} if "learnable_sink" in options else {}
        return function(q, k, v, return_lse=True, **fixed, **given)

    assert torch.autograd.gradcheck(attention, (q, k, v, sink), fast_mode=True)


def test_packed_sequences_with_all_options_are_differentiated():
    q, k, v = (x.requires_grad_() for x in inputs((9, 12), (4, 2), None, DOUBLE, head_dim=8)[:3])
    sink = torch.zeros(4, dtype=DOUBLE, requires_grad=True)
    lengths: dict[str, Any] = {
        "cu_seqlens_q": offsets(0, 3, 3, 8),
        "cu_seqlens_k": offsets(0, 4, 6, 12),
        "seqused_k": offsets(4, 1, 5),
    }

    def attention(q, k, v, sink):
        out, lse = undertow.flash_attn_varlen_func(
            q, k, v, **lengths, learnable_sink=sink, causal=True, softcap=3.0, return_lse=True
        )
        return out, lse[:, :8]  # behind the last sequence LSE is -inf

    assert torch.autograd.gradcheck(attention, (q, k, v, sink), fast_mode=True)


def test_all_options_at_once_are_right_on_the_kernels(place):
    tensors = inputs((150, 200), (4, 2))
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    scoring = Scoring(0.11, True, (130, None), 20.0, sink)
    ran = run(
        place,
        tensors,
        softmax_scale=0.11,
        causal=True,
        window_size=(130, -1),
        softcap=20.0,
        learnable_sink=sink,
        deterministic=True,
    )
    assert not complaints(tensors, ran, scoring)


SUBSETS = [subset for n in (1, 2, 3) for subset in itertools.combinations(range(3), n)]


@EAGER_AND_OPERATOR
@pytest.mark.parametrize("subset", SUBSETS, ids=["".join("qkv"[i] for i in subset) for subset in SUBSETS])
def test_gradients_of_every_subset(function, subset):
    """Dao-AILab/flash-attention PR 2271."""
    tensors = inputs((6, 9), dtype=DOUBLE)
    leaves = [x.clone().requires_grad_(i in subset) for i, x in enumerate(tensors[:3])]
    function(*leaves, causal=True).backward(tensors[3])
    for i, (leaf, want) in enumerate(zip(leaves, exact(tensors, Scoring(causal=True)))):
        assert torch.allclose(grad_of(leaf), want, rtol=1e-12, atol=1e-14) if i in subset else leaf.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_nothing_is_asked_for(mode):
    q, k, v = (x.requires_grad_() for x in inputs((5, 5))[:3])
    with mode():
        out, lse = undertow.flash_attn_func(q, k, v, return_lse=True)
    assert out.grad_fn is None and not out.requires_grad and not lse.requires_grad
    assert torch.equal(out, undertow.flash_attn_func(q, k, v))
    assert undertow.flash_attn_func(q.detach(), k.detach(), v.detach()).grad_fn is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_compute_the_same_gradients(use_reentrant):
    tensors = inputs((40, 40))
    plain = run(REFERENCE, tensors, causal=True)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = (
        checkpoint(undertow.flash_attn_func, *leaves, causal=True, use_reentrant=False)
        if not use_reentrant
        else (checkpoint(lambda *a: undertow.flash_attn_func(*a, causal=True), *leaves, use_reentrant=True))
    )
    out.backward(tensors[3])
    assert all(torch.equal(grad_of(leaf), want) for leaf, want in zip(leaves, plain.grads))
    assert forward_counts() == {"reference": 3} and counts() == {"reference": 2}


def test_a_selective_checkpoint_keeps_what_the_forward_pass_stored():
    tensors = inputs((40, 40))
    leaves, want = ([x.clone().requires_grad_() for x in tensors[:3]] for _ in range(2))

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.undertow.forward.default])

    def block(*x):
        return undertow.flash_attn_func(*x, causal=True).sin()

    checkpoint(block, *leaves, use_reentrant=False, context_fn=contexts).backward(tensors[3])
    undertow.flash_attn_func(*want, causal=True).sin().backward(tensors[3])
    assert all(torch.equal(grad_of(a), grad_of(b)) for a, b in zip(leaves, want))
    assert forward_counts() == {"reference": 2}, "one checkpointed, one plain: nothing was computed again"


@pytest.mark.parametrize(
    "loss",
    [lambda out: out.sum(), lambda out: out.float().mean(), lambda out: out[:, :1].sum()],
    ids=["sum", "mean", "first row"],
)
def test_gradients_that_are_one_number(loss, place):
    """Dao-AILab/flash-attention#325: dO is expanded, all its strides are zero."""
    q, k, v, _ = inputs((5, 5))
    leaves = [place.leaf(x) for x in (q, k, v)]
    loss(undertow.flash_attn_func(*leaves, causal=True, backend=place.backend)).backward()
    stand_in = torch.zeros_like(q).requires_grad_()
    loss(stand_in).backward()
    ran = run(place, (q, k, v, grad_of(stand_in)), causal=True)
    assert all(torch.equal(grad_of(leaf).cpu(), want) for leaf, want in zip(leaves, ran.grads))


def test_offsets_written_over_before_the_backward_pass_are_noticed():
    q, k, v, dout = inputs((8, 8), batch=None)
    cu = offsets(0, 3, 8)
    out = undertow.flash_attn_varlen_func(q.requires_grad_(), k, v, cu, cu)
    cu += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def test_a_backward_pass_alone_is_that_of_the_function(place):
    tensors = inputs((70, 60), (4, 2))
    ran = run(place, tensors, causal=True, learnable_sink=torch.zeros(4))
    there = [x.to(place.device) for x in (tensors[3], *tensors[:3], ran.out, ran.lse)]
    made = undertow.attention_backward(
        *there, causal=True, learnable_sink=torch.zeros(4, device=place.device), backend=place.backend
    )
    assert len(made) == 4 and all(torch.equal(x.cpu(), want) for x, want in zip(made, ran.grads))
    assert not any(x.requires_grad for x in made)


def test_a_sink_has_a_gradient_in_its_own_dtype():
    tensors = inputs((40, 40), (4, 2))
    narrow, wide = (
        run(REFERENCE, tensors, learnable_sink=torch.ones(4, dtype=dtype)).dsink for dtype in (torch.bfloat16, DOUBLE)
    )
    assert narrow is not None and wide is not None and (narrow.dtype, wide.dtype) == (torch.bfloat16, DOUBLE)
    assert torch.equal(narrow, wide.bfloat16())


def test_a_gradient_of_another_dtype_never_arrives():
    """autograd casts it; a caller of the backward pass alone is told."""
    tensors = inputs((5, 5))
    out, lse = undertow.flash_attn_func(*tensors[:3], return_lse=True)
    with pytest.raises(AttentionInputError, match=r"dout has dtype torch\.float32"):
        undertow.attention_backward(tensors[3].float(), *tensors[:3], out, lse)
