"""The forward operators, taken over: flash-attn-4's forward pass where it is able, torch's own for everything else."""

from __future__ import annotations

import logging
from types import ModuleType

import pytest
import torch

from tests.flash_attn_4.interface import signature
from tests.integrations.test_flash_operators import aten, on_cpu, packed
from undertow.attention.problem import BackendError
from undertow.inputs import Shape, random_batch
from undertow.integrations import flash_operators
from undertow.integrations.sdpa import enable_with


@pytest.fixture
def flash_attn_4(monkeypatch):
    """A flash-attn-4 whose forward pass returns as many tensors as the releases since b33 do, and is recorded."""
    recorded = []

    def _flash_attn_fwd(q, k, v, *, out, **options):
        assert options["return_lse"] and out.shape == q.shape
        recorded.append(options)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0]), 3.0)
        out[:90].fill_(2.0)
        return out, lse, None, None, None

    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = _flash_attn_fwd  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(flash_operators.libraries, "flash_attn_4_module", lambda: module)
    monkeypatch.setattr(flash_operators.libraries, "outside_flash_attn_4", lambda call: None)
    return recorded


def test_flash_attn_4_makes_the_forward_where_it_can(torch_flash, flash_attn_4):
    batch = random_batch(Shape(1, 16, 16, 2))
    q, k, v = (x.transpose(1, 2) for x in (batch.q, batch.k, batch.v))
    with enable_with(on_cpu()):
        results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, mask = results
    assert not torch_flash and len(flash_attn_4) == 1
    assert flash_attn_4[0]["causal"] and (out == 2).all() and (lse == 3).all()
    assert out.stride() == torch.empty_like(q).stride(), "as the meta kernel promises"
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 16, 16)
    assert (seed.shape, offset.shape, mask.numel()) == ((2,), (), 0)


def test_flash_attn_4_makes_the_packed_forward_too(torch_flash, flash_attn_4):
    batch = packed()
    sequences = batch.scoring.sequences
    assert sequences is not None
    with enable_with(on_cpu()):
        out, lse, *_ = aten._flash_attention_forward(
            batch.q, batch.k, batch.v, sequences.cu_seqlens_q, sequences.cu_seqlens_k, 50, 50, 0.0, False, False,
            window_size_left=16, window_size_right=0,
        )  # fmt: skip
    assert not torch_flash and out.shape == batch.q.shape and lse.shape == batch.lse.shape
    assert (out[:90] == 2).all() and (lse[:, :90] == 3).all()
    assert not out[90:].any() and (lse[:, 90:] == -torch.inf).all(), "rows behind the last sequence, which it leaves"
    (options,) = flash_attn_4
    assert (options["window_size_left"], options["window_size_right"]) == (16, 0)
    assert (options["max_seqlen_q"], options["cu_seqlens_k"]) == (50, sequences.cu_seqlens_k)
    signature("_flash_attn_fwd").bind(batch.q, batch.k, batch.v, out=out, **options)


@pytest.mark.parametrize("option", [{"seqused_k": torch.full((4,), 3, dtype=torch.int32)}, {"num_splits": 2}])
def test_a_forward_with_more_than_we_read_is_torch_s(torch_flash, flash_attn_4, option):
    batch = packed()
    sequences = batch.scoring.sequences
    assert sequences is not None
    with enable_with(on_cpu()):
        aten._flash_attention_forward(
            batch.q,
            batch.k,
            batch.v,
            sequences.cu_seqlens_q,
            sequences.cu_seqlens_k,
            50,
            50,
            0.0,
            False,
            False,
            **option,
        )
    assert torch_flash == {"flash_forward": 1} and not flash_attn_4


def test_asking_for_flash_attn_4_where_it_is_unable_is_told(torch_flash, caplog):
    batch = random_batch(Shape(1, 16, 16, 2))
    q, k, v = (x.transpose(1, 2) for x in (batch.q, batch.k, batch.v))
    with enable_with(on_cpu(forward="flash-attn-4")), caplog.at_level(logging.WARNING):
        aten._scaled_dot_product_flash_attention(q, k, v)
    assert torch_flash == {"sdpa_forward": 1}
    assert "q is on cpu" in caplog.text
    with enable_with(on_cpu(forward="flash-attn-4", strict=True)), pytest.raises(BackendError, match="q is on cpu"):
        aten._scaled_dot_product_flash_attention(q, k, v)


def test_a_forward_that_flash_attn_4_refuses_is_torch_s(torch_flash, flash_attn_4, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise AssertionError("only Tuesdays")

    monkeypatch.setattr(flash_operators.libraries.flash_attn_4_module(), "_flash_attn_fwd", refuse)
    batch = random_batch(Shape(1, 16, 16, 2))
    q, k, v = (x.transpose(1, 2) for x in (batch.q, batch.k, batch.v))
    for forward in ("auto", "flash-attn-4"):
        with enable_with(on_cpu(forward=forward)):
            aten._scaled_dot_product_flash_attention(q, k, v)
    assert torch_flash == {"sdpa_forward": 2} and "only Tuesdays" in caplog.text


def test_a_query_whose_columns_lie_apart_gets_an_out_like_it(torch_flash, flash_attn_4):
    batch = random_batch(Shape(1, 16, 16, 2))
    q, k, v = (x.transpose(1, 2) for x in (batch.q, batch.k, batch.v))
    q = q.transpose(2, 3).contiguous().transpose(2, 3)
    with enable_with(on_cpu()):
        out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert (out == 2).all() and out.stride() == torch.empty_like(q).stride() and not torch_flash
