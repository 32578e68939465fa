"""Hugging Face models on our attention: what eager attention makes of the same masks, and whole models against it."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from undertow.attention import counts, dispatch
from undertow.attention.problem import AttentionInputError
from undertow.integrations.transformers import NAME, register
from undertow.tolerance import FLOAT32_ROUNDOFF, IDEAL_FACTOR, relative_error

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import (  # noqa: E402
    AttentionInterface,
    AttentionMaskInterface,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    masking_utils,
)
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward  # noqa: E402

BF16, F64 = torch.bfloat16, torch.float64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The name is forgotten afterwards."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    register()


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def mask(implementation: str, make: str, inputs: Tensor, given: dict[str, Any]) -> Any:
    """What a model of this attention implementation passes to its layers."""
    config: Any = LlamaConfig()
    config.sliding_window, config.attention_chunk_size, config._attn_implementation = 5, 4, implementation
    knows = {"attention_mask": None, "cache": None, **given}
    return getattr(masking_utils, f"create_{make}_mask")(config=config, inputs_embeds=inputs, **knows)


def padding(batch: int, seqlen: int, side: str) -> Tensor:
    """One element without padding, the others with more and more."""
    length = seqlen - 3 * torch.arange(batch)[:, None]
    places = torch.arange(seqlen)[None]
    return (places < length if side == "right" else places >= seqlen - length).long()


MASKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # mask, what the model knows of its rows, what it passes to the attention function
    "causal": ("causal", {}, {}),
    "sliding": ("sliding_window_causal", {}, {"sliding_window": 5}),
    "bidirectional": ("bidirectional", {}, {"is_causal": False}),
    "bidirectional-sliding": ("bidirectional_sliding_window", {}, {"is_causal": False, "sliding_window": 5 + 1}),
    "scale": ("causal", {}, {"scaling": 0.3}),
    "padded-right": ("causal", {"attention_mask": padding(3, 12, "right")}, {}),
    "padded-left": ("causal", {"attention_mask": padding(3, 12, "left")}, {}),
    "padded-sliding": ("sliding_window_causal", {"attention_mask": padding(3, 12, "left")}, {"sliding_window": 5}),
    "padded-bidirectional": (
        "bidirectional",
        {"attention_mask": padding(3, 12, "right")},
        {"is_causal": False},
    ),
    "packed": ("causal", {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]])}, {}),
    "packed-sliding": (
        "sliding_window_causal",
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]])},
        {"sliding_window": 5},
    ),
    "packed-differently": (
        "causal",
        {"position_ids": torch.tensor([[*range(12)], [*range(5), *range(7)], [*range(11), 0]])},
        {},
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_it_is_what_eager_attention_makes_of_the_same_mask(name):
    make, given, passed = MASKS[name]
    seqlen, batch = 12, 3
    inputs = random(0, batch, seqlen, 8)
    real = given.get("attention_mask", torch.ones(batch, seqlen))[:, None, :, None].bool()
    tensors = [
        random(1, batch, HEADS, seqlen, HEAD_DIM),
        *(random(seed, batch, KV_HEADS, seqlen, HEAD_DIM) for seed in (2, 3)),
        random(4, HEADS),
    ]
    dout = (random(5, batch, HEADS, seqlen, HEAD_DIM) * real).transpose(1, 2)  # nothing reads rows of padding

    def gradients(implementation: str) -> list[Tensor]:
        q, k, v, sinks = (x.clone().requires_grad_() for x in tensors)
        module: Any = SimpleNamespace(
            is_causal=True, sinks=sinks, num_key_value_groups=HEADS // KV_HEADS, training=True, config=None
        )
        function = eager_attention_forward if implementation == "eager" else AttentionInterface()[NAME]
        rows = {"s_aux": sinks, "position_ids": given.get("position_ids"), "scaling": HEAD_DIM**-0.5, **passed}
        out, _ = function(module, q, k, v, mask(implementation, make, inputs, given), **rows)
        out.backward(dout)
        return [out.detach() * real.transpose(1, 2), *(x.grad for x in (q, k, v, sinks) if x.grad is not None)]

    ours, theirs = gradients(NAME), gradients("eager")
    assert len(ours) == 5 and counts() == {"reference": 1}
    for mine, want in zip(ours, theirs):
        assert relative_error(mine, want) <= FLOAT32_ROUNDOFF, "both are float64"


@pytest.mark.parametrize("queries", [1, 3])
def test_rows_behind_a_cache_see_all_of_it(queries):
    """Queries are the last of the keys: what is generated with a cache."""
    keys = 9
    q, k, v = random(1, 2, HEADS, queries, 64), random(2, 2, KV_HEADS, keys, 64), random(3, 2, KV_HEADS, keys, 64)
    seen = torch.ones(2, keys, dtype=torch.bool)
    seen[1, :4] = False
    module: Any = SimpleNamespace(is_causal=True, sinks=torch.full((HEADS,), -torch.inf), num_key_value_groups=2)
    module.training = False
    late = torch.arange(keys)[None] > torch.arange(keys - queries, keys)[:, None]
    dense = torch.zeros(2, 1, queries, keys, dtype=F64)
    dense.masked_fill_(late | ~seen[:, None, None], -torch.inf)
    want, _ = eager_attention_forward(module, q, k, v, dense, scaling=64**-0.5)
    positions = torch.arange(keys - queries, keys)[None]
    out, _ = AttentionInterface()[NAME](module, q, k, v, seen, scaling=64**-0.5, position_ids=positions)
    assert relative_error(out, want) <= FLOAT32_ROUNDOFF
    longer = [torch.cat([x, torch.full_like(x, torch.nan)], dim=2) for x in (k, v)]  # a cache of fixed size
    out, _ = AttentionInterface()[NAME](module, q, *longer, seen, scaling=64**-0.5, position_ids=positions)
    assert relative_error(out, want) <= FLOAT32_ROUNDOFF


@pytest.mark.parametrize("queries", [5, 12])
def test_cross_attention_keeps_every_query(queries):
    """Padding of the keys is not that of the queries, not even if there are as many."""
    q, k, v = random(1, 3, HEADS, queries, 64), random(2, 3, KV_HEADS, 12, 64), random(3, 3, KV_HEADS, 12, 64)
    seen = padding(3, 12, "right").bool()
    module: Any = SimpleNamespace(is_causal=False, sinks=torch.full((HEADS,), -torch.inf), num_key_value_groups=2)
    module.training = False
    dense = torch.zeros(3, 1, queries, 12, dtype=F64).masked_fill_(~seen[:, None, None], -torch.inf)
    want, _ = eager_attention_forward(module, q, k, v, dense, scaling=64**-0.5)
    out, _ = AttentionInterface()[NAME](module, q, k, v, seen, scaling=64**-0.5)
    assert relative_error(out, want) <= FLOAT32_ROUNDOFF


def test_offsets_that_a_collator_has_made_are_used():
    q, k, v = (random(seed, 1, heads, 10, 64) for seed, heads in ((1, HEADS), (2, KV_HEADS), (3, KV_HEADS)))
    module: Any = SimpleNamespace(is_causal=True)
    offsets = torch.tensor([0, 4, 10])
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 6, "max_length_k": 6}
    by_offsets, _ = AttentionInterface()[NAME](module, q, k, v, None, **given)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    by_positions, _ = AttentionInterface()[NAME](module, q, k, v, None, position_ids=positions)
    assert torch.equal(by_offsets, by_positions)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dropout": 0.1}, "dropout=0.1: must be 0"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"position_bias": torch.zeros(1)}, "position_bias is given"),
        ({"block_table": torch.zeros(1)}, "block_table is given"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, r"attention_mask is torch.float32 of shape \(1, 1, 4, 4\)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_would_be_ignored_is_refused(options, complaint):
    q, k, v = (random(seed, 1, 2, 4, 64) for seed in (1, 2, 3))
    attention_mask = options.pop("attention_mask", None)
    with pytest.raises(AttentionInputError, match=complaint):
        AttentionInterface()[NAME](SimpleNamespace(is_causal=True), q, k, v, attention_mask, **options)


def test_masks_that_would_be_lost_are_refused():
    inputs = random(0, 1, 12, 8)
    with pytest.raises(AttentionInputError, match="made by chunked_overlay"):
        mask(NAME, "chunked_causal", inputs, {"attention_mask": None})
    blocks = torch.zeros(1, 12, dtype=torch.long)
    with pytest.raises(AttentionInputError, match="blockwise_overlay, or_masks"):
        mask(NAME, "causal", inputs, {"attention_mask": None, "block_sequence_ids": blocks})
    overlay = {"attention_mask": None, "and_mask_function": lambda b, h, q, k: k % 2 == 0}
    with pytest.raises(AttentionInputError, match="test_masks_that_would_be_lost_are_refused"):
        mask(NAME, "causal", inputs, overlay)


TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 64,
    "vocab_size": 97,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**TINY))


def gpt_oss():
    """Sinks, and a sliding window in every second layer."""
    layers = ["sliding_attention", "full_attention"]
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssForCausalLM(GptOssConfig(**TINY, **experts, sliding_window=6, layer_types=layers))


@pytest.mark.parametrize(("make", "backend"), [(llama, "auto"), (gpt_oss, "auto"), (gpt_oss, "emulator")])
def test_a_model_learns_as_with_eager_attention(make, backend):
    """In bf16, logits and gradients are as far from those of fp32 weights as with eager attention, and a quarter."""
    register(backend=backend, strict=True)
    torch.manual_seed(0)
    exact = make().float().train()
    tokens = torch.randint(1, 97, (3, 20), generator=torch.Generator().manual_seed(1))
    seen = padding(3, 20, "right")

    def learn(dtype: torch.dtype, implementation: str) -> tuple[Tensor, Tensor]:
        model = make()
        model.load_state_dict(exact.state_dict())
        model = model.to(dtype).train()
        model.set_attn_implementation(implementation)
        results = model(tokens, attention_mask=seen, labels=tokens.masked_fill(seen == 0, -100))
        results.loss.backward()
        grads = [x.grad.flatten().double() for x in model.parameters() if x.grad is not None]
        return results.logits.detach() * seen[..., None], torch.cat(grads)

    for ours, eager, truth in zip(learn(BF16, NAME), learn(BF16, "eager"), learn(torch.float32, "eager")):
        assert relative_error(ours, truth) <= IDEAL_FACTOR * relative_error(eager, truth)
    assert counts() == {"reference" if backend == "auto" else "emulator": 2}, "one for each layer"


def test_weights_in_fp32_under_autocast_are_attention_in_16_bits():
    model: Any = llama()
    model.set_attn_implementation(NAME)
    tokens = torch.ones(2, 8, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16), strictly_16_bits():
        model(tokens, labels=tokens).loss.backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in model.parameters())


def strictly_16_bits():
    """Anything else in a backward pass of ours fails."""
    backend = dispatch.BACKENDS["reference"]

    def run(problem, *rest):
        assert {x.dtype for x in (problem.q, problem.k, problem.v, problem.dout)} == {BF16}
        return backend.run(problem, *rest)

    return mock.patch.dict(dispatch.BACKENDS, reference=backend._replace(run=run))


def test_the_mask_is_looked_at_once_for_all_layers(monkeypatch):
    """Looking at it waits for the GPU."""
    from undertow.integrations import transformers as ours

    seen = []
    monkeypatch.setattr(ours, "_offsets", lambda lengths, made=ours._offsets: seen.append(1) or made(lengths))
    model = llama()
    model.set_attn_implementation(NAME)
    tokens = torch.ones(2, 8, dtype=torch.long)
    for _ in range(2):
        model(tokens, attention_mask=padding(2, 8, "right"))
    assert len(seen) == 2 * 2, "query and key offsets, for each of two forward passes"


def test_a_mask_that_has_changed_is_looked_at_again():
    q, k, v = (random(seed, 1, heads, 6, 64) for seed, heads in ((1, HEADS), (2, KV_HEADS), (3, KV_HEADS)))
    module, seen = SimpleNamespace(is_causal=True), torch.ones(1, 6, dtype=torch.bool)
    seen[0, 5] = False
    attention = AttentionInterface()[NAME]
    five, last_two = attention(module, q, k, v, seen)[0], attention(module, q[:, :, -2:], k, v, seen)[0]
    seen[0, 4] = False  # in place
    four = attention(module, q, k, v, seen)[0]
    assert five[0, 4].any() and not four[0, 4].any() and torch.equal(four[0, :4], five[0, :4])
    assert last_two.shape[1] == 2 and not last_two[0, 1].any()


def test_the_example_learns_to_count():
    path = Path(__file__).resolve().parents[2] / "examples" / "huggingface.py"
    eager, ours = runpy.run_path(str(path))["main"](["--steps", "3", "--device", "cpu"])
    assert ours[2] < ours[1] < ours[0]
    assert abs(ours[0] - eager[0]) <= torch.finfo(BF16).eps * eager[0], "before the weights part company"
    assert counts() == {"reference": 3 * 2}


def test_a_model_compiles_to_one_graph():
    """What a graph cannot follow stops it: nothing is taken for what it is not."""
    model: Any = llama()
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    compiled(tokens, labels=tokens).loss.backward()
    ours = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    assert all(torch.equal(mine, x.grad) for mine, x in zip(ours, model.parameters()))
    with pytest.raises(RuntimeError, match="position_ids start again"):
        compiled(tokens, labels=tokens, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))


def test_a_compiled_model_with_padding_breaks_its_graph_and_is_right():
    model: Any = gpt_oss()
    model.set_attn_implementation(NAME)
    tokens, seen = torch.ones(2, 9, dtype=torch.long), padding(2, 9, "right")
    want = model(tokens, attention_mask=seen).logits * seen[..., None]
    got = torch.compile(model, backend="aot_eager")(tokens, attention_mask=seen).logits * seen[..., None]
    assert torch.equal(got, want)
