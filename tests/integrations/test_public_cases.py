"""Public bug reports, through the ways in that people use: the operators of torch and flash-attn-4's function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.integrations.test_flash_operators import BF16, aten, gradients, on_cpu
from tests.integrations.test_patch_fa4 import Recorder, saved
from tests.public_cases.batches import F16, packing
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.integrations.flash_attn_4 import Options, patch
from undertow.integrations.sdpa import enable_with
from undertow.reference import Gradients, Scoring, attention_forward, round_to
from undertow.tolerance import relative_error, yardstick
from undertow.verify import complaint


def in_chunks(batch: Batch, chunks: int, of_chunk_alone: bool = False) -> Gradients:
    """Chunks of the keys one after the other, as the steps of a ring; sums in fp32, as torch's ring has them.

    of_chunk_alone: each step is given the out and LSE of its own keys, which is the wrong thing to give.
    """
    dq, dk, dv = torch.zeros(batch.q.shape), [], []
    for k, v in zip(batch.k.chunk(chunks, dim=1), batch.v.chunk(chunks, dim=1)):
        out, lse = batch.out, batch.lse
        if of_chunk_alone:
            exact = attention_forward(batch.q, k, v)
            out, lse = round_to(exact.out, out.dtype).to(out.dtype), exact.lse.float()
        grads = step(*(x.transpose(1, 2) for x in (batch.dout, batch.q, k, v, out)), lse)
        assert {grad.dtype for grad in grads} == {batch.q.dtype}
        dq += grads[0].transpose(1, 2)
        dk.append(grads[1].transpose(1, 2))
        dv.append(grads[2].transpose(1, 2))
    return Gradients(dq, torch.cat(dk, dim=1), torch.cat(dv, dim=1))


def step(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    lengths = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, *lengths, 0.0, False, seed, offset
    )


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["auto", "emulator"])
def test_steps_of_a_ring_add_up(backend, dtype):
    """picotron#37: D belongs to the whole row. ring-flash-attention PR 87: gradients have the inputs' dtype."""
    batch = random_batch(Shape(1, 64, 512, 1), dtype=dtype)
    with enable_with(on_cpu(backend=backend)):
        assert not complaint(yardstick(batch), in_chunks(batch, 2))
        assert "dq has an error" in complaint(yardstick(batch), in_chunks(batch, 2, of_chunk_alone=True))


def test_the_error_of_a_ring_does_not_grow_with_its_size():
    """ring-flash-attention#42: within a fifth of that of one step, however many there are."""
    batch = random_batch(Shape(1, 64, 1024, 1))
    reference = yardstick(batch).reference
    with enable_with(on_cpu()):
        errors = [relative_error(in_chunks(batch, chunks).dq, reference.dq) for chunks in (1, 2, 4, 8, 16)]
    assert max(errors) <= 1.2 * errors[0] and min(errors) >= 0.8 * errors[0]


def test_a_causal_call_leaves_nothing_behind(torch_flash):
    """TransformerEngine#629: cross attention after self attention sees every pair."""
    causal = random_batch(Shape(1, 64, 64, 2), scoring=Scoring(causal=True))
    cross = random_batch(Shape(1, 64, 128, 2))
    with enable_with(on_cpu()):
        for _ in range(2):
            assert not complaint(yardstick(causal, causal.scoring), gradients(causal, causal=True))
            assert not complaint(yardstick(cross), gradients(cross))


def test_padding_of_short_sequences_gives_nothing():
    """TransformerEngine#2186, #3331: sequences padded for context parallelism, padding full of large numbers."""
    lengths, starts = [9, 8, 8, 12, 8, 12], [0, 12, 20, 28, 40, 48, 60]
    bare = random_batch(
        Shape(6, 57, 57, 2, 1),
        scoring=Scoring(causal=True, sequences=packing([0, 9, 17, 25, 37, 45, 57], [0, 9, 17, 25, 37, 45, 57])),
    )
    real = torch.cat([torch.arange(length) + start for start, length in zip(starts, lengths)])

    def padded(x: Tensor) -> Tensor:
        return torch.full((60, *x.shape[1:]), 3e4, dtype=x.dtype).index_copy(0, real, x)

    used = packing(starts, starts, seqused_q=lengths, seqused_k=lengths)
    tensors = {name: padded(getattr(bare, name)) for name in ("q", "k", "v", "dout")}
    wide = complete(tensors, Scoring(causal=True, sequences=used))
    module = Recorder()
    with patch(module, Options(strict=True)):
        grads = module._flash_attn_bwd(*saved(wide), causal=True, **vars(used))
    assert not complaint(yardstick(bare, bare.scoring), Gradients(*(grad[real] for grad in grads)))
    padding = torch.ones(60, dtype=torch.bool).index_fill(0, real, False)
    assert not any(grad[padding].any() for grad in grads)
