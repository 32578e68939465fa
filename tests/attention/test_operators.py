"""Attention inside graphs: operators hold their promises, nothing breaks a graph, sizes cost no compilation."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.library import opcheck

import undertow
from tests.attention.places import Place, compiled, complaints, grad_of, inputs, on, run
from tests.kernels.packings import offsets
from undertow.attention import AttentionInputError, counts, forward_counts
from undertow.attention.autograd import Request
from undertow.reference import Scoring

FORWARD, BACKWARD = torch.ops.undertow.forward.default, torch.ops.undertow.backward.default
CU: dict[str, torch.Tensor | None] = {"cu_seqlens_q": offsets(0, 3, 8), "cu_seqlens_k": offsets(0, 3, 8)}
REQUESTS = {
    "plain": Request(),
    "causal with all": Request(0.2, True, (3, None), 2.0, True, sink=torch.tensor([0.5, -1.0, 0.0, 2.0])),
    "packed": Request(packing=CU, causal=True),
    "packed, used": Request(packing={**CU, "seqused_q": offsets(2, 4), "seqused_k": offsets(3, 1)}),
}
ALL_REQUESTS = pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())


@pytest.fixture(autouse=True)
def _compiled_afresh():
    torch._dynamo.reset()
    counters.clear()


def of(request: Request, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return inputs((8, 8), (4, 2), 1 if request.packing is None else None, dtype, head_dim=4)


@ALL_REQUESTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_forward_operator_holds_its_promises(request_, dtype):
    q, k, v, _ = of(request_, dtype)
    opcheck(FORWARD, (*(x.requires_grad_() for x in (q, k, v)), *request_.options()))


@ALL_REQUESTS
@pytest.mark.parametrize("with_dlse", [False, True])
def test_the_backward_operator_holds_its_promises(request_, with_dlse):
    q, k, v, dout = of(request_)
    out, lse = FORWARD(q, k, v, *request_.options())
    dlse = torch.ones_like(lse) if with_dlse else None
    opcheck(BACKWARD, (dout, q, k, v, out, lse, dlse, *request_.options()))


@pytest.mark.parametrize("strides", ["transposed", "packed", "expanded"])
def test_operators_promise_the_strides_that_they_return(strides):
    """Dao-AILab/flash-attention PR 818: mixed layouts."""
    if strides == "transposed":
        q, v, dout = (torch.randn(2, 4, 9, 8).half().transpose(1, 2) for _ in range(3))
        k = torch.randn(2, 9, 4, 8).half()
    elif strides == "packed":
        q, k, v = torch.randn(2, 9, 3, 4, 8).half().unbind(2)
        dout = torch.randn(2, 9, 4, 8).half()
    else:
        q, k, v, dout = (torch.randn(1, 9, 1, 8).half().expand(2, 9, 4, 8) for _ in range(4))
    options = Request(causal=True).options()
    opcheck(FORWARD, (*(x.detach().requires_grad_() for x in (q, k, v)), *options))
    out, lse = FORWARD(q, k, v, *options)
    opcheck(BACKWARD, (dout, q, k, v, out, lse, None, *options))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients_of_the_operators_are_those_of_finite_differences(packed):
    request = REQUESTS["packed" if packed else "causal with all"]
    q, k, v = (x.requires_grad_() for x in of(request)[:3])
    assert torch.autograd.gradcheck(lambda *x: FORWARD(*x, *request.options()), (q, k, v), fast_mode=True)


def loss(q, k, v, backend):
    """Both results matter."""
    out, lse = undertow.flash_attn_func(q, k, v, causal=True, window_size=(64, -1), return_lse=True, backend=backend)
    return out.float().sin().sum() + lse.sum()


def test_sizes_compile_nothing_and_break_no_graph(kernels: Place):
    """Dao-AILab/flash-attention#2353, #2154: S = 128 -> 200 -> 256, inductor, fullgraph."""
    graph = compiled(loss, "inductor", dynamic=True)
    for length in (128, 200, 256):
        tensors = inputs((length, length), (2, 1))[:3]
        leaves, plain = ([kernels.leaf(x) for x in tensors] for _ in range(2))
        graph(*leaves, kernels.backend).backward()
        loss(plain[0], plain[1], plain[2], kernels.backend).backward()
        for leaf, want in zip(leaves, plain):
            # compiled code may add up the loss in another order, but hands dO on in the same 16 bits
            assert (grad_of(leaf) - grad_of(want)).float().norm() <= 2**-8 * grad_of(want).float().norm()
            assert grad_of(leaf).stride() == leaf.stride()
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert sum(counts().values()) == 6


def test_packed_sequences_in_a_graph():
    """More sequences, other lengths, a maximum in a tensor: nothing is compiled again."""

    def attention(q, k, v, cu, most):
        return undertow.flash_attn_varlen_func(q, k, v, cu, cu, most, most, causal=True)

    graph = compiled(attention, dynamic=True)
    for ends, most in (((3, 8), torch.tensor(5)), ((9, 20), torch.tensor(11)), ((1, 2, 30), torch.tensor(28))):
        tensors = inputs((ends[-1], ends[-1]), batch=None)
        cu = offsets(0, *ends)
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        graph(*leaves, cu, most).backward(tensors[3])
        want = run(Place("cpu", "auto"), tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
        assert all(torch.equal(grad_of(leaf), grad) for leaf, grad in zip(leaves, want.grads))
        assert counters["stats"]["unique_graphs"] == 1


def test_numbers_may_be_left_open_by_a_tracer():
    graph = compiled(
        lambda q, k, v, scale, left: undertow.flash_attn_func(q, k, v, softmax_scale=scale, window_size=(left, 0)),
        dynamic=True,
    )
    q, k, v, _ = inputs((9, 9))
    for scale, left in ((0.1, 2), (0.3, 5)):
        want = undertow.flash_attn_func(q, k, v, softmax_scale=scale, window_size=(left, 0))
        assert torch.equal(graph(q, k, v, scale, left), want)


def test_a_graph_refuses_what_the_function_refuses():
    q, k, v, _ = inputs((9, 9))
    graph = compiled(undertow.flash_attn_func)
    with pytest.raises(Exception, match=r"v has shape \(1, 8, 2, 64\): must be \(1, 9, 2, 64\)"):
        graph(q, k, v[:, :8])
    with pytest.raises(AttentionInputError, match="softcap=-1"):
        torch.ops.undertow.forward(q, k, v, *Request(softcap=-1.0).options())


def test_gradients_keep_strides_under_inductor():
    """A tensor in (batch, heads, seqlen, head_dim) order, as most models hold it, and grouped heads."""
    tensors = inputs((40, 40), (4, 2))
    stored = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    leaves = [on("cpu", x).requires_grad_() for x in stored[:3]]
    graph = compiled(lambda *x: undertow.flash_attn_func(*x, causal=True).transpose(1, 2), "inductor")
    graph(*leaves).backward(stored[3].transpose(1, 2))
    want = run(Place("cpu", "auto"), tensors, causal=True)
    for leaf, grad in zip(leaves, want.grads):
        assert torch.equal(grad_of(leaf), grad) and grad_of(leaf).stride() == leaf.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["function", "operator", "compiled"])
def test_autocast_gives_its_dtype(way, dtype):
    q, k, v, _ = inputs((9, 9), dtype=torch.float32)
    ways = {
        "function": undertow.flash_attn_func,
        "operator": lambda *x: FORWARD(*x, *Request().options())[0],
        "compiled": compiled(undertow.flash_attn_func),
    }
    leaf = q.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = ways[way](leaf, k, v)
    assert out.dtype == dtype and torch.equal(out, undertow.flash_attn_func(*(x.to(dtype) for x in (q, k, v))))
    out.float().sum().backward()
    assert grad_of(leaf).dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        assert ways[way](*(x.double() for x in (q, k, v))).dtype == torch.float64


def test_no_work_in_a_graph(quick_place: Place):
    """pytorch PR 195813: compiled graphs without a row, without a key, without a batch element."""
    graph = compiled(undertow.flash_attn_func)
    for batch, lengths in ((0, (8, 8)), (2, (0, 8)), (2, (8, 0))):
        leaves = [quick_place.leaf(x) for x in inputs(lengths, batch=batch)[:3]]
        out, lse = graph(*leaves, return_lse=True)
        assert not out.any() and (lse == -torch.inf).all()
        out.float().sum().backward()
        assert all(grad_of(leaf).shape == leaf.shape and not grad_of(leaf).any() for leaf in leaves)


def test_the_kernels_run_inside_a_graph():
    tensors = inputs((100, 100), (2, 1))
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    graph = compiled(undertow.flash_attn_func)
    out, lse = graph(*leaves, causal=True, return_lse=True, backend="emulator")
    out.backward(tensors[3])
    ran = run(Place("cpu", "emulator"), tensors, causal=True)
    assert all(torch.equal(grad_of(leaf), grad) for leaf, grad in zip(leaves, ran.grads))
    assert counts() == {"emulator": 2} and forward_counts() == {"reference": 2}
    assert not complaints(tensors, ran, Scoring(causal=True)) and torch.equal(lse, ran.lse)


def test_attention_is_exported_as_one_operator():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return undertow.flash_attn_func(q, k, v, causal=True)

    q, k, v, _ = inputs((9, 9))
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=({1: length},) * 3)
    assert [node.target for node in program.graph.nodes if "undertow" in str(node.target)] == [FORWARD]
    q, k, v, _ = inputs((30, 30))
    assert torch.equal(program.module()(q, k, v), undertow.flash_attn_func(q, k, v, causal=True))


def test_shapes_are_known_without_running():
    """Meta tensors: the operators say what they return."""
    q, k, v, dout = (x.to("meta") for x in inputs((8, 9), (4, 2)))
    options = Request(sink=torch.zeros(4, device="meta")).options()
    out, lse = FORWARD(q, k, v, *options)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, 4, 8), torch.float32)
    grads = BACKWARD(dout, q, k, v, out, lse, None, *options)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape, (4,)]
    assert counts() == {} and forward_counts() == {}
