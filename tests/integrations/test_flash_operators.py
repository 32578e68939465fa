"""torch's flash operators, taken over: right gradients, in the strides that graphs rely on, and nothing in silence."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from undertow.attention import counts, dispatch
from undertow.attention.dispatch import Choice
from undertow.attention.problem import BackendError, Problem
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.integrations.flash_operators import Options
from undertow.integrations.sdpa import enable_with
from undertow.reference import DENSE, Gradients, Scoring, Sequences
from undertow.tolerance import yardstick
from undertow.verify import complaint

BF16, F16 = torch.bfloat16, torch.float16
aten = torch.ops.aten


def on_cpu(**options) -> Options:
    return Options(dispatch_key="CPU", **options)


def leaves(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as a user has them: (batch, heads, seqlen, 64), views of rows, requiring gradients."""
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (batch.q, batch.k, batch.v))
    return q, k, v


def gradients(batch: Batch, causal: bool = False, scale: float | None = None) -> Gradients:
    """Gradients of scaled_dot_product_attention's flash operator at the batch, in rows."""
    q, k, v = leaves(batch)
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0]
    out.backward(batch.dout.transpose(1, 2))
    return Gradients(*(grad_of(x).transpose(1, 2) for x in (q, k, v)))


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def assert_right(batch: Batch, grads: Gradients) -> None:
    assert not complaint(yardstick(batch, batch.scoring), grads)


@pytest.mark.parametrize(
    ("shape", "scoring", "dtype"),
    [
        (Shape(2, 70, 70, 2), DENSE, BF16),
        (Shape(1, 130, 130, 4, 2), Scoring(causal=True), BF16),
        (Shape(1, 33, 96, 4, 1), Scoring(softmax_scale=0.3), F16),
    ],
    ids=["two-batches", "causal-grouped", "one-key-head-fp16"],
)
def test_gradients_of_the_dense_operator_are_right(torch_flash, shape, scoring, dtype):
    batch = random_batch(shape, scoring=scoring, dtype=dtype)
    with enable_with(on_cpu()):
        grads = gradients(batch, scoring.causal, scoring.softmax_scale)
    assert_right(batch, grads)
    assert counts() == {"reference": 1} and torch_flash == {"sdpa_forward": 1}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_kernel_computes_them_on_the_emulator(torch_flash, causal):
    batch = random_batch(Shape(1, 160, 160, 2, 1), scoring=Scoring(causal=causal))
    with enable_with(on_cpu(backend="emulator", strict=True)):
        grads = gradients(batch, causal)
    assert_right(batch, grads)
    assert counts() == {"emulator": 1} and torch_flash == {"sdpa_forward": 1}


def packed(window: tuple[int, int] = (-1, -1), rows: int = 100) -> Batch:
    """Sequences of 33, 0, 50 and 7 rows, and rows behind the last one; bounds as varlen_attn says them."""
    offsets = torch.tensor([0, 33, 33, 83, 90], dtype=torch.int32)
    left, right = (None if bound == -1 else bound for bound in window)
    scoring = Scoring(window=(left, right), sequences=Sequences(offsets, offsets))
    return random_batch(Shape(4, rows, rows, 4, 2), scoring=scoring)


def varlen_gradients(batch: Batch, window: tuple[int, int]) -> Gradients:
    q, k, v = (x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v))
    sequences = batch.scoring.sequences
    assert sequences is not None
    offsets = sequences.cu_seqlens_q, sequences.cu_seqlens_k
    out = varlen_attn(q, k, v, *offsets, 50, 50, window_size=window, enable_gqa=True)
    assert isinstance(out, Tensor)
    out.backward(batch.dout)
    return Gradients(*(grad_of(x) for x in (q, k, v)))


@pytest.mark.parametrize(
    ("window", "backend"),
    [((-1, -1), "auto"), ((-1, 0), "auto"), ((16, 0), "auto"), ((5, 9), "auto"), ((16, 0), "emulator")],
    ids=["full", "causal", "window", "both-sides", "window-emulator"],
)
def test_varlen_attn_follows(torch_flash, window, backend):
    batch = packed(window)
    with enable_with(on_cpu(backend=backend)):
        grads = varlen_gradients(batch, window)
    assert_right(batch, grads)
    assert torch_flash == {"flash_forward": 1}
    for grad in grads:
        assert not grad[90:].any(), "rows behind the last sequence take no part"


def test_every_negative_bound_is_none(torch_flash):
    """For our own functions only -1 is; for torch's operators the others are too."""
    batch = packed((-1, 0))
    sequences = batch.scoring.sequences
    assert sequences is not None
    with enable_with(on_cpu()):
        grads = aten._flash_attention_backward(
            *(batch.dout, batch.q, batch.k, batch.v, batch.out, batch.lse),
            *(sequences.cu_seqlens_q, sequences.cu_seqlens_k, 50, 50, 0.0, False),
            *(torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)),
            window_size_left=-7,
            window_size_right=0,
        )
    assert_right(batch, Gradients(*grads))
    assert not torch_flash


def interleaved(x: Tensor) -> Tensor:
    """Every second row of a tensor that has other numbers between."""
    return torch.stack([x, -x], dim=3).flatten(2, 3)[:, :, ::2]


def rows_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = {
    "heads-first": lambda x: x,
    "rows-first": rows_first,
    "batch-inside": lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "every-second-row": interleaved,
    "rows-first-half-the-heads": lambda x: rows_first(torch.cat([x, -x], dim=1))[:, : x.shape[1]],
    "columns-apart": lambda x: torch.stack([x, -x], dim=-1)[..., 0],
    "one-head-expanded": lambda x: x[:, :1].expand_as(x),
    "one-batch-expanded": lambda x: rows_first(x)[:1].expand_as(x),
}


@pytest.mark.parametrize("of_q", LAYOUTS)
@pytest.mark.parametrize("of_k", ["heads-first", "rows-first"])
def test_gradients_have_the_strides_that_the_meta_kernel_promises(torch_flash, of_q, of_k):
    some = random_batch(Shape(2, 24, 24, 3))
    q, k, v, dout = (
        LAYOUTS[of](x.transpose(1, 2).contiguous())
        for of, x in ((of_q, some.q), (of_k, some.k), (of_k, some.v), (of_q, some.dout))
    )
    batch = complete({name: x.transpose(1, 2) for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items()})
    with enable_with(on_cpu()):
        out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v)
        arguments = (dout, q, k, v, out, lse, None, None, 24, 24, 0.0, False)
        grads = aten._scaled_dot_product_flash_attention_backward(*arguments, rest[4], rest[5])
    assert_right(batch, Gradients(*(grad.transpose(1, 2) for grad in grads)))
    for grad, x in zip(grads, (q, k, v)):
        assert grad.stride() == torch.empty_like(x).stride() and grad.dtype == x.dtype


def test_a_gradient_that_a_sum_has_expanded_is_read(torch_flash):
    batch = random_batch(Shape(1, 40, 40, 2))
    ones = Batch(batch.q, batch.k, batch.v, torch.ones_like(batch.q), batch.out, batch.lse)
    q, k, v = leaves(batch)
    with enable_with(on_cpu()):
        out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
        out.backward(torch.ones((), dtype=BF16).expand(out.shape))
    assert_right(ones, Gradients(*(grad_of(x).transpose(1, 2) for x in (q, k, v))))


@pytest.mark.parametrize("heads", [2, 1], ids=["two-heads", "one-head"])
def test_a_compiled_graph_gets_what_it_expects(torch_flash, heads):
    """Transposed q and dO beside contiguous k and v: layouts that a graph must not mix up."""
    batch = random_batch(Shape(2, 65, 65, heads), dtype=F16)
    q = batch.q.transpose(1, 2).detach().requires_grad_()
    k, v = (x.transpose(1, 2).contiguous().detach().requires_grad_() for x in (batch.k, batch.v))

    @torch.compile(fullgraph=True, backend="inductor")
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention(2 * q, k, v, scale=1 / 16)[0]

    with enable_with(on_cpu()):
        attend(q, k, v).backward(batch.dout.transpose(1, 2))
    assert_right(batch, Gradients(*(grad_of(x).transpose(1, 2) for x in (q, k, v))))
    assert [x.stride() for x in (q, k, v)] == [grad_of(x).stride() for x in (q, k, v)]
    assert counts() == {"reference": 1}


@pytest.mark.parametrize("saved", [False, True])
def test_checkpointing_computes_the_forward_again_unless_it_is_told_to_keep_it(torch_flash, saved):
    batch = random_batch(Shape(1, 40, 40, 2))
    q, k, v = leaves(batch)
    operator = aten._scaled_dot_product_flash_attention.default
    keep = functools.partial(create_selective_checkpoint_contexts, [operator])
    contexts: dict[str, Any] = {"context_fn": keep} if saved else {}
    with enable_with(on_cpu()):
        out = checkpoint(lambda *x: operator(*x)[0], q, k, v, use_reentrant=False, **contexts)
        out.backward(batch.dout.transpose(1, 2))
    assert_right(batch, Gradients(*(grad_of(x).transpose(1, 2) for x in (q, k, v))))
    assert torch_flash == {"sdpa_forward": 1 if saved else 2} and counts() == {"reference": 1}


def test_a_call_by_keywords_is_read_as_one_by_position(torch_flash):
    """The ring of context parallelism calls by keywords, defaults left out."""
    batch = random_batch(Shape(1, 32, 32, 2))
    q, k, v, out, dout = (x.transpose(1, 2) for x in (batch.q, batch.k, batch.v, batch.out, batch.dout))
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    with enable_with(on_cpu()):
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_out=dout, query=q, key=k, value=v, out=out, logsumexp=batch.lse, cum_seq_q=None, cum_seq_k=None,
            max_q=32, max_k=32, dropout_p=0.0, is_causal=False, philox_seed=state[0], philox_offset=state[1],
        )  # fmt: skip
    assert_right(batch, Gradients(*(grad.transpose(1, 2) for grad in grads)))


def backward_arguments(head_dim: int = 64, dtype: torch.dtype = BF16) -> list:
    """Arguments of the dense backward operator, its rows small."""
    q, k, v, dout = (torch.randn(1, 2, 8, head_dim).to(dtype) for _ in range(4))
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v)
    return [dout, q, k, v, out, lse, None, None, 8, 8, 0.0, False, seed, offset]


DROPOUT = 10


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"head_dim": 32}, "head_dim is 32: the kernels have 64"),
        ({"head_dim": 128}, "head_dim is 128: the kernels have 64"),
        ({"dtype": torch.float32}, "dtype is torch.float32: the kernels have torch.bfloat16 and torch.float16"),
        ({"dropout_p": 0.1}, "dropout_p=0.1: must be 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(f"{name}-{x}" for name, x in value.items()),
)
def test_what_our_kernels_do_not_compute_is_computed_as_before(torch_flash, caplog, arguments, reason):
    dropout_p = arguments.pop("dropout_p", 0.0)
    call = backward_arguments(**arguments)
    call[DROPOUT] = dropout_p
    expected = aten._scaled_dot_product_flash_attention_backward(*call)
    torch_flash.clear()
    with enable_with(on_cpu(backend="emulator")), caplog.at_level(logging.WARNING):
        for _ in range(2):
            grads = aten._scaled_dot_product_flash_attention_backward(*call)
    assert torch_flash == {"sdpa_backward": 2} and counts() == {}
    assert all(torch.equal(grad, want) for grad, want in zip(grads, expected))
    (told,) = [record.getMessage() for record in caplog.records if "aten::" in record.getMessage()]
    assert reason in told, "once, and why"
    with enable_with(on_cpu(backend="emulator", strict=True)), pytest.raises(BackendError, match=reason.split(":")[0]):
        aten._scaled_dot_product_flash_attention_backward(*call)
    assert torch_flash == {"sdpa_backward": 2}


def test_the_environment_can_ask_for_strictness(torch_flash, monkeypatch):
    monkeypatch.setenv("UNDERTOW_STRICT", "1")
    call = backward_arguments(head_dim=32)
    with enable_with(on_cpu(backend="emulator")), pytest.raises(BackendError, match="strict"):
        aten._scaled_dot_product_flash_attention_backward(*call)


def test_without_a_kernel_from_before_the_error_says_so():
    x = torch.zeros(1, 1, 8, 32, dtype=BF16)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    call = (x, x, x, x, x, torch.zeros(1, 1, 8), None, None, 8, 8, 0.0, False, *state)
    with enable_with(on_cpu(backend="emulator")), pytest.raises(BackendError, match="no kernel of its own"):
        aten._scaled_dot_product_flash_attention_backward(*call)


def test_a_maximum_below_the_longest_sequence_is_not_ours(torch_flash):
    batch = packed()
    sequences = batch.scoring.sequences
    assert sequences is not None
    with enable_with(on_cpu()):
        aten._flash_attention_backward(
            *(batch.dout, batch.q, batch.k, batch.v, batch.out, batch.lse),
            *(sequences.cu_seqlens_q, sequences.cu_seqlens_k, 49, 50, 0.0, False),
            *(torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)),
        )
    assert torch_flash == {"flash_backward": 1} and counts() == {}


REJECTED = {"sm100": "compute capability 9.0", "sm90": "it is Tuesday"}


@pytest.mark.parametrize(
    ("backend", "forward", "as_before"),
    [
        ("torch", "auto", True),
        ("reference", "auto", True),
        ("flash-attn-4", "torch", True),
        ("flash-attn-4", "auto", False),
    ],
)
def test_next_best_is_torch_or_flash_attn_4(torch_flash, monkeypatch, backend, forward, as_before):
    """On a GPU `choose` names who would compute instead of our kernels."""
    call = backward_arguments()
    torch_flash.clear()
    choice = Choice(backend, "next", REJECTED)
    monkeypatch.setattr(dispatch, "_choose", lambda *_: choice)
    run = dispatch.backends.by_reference
    monkeypatch.setitem(dispatch.BACKENDS, backend, dispatch.BACKENDS[backend]._replace(run=lambda p, _: run(p)))
    monkeypatch.setattr(dispatch, "_plans", {})
    with enable_with(on_cpu(forward=forward)):
        aten._scaled_dot_product_flash_attention_backward(*call)
    assert torch_flash == ({"sdpa_backward": 1} if as_before else {})
    assert counts() == ({} if as_before else {backend: 1})


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("operator", ["dense", "packed"])
def test_the_deterministic_kernel_runs_if_torch_asks_for_it(torch_flash, monkeypatch, operator, asked):
    seen = []

    def run(problem: Problem, copies: dict[str, str]):
        seen.append(problem.settings.deterministic)
        return dispatch.backends.by_reference(problem)

    monkeypatch.setitem(dispatch.BACKENDS, "reference", dispatch.BACKENDS["reference"]._replace(run=run))
    torch.use_deterministic_algorithms(asked)
    with enable_with(on_cpu()):
        if operator == "dense":
            gradients(random_batch(Shape(1, 8, 8, 1)))
        else:
            varlen_gradients(packed(), (-1, -1))
    assert seen == [asked]
