"""The public functions on real GPUs: the stream of the caller, a second device, graphs, and autograd's own threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import undertow
from tests.attention.places import GPU, complaints, grad_of, inputs, run
from undertow.attention import Inputs, Problem, choose, counts, prepared, run_forward, settings_from
from undertow.attention.backends import OURS
from undertow.reference import Scoring

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
TENSORS = inputs((300, 300), (4, 2), 2)


def backward(tensors: tuple[Tensor, ...], **options) -> tuple[Tensor, ...]:
    """dq, dk, dv, where the tensors are."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    undertow.flash_attn_func(*leaves, causal=True, **options).backward(tensors[3])
    return tuple(grad_of(leaf) for leaf in leaves)


def test_the_gradients_are_right_and_the_counter_says_by_whom():
    ran = run(GPU, TENSORS, causal=True)
    assert not complaints(TENSORS, ran, Scoring(causal=True))
    q, k, v, dout = (x.cuda() for x in TENSORS)
    call = Inputs(q, k, v, settings=settings_from(64, causal=True))
    out, lse = run_forward(call)
    problem = Problem(q, k, v, settings=call.settings, out=out, lse=lse, dout=dout)
    assert counts() == {choose(problem).backend: 1}


def test_the_stream_of_the_caller_is_used():
    """sglang PR 36572: inputs that arrive late, on a side stream, behind a long kernel."""
    want = backward(tuple(x.cuda() for x in TENSORS), deterministic=True)
    ready = tuple(x.cuda() for x in TENSORS)
    late = tuple(torch.zeros_like(x) for x in ready)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        for x, value in zip(late, ready):
            x.copy_(value)
        got = backward(late, deterministic=True)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_is_used():
    """Dao-AILab/flash-attention PR 2356: q on cuda:1 while the current device is 0."""
    want = backward(tuple(x.to("cuda:0") for x in TENSORS), deterministic=True)
    with torch.cuda.device(0):
        got = backward(tuple(x.to("cuda:1") for x in TENSORS), deterministic=True)
    assert all(x.device.index == 1 for x in got)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want))


def test_a_graph_replays_what_eager_calls_compute():
    """MSLK PR 122: captured after a warm-up call, inputs changed in place, the same bits in deterministic mode."""
    given = tuple(x.cuda() for x in TENSORS)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        backward(given, deterministic=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(given, deterministic=True)
    for x in given:
        x.copy_(x.flip(1))
    graph.replay()
    want = backward(given, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(captured, want))


def test_a_call_that_goes_straight_to_the_launch_computes_what_the_first_did():
    """At another address, also an odd one, and refused in the same words where a tensor differs."""
    q, k, v, dout = (x.cuda() for x in TENSORS)
    out, lse = undertow.flash_attn_func(q, k, v, causal=True, return_lse=True)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return undertow.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True)

    want = call(q, k, v)
    if not set(counts()) <= set(OURS):
        pytest.skip(f"our kernels do not run here: {counts()}")
    assert len(prepared._prepared) == 1
    odd = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)
    for given in (q, q.clone(), odd):
        assert all(torch.equal(a, b) for a, b in zip(call(given, k, v), want))
    assert len(prepared._prepared) == 1
    for wrong, said in (
        ((q, k, v.cpu()), "v is on cpu: must be on cuda:0"),
        ((q, k, v.to("meta")), "v is on meta: must be on cuda:0"),
        ((q, k, v.half()), "v has dtype torch.float16: must be torch.bfloat16"),
        ((q, k, v[:, :7]), "v has shape"),
    ):
        with pytest.raises(ValueError, match=said):
            call(*wrong)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_two_devices_are_refused_where_a_call_is_prepared_for_each():
    q, k, v, dout = (x.cuda() for x in TENSORS)
    out, lse = undertow.flash_attn_func(q, k, v, return_lse=True)
    given: dict[str, Any] = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    for device in ("cuda:0", "cuda:1"):
        undertow.attention_backward(**{name: x.to(device) for name, x in given.items()})
    given["v"] = v.to("cuda:1")
    with pytest.raises(ValueError, match="v is on cuda:1: must be on cuda:0"):
        undertow.attention_backward(**given)


def test_another_head_dim_is_a_fallback_that_is_right():
    """Whoever computes it, the reference excepted: a kept library has head dim 128 in bf16."""
    tensors = inputs((200, 200), head_dim=128)
    assert not complaints(tensors, run(GPU, tensors))
    assert set(counts()) <= {"flash-attn-4", "torch"}, counts()
    with pytest.raises(ValueError, match=r"(?s)strict: .* head_dim is 128"):
        run(GPU, tensors, strict=True)


def test_nothing_waits_for_the_device():
    """Neither the choice nor the launch of packed sequences reads a length on the host."""
    q, k, v, dout = (x.cuda() for x in inputs((500, 500), (4, 2), None))
    cu = torch.tensor([0, 130, 400], dtype=torch.int32, device="cuda")
    for leaf in (q, k, v):
        leaf.requires_grad_()

    def step() -> Tensor:
        return undertow.flash_attn_varlen_func(q, k, v, cu, cu, max_seqlen_q=270, max_seqlen_k=270, causal=True)

    step().backward(dout)
    if not set(counts()) <= set(OURS):
        pytest.skip(f"kept libraries may wait: {counts()}")
    torch.cuda.set_sync_debug_mode("error")
    try:
        step().backward(dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
