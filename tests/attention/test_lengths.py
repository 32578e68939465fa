"""Nothing to do, rows of nobody, masks that reach past an end: right values through the public functions."""

from __future__ import annotations

import pytest
import torch

import undertow
from tests.attention.places import Place, complaints, inputs, run
from tests.kernels.packings import offsets, unused
from tests.public_cases.batches import F16
from undertow.attention import counts
from undertow.reference import Scoring, Sequences


@pytest.mark.parametrize(("batch", "lengths"), [(0, (8, 8)), (2, (0, 8)), (2, (8, 0))], ids=str)
@pytest.mark.parametrize("backend", ["auto", "emulator"])
def test_no_batch_no_row_no_key(batch, lengths, backend, quick_place: Place):
    """Dao-AILab/flash-attention PR 2776, #1159, pytorch#133780."""
    tensors = inputs(lengths, (4, 2), batch)
    ran = run(quick_place._replace(backend=backend if quick_place.device == "cpu" else "auto"), tensors)
    assert ran.out.shape == tensors[0].shape and not ran.out.any()
    assert ran.lse.shape == (batch, 4, lengths[0]) and (ran.lse == -torch.inf).all()
    assert [x.shape for x in ran.grads] == [x.shape for x in tensors[:3]] and not any(x.any() for x in ran.grads)
    assert counts() == {"nothing": 1}


def test_a_sink_without_keys_is_the_lse_and_passes_its_gradient_on(quick_place: Place):
    tensors, sink = inputs((8, 0), (4, 2), 2), torch.tensor([0.5, -1.0, 2.0, 0.0])
    dlse = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(4))
    ran = run(quick_place._replace(backend="auto"), tensors, dlse, learnable_sink=sink)
    assert torch.equal(ran.lse, sink[:, None].expand(2, 4, 8))
    assert ran.dsink is not None and torch.allclose(ran.dsink, dlse.sum(dim=(0, 2)), rtol=1e-6)


def test_packed_rows_without_any_key_pass_on_the_gradient_of_the_sink(quick_place: Place):
    """Five rows in two sequences, of which the last is used by nobody and has a NaN in its gradient."""
    tensors, sink = inputs((5, 0), (4, 2), None), torch.tensor([0.5, -1.0, 2.0, 0.0])
    dlse = torch.ones(4, 5)
    dlse[:, 4] = torch.nan
    cu = {"cu_seqlens_q": offsets(0, 1, 4), "cu_seqlens_k": offsets(0, 0, 0)}
    ran = run(quick_place._replace(backend="auto"), tensors, dlse, learnable_sink=sink, **cu)
    assert torch.equal(ran.lse[:, :4], sink[:, None].expand(4, 4)) and (ran.lse[:, 4] == -torch.inf).all()
    assert ran.dsink is not None and ran.dsink.tolist() == [4.0] * 4 and not ran.grads.dq.any()


@pytest.mark.parametrize(("cu", "rows"), [([0, 144, 432, 944], 946), ([0, 137, 486], 698)], ids=["946", "698"])
def test_rows_behind_the_last_sequence_do_not_touch_the_loss(cu, rows, place: Place):
    """pytorch PR 188933: packed projections, rows of nobody hold NaN."""
    q, k, v, dout = inputs((rows, rows), (1, 1), None)
    for x in (q, k, v, dout):
        x[cu[-1] :] = torch.nan
    packing = Sequences(offsets(*cu), offsets(*cu))
    ran = run(place, (q, k, v, dout), cu_seqlens_q=offsets(*cu), cu_seqlens_k=offsets(*cu))
    assert not any(x[cu[-1] :].any() for x in (*ran.grads, ran.out))
    assert not complaints((q, k, v, dout), ran, Scoring(sequences=packing))


def test_rows_that_a_sequence_does_not_use(place: Place):
    """Dao-AILab/flash-attention#2163: unused rows hold NaN."""
    cu, used = offsets(0, 3, 7, 9), offsets(2, 3, 1)
    packing = Sequences(cu, cu, used, used)
    nobody, _ = unused(packing, 9, 9)
    tensors = inputs((9, 9), (2, 1), None)
    for x in tensors:
        x[nobody] = torch.nan
    ran = run(place, tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=used, seqused_k=used, causal=True)
    assert nobody.nonzero().flatten().tolist() == [2, 6, 8]
    assert not any(x[nobody].any() for x in (*ran.grads, ran.out)) and (ran.lse[:, nobody] == -torch.inf).all()
    assert not complaints(tensors, ran, Scoring(causal=True, sequences=packing))


def test_one_key_a_sequence_is_exact(place: Place):
    """Dao-AILab/flash-attention#443: 253 rows see nothing; the last of each sequence has P = 1."""
    q, k, v, dout = inputs((256, 3), (1, 1), None, F16)
    cu_q, cu_k = offsets(0, 76, 110, 256), offsets(0, 1, 2, 3)
    dout.fill_(1)
    ran = run(place, (3 * q, 3 * k, 3 * v, dout), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    assert (ran.lse == -torch.inf).sum() == 253
    assert torch.equal(ran.grads.dv, torch.ones_like(v))
    assert not complaints((3 * q, 3 * k, 3 * v, dout), ran, Scoring(causal=True, sequences=Sequences(cu_q, cu_k)))


def test_packed_sequences_are_dense_ones_side_by_side(place: Place):
    """A batch of equal lengths, with its first two dimensions made one: the same bits."""
    q, k, v, dout = inputs((70, 70), (4, 2), 2)
    cu = offsets(0, 70, 140)
    dense = run(place, (q, k, v, dout), causal=True)
    flat = tuple(x.flatten(0, 1) for x in (q, k, v, dout))
    packed = run(place, flat, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert all(torch.equal(a.flatten(0, 1), b) for a, b in zip(dense.grads, packed.grads))
    assert torch.equal(dense.out.flatten(0, 1), packed.out)
    assert torch.equal(dense.lse.transpose(0, 1).flatten(1), packed.lse)


@pytest.mark.parametrize("window", [(-1, 0), (None, 0), (-1, -1), (2**31 - 1, 0), (None, 2**31 - 1)], ids=str)
def test_every_spelling_of_unbounded_under_a_causal_mask(window, quick_place: Place):
    """NVIDIA/TransformerEngine#3528: an all-zero output, then NaN, where -1 was read as a number."""
    tensors = inputs((100, 100), (8, 8))
    got, want = run(quick_place, tensors, causal=True, window_size=window), run(quick_place, tensors, causal=True)
    assert torch.equal(got.out, want.out) and want.out.any()
    assert all(torch.equal(a, b) for a, b in zip(got.grads, want.grads))


def test_a_mask_does_not_leak_into_the_next_call(place: Place):
    """NVIDIA/TransformerEngine#629: self attention with a causal window, then cross attention of 64 rows, 128 keys."""
    tensors = inputs((64, 128), (1, 1))
    run(place, inputs((64, 64), (1, 1)), causal=True, window_size=(-1, 0))
    q = torch.zeros_like(tensors[0])
    ran = run(place, (q, *tensors[1:3], torch.ones_like(q)))
    assert torch.equal(ran.grads.dv, torch.full_like(ran.grads.dv, 0.5)), "128 keys share 64 rows evenly: all are kept"


def test_a_causal_mask_is_lined_up_with_the_last_key(place: Place):
    """pytorch#108108, Dao-AILab/flash-attention#1778: rows 0 to 63 of 128 see nothing of 64 keys."""
    tensors = inputs((128, 64), (1, 1))
    ran = run(place, tensors, causal=True)
    assert (ran.lse[0, 0] == -torch.inf).tolist() == [True] * 64 + [False] * 64
    assert not ran.out[0, :64].any() and not ran.grads.dq[0, :64].any()
    assert not complaints(tensors, ran, Scoring(causal=True))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 1)])
def test_grouped_heads_are_expanded_heads_folded(heads, kv_heads, place: Place):
    """What SDPA does with enable_gqa."""
    tensors = inputs((70, 90), (heads, kv_heads))
    assert not complaints(tensors, run(place, tensors, softmax_scale=0.1), Scoring(0.1))
    q, k, v, _ = (x.double().transpose(1, 2) for x in tensors)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    out = undertow.flash_attn_func(*(x.to(place.device) for x in tensors[:3]))
    assert (out.cpu().double() - want).norm() <= 2**-8 * want.norm()
