"""Every spelling of an option is read as it is meant, or refused by name before anything runs."""

from __future__ import annotations

import pytest
import torch

import undertow
from tests.attention.places import inputs
from tests.kernels.packings import offsets
from undertow.attention import AttentionInputError, counts, forward_counts, settings_from

Q, K, V, DOUT = inputs((8, 8))
PACKED = tuple(x[0] for x in (Q, K, V))


@pytest.mark.parametrize("window", [(None, None), (-1, -1), (None, -1), [-1, None]], ids=str)
def test_no_bound_has_two_spellings(window):
    assert settings_from(64, window_size=window).window == (None, None)


@pytest.mark.parametrize("window", [(-1, 0), (None, 0), (-1, -1), (-1, None), (None, 7)], ids=str)
def test_a_causal_mask_with_any_spelling_of_no_left_bound_is_causal(window):
    """NVIDIA/TransformerEngine#3528."""
    assert settings_from(64, causal=True, window_size=window).band == settings_from(64, causal=True).band


def test_other_negative_bounds_are_numbers():
    assert settings_from(64, window_size=(-2, 5)).window == (-2, 5)
    assert settings_from(64, window_size=(0, -3)).window == (0, -3)


def test_scale_follows_the_head_dim_of_the_caller():
    """tile-ai/tilelang-ascend#1669: nothing is padded, so the default is of the head dim as given."""
    assert settings_from(48).scale == 48**-0.5 and settings_from(64).scale == 0.125
    assert settings_from(64, softmax_scale=-0.5).scale == -0.5


def test_no_softcap_has_two_spellings():
    assert settings_from(64, softcap=0.0).softcap is None and settings_from(64, softcap=None).softcap is None
    assert settings_from(64, softcap=30).softcap == 30.0


OPTIONS = [
    ({"softmax_scale": float("nan")}, "softmax_scale=nan: must be finite"),
    ({"softmax_scale": torch.tensor(0.1)}, "softmax_scale=.*: must be a number"),
    ({"softcap": -1.0}, "softcap=-1.0: must be positive, or 0 or None"),
    ({"softcap": float("inf")}, "softcap=inf: must be finite"),
    ({"causal": 1}, "causal=1: must be True or False"),
    ({"deterministic": None}, "deterministic=None: must be True or False"),
    ({"window_size": 5}, r"window_size=5: must be \(left, right\)"),
    ({"window_size": (1, 2, 3)}, r"window_size=\(1, 2, 3\): must be \(left, right\)"),
    ({"window_size": (0.5, None)}, "window_size: left=0.5: must be an integer or None"),
    ({"window_size": (None, True)}, "window_size: right=True: must be an integer or None"),
    ({"learnable_sink": torch.zeros(3)}, r"learnable_sink has shape \(3,\): must be \(2,\)"),
    ({"learnable_sink": torch.zeros(2, dtype=torch.int32)}, "learnable_sink has dtype torch.int32: must be floating"),
    ({"backend": "cuda"}, "backend='cuda': must be one of auto, sm100, sm90"),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=[said[:30] for _, said in OPTIONS])
def test_options_are_refused_by_name_and_value(options, said):
    with pytest.raises(ValueError, match=said):
        undertow.flash_attn_func(Q.clone().requires_grad_(), K, V, **options)
    assert counts() == {}


TENSORS = [
    ((Q[0], K, V), r"q has shape \(8, 2, 64\): must be \(batch, seqlen, heads, head_dim\)"),
    ((Q, K[:, :, :, :32], V), r"k has shape \(1, 8, 2, 32\): must be \(1, 8, 2, 64\)"),
    ((Q, K, V[:, :7]), r"v has shape \(1, 7, 2, 64\): must be \(1, 8, 2, 64\)"),
    ((Q, K.expand(2, -1, -1, -1), V), r"k has shape \(2, 8, 2, 64\): must be \(1, 8, 2, 64\)"),
    ((Q[:, :, :1], K, V), "k has 2 heads, q has 1: heads of k must divide those of q"),
    ((Q, K, V.half()), "v has dtype torch.float16: must be torch.bfloat16"),
    ((Q.int(), K, V), "q has dtype torch.int32: must be one of torch.bfloat16"),
    ((Q, K, V.to("meta")), "v is on meta: must be on cpu, where q is"),
    ((Q, K, [1.0]), "v is a list: must be a tensor"),
    ((Q[..., :0], K[..., :0], V[..., :0]), "head_dim must be at least 1"),
]


@pytest.mark.parametrize(("tensors", "said"), TENSORS, ids=[said[:30] for _, said in TENSORS])
def test_tensors_are_refused_by_name(tensors, said):
    with pytest.raises(AttentionInputError, match=said):
        undertow.flash_attn_func(*tensors)
    assert forward_counts() == {}


PACKINGS = [
    ({"cu_seqlens_q": offsets(0, 8)}, "cu_seqlens_k=None: must be a tensor"),
    ({"cu_seqlens_q": torch.tensor([0, 8]), "cu_seqlens_k": offsets(0, 8)}, "cu_seqlens_q has dtype torch.int64"),
    ({"cu_seqlens_q": offsets(0, 8), "cu_seqlens_k": offsets(0, 4, 8)}, r"cu_seqlens_k has shape \(3,\): must be \(2,"),
    (
        {"cu_seqlens_q": offsets(0, 9), "cu_seqlens_k": offsets(0, 8)},
        r"cu_seqlens_q=\[0, 9\]: must ascend .* at most 8",
    ),
    ({"cu_seqlens_q": offsets(1, 8), "cu_seqlens_k": offsets(0, 8)}, r"cu_seqlens_q=\[1, 8\]: must ascend from 0"),
    ({"cu_seqlens_q": offsets(0, 8, 4), "cu_seqlens_k": offsets(0, 4, 8)}, r"cu_seqlens_q=\[0, 8, 4\]: must ascend"),
    (
        {"cu_seqlens_q": offsets(0, 8), "cu_seqlens_k": offsets(0, 8), "seqused_k": offsets(9)},
        r"seqused_k\[0\]=9: must be in \[0, 8\]",
    ),
    ({"cu_seqlens_q": offsets(0, 8), "cu_seqlens_k": offsets(0, 8), "seqused_q": offsets(1, 1)}, "seqused_q has shape"),
]


@pytest.mark.parametrize(("packing", "said"), PACKINGS, ids=[said[:30] for _, said in PACKINGS])
def test_packings_are_refused_by_name(packing, said):
    with pytest.raises(AttentionInputError, match=said):
        undertow.flash_attn_varlen_func(*PACKED, **packing)


@pytest.mark.parametrize("of", [int, torch.tensor, lambda n: torch.tensor([n])], ids=["int", "0-d", "1-d"])
@pytest.mark.parametrize("side", ["q", "k"])
def test_a_maximum_below_the_longest_sequence_is_refused_or_not_needed(of, side):
    """Dao-AILab/flash-attention#1773: cu=[0,300], max_seqlen=128. Never cut off: right without it, refused with it."""
    q, k, v, _ = (x[0] for x in inputs((300, 300)))
    cu = {"cu_seqlens_q": offsets(0, 300), "cu_seqlens_k": offsets(0, 300)}
    with pytest.raises(AttentionInputError, match=f"max_seqlen_{side}=128: must be at least 300"):
        undertow.flash_attn_varlen_func(q, k, v, **cu, **{f"max_seqlen_{side}": of(128)})
    dense = undertow.flash_attn_func(q[None], k[None], v[None])
    for given in ({}, {f"max_seqlen_{side}": of(300)}):
        assert torch.equal(undertow.flash_attn_varlen_func(q, k, v, **cu, **given), dense[0])


def test_a_maximum_is_of_the_rows_that_are_used():
    cu = {"cu_seqlens_q": offsets(0, 8), "cu_seqlens_k": offsets(0, 8), "seqused_q": offsets(5)}
    undertow.flash_attn_varlen_func(*PACKED, **cu, max_seqlen_q=5)
    with pytest.raises(AttentionInputError, match="max_seqlen_q=4: must be at least 5"):
        undertow.flash_attn_varlen_func(*PACKED, **cu, max_seqlen_q=4)
    with pytest.raises(AttentionInputError, match="max_seqlen_q='a': must be an integer"):
        undertow.flash_attn_varlen_func(*PACKED, **cu, max_seqlen_q="a")  # pyright: ignore[reportArgumentType]


BACKWARD = [
    ({"dout": DOUT[:, :4]}, r"dout has shape \(1, 4, 2, 64\): must be \(1, 8, 2, 64\)"),
    ({"dout": DOUT.float()}, "dout has dtype torch.float32: must be torch.bfloat16"),
    ({"out": DOUT.half()}, "out has dtype torch.float16: must be torch.bfloat16"),
    ({"lse": torch.zeros(1, 8, 2)}, r"lse has shape \(1, 8, 2\): must be \(1, 2, 8\)"),
    ({"lse": torch.zeros(1, 2, 8).double()}, "lse has dtype torch.float64: must be torch.float32"),
    ({"dlse": torch.zeros(1, 2, 8).half()}, "dlse has dtype torch.float16: must be torch.float32"),
]


@pytest.mark.parametrize(("change", "said"), BACKWARD, ids=[said[:30] for _, said in BACKWARD])
def test_what_a_forward_pass_stored_is_refused_by_name(change, said):
    out, lse = undertow.flash_attn_func(Q, K, V, return_lse=True)
    given = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": out, "lse": lse} | change
    with pytest.raises(AttentionInputError, match=said):
        undertow.attention_backward(**given)
    assert counts() == {}


def test_options_have_no_position():
    """The fourth argument is dropout, a scale or q times v, depending on the release of flash-attn."""
    with pytest.raises(TypeError, match="positional"):
        undertow.flash_attn_func(Q, K, V, 0.0)  # pyright: ignore[reportCallIssue]
