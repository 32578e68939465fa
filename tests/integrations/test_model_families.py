"""Small models of many families in bf16: as near to the same weights in fp32 as with eager attention, and a quarter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from undertow.attention import counts
from undertow.integrations.transformers import NAME, register
from undertow.tolerance import IDEAL_FACTOR, relative_error

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

VOCABULARY, ROWS = 97, 20
TOKENS = torch.randint(3, VOCABULARY, (2, ROWS), generator=torch.Generator().manual_seed(1))
SEEN = (torch.arange(ROWS) < torch.tensor([[ROWS], [13]])).long()
TOKENS = TOKENS.masked_fill(SEEN == 0, 0)
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
SOUND = torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(3))

Family = tuple[str, dict[str, Any], Callable[[Any, torch.dtype], Tensor]]


def of_text(model: Any, dtype: torch.dtype) -> Tensor:
    hidden = model(input_ids=TOKENS, attention_mask=SEEN).last_hidden_state
    return hidden * SEEN[..., None]


def of_pixels(model: Any, dtype: torch.dtype) -> Tensor:
    return model(pixel_values=PIXELS.to(dtype)).last_hidden_state


def of_sound(model: Any, dtype: torch.dtype) -> Tensor:
    return model(input_features=SOUND.to(dtype), decoder_input_ids=TOKENS).last_hidden_state


def translated(model: Any, dtype: torch.dtype) -> Tensor:
    """Cross attention to padded rows, from fewer of them."""
    return model(input_ids=TOKENS, attention_mask=SEEN, decoder_input_ids=TOKENS[:, :12]).last_hidden_state


SIZE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**SIZE, **SPECIAL, "vocab_size": VOCABULARY}
BOTH = {
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 2))},
    **SPECIAL,
    "decoder_start_token_id": 1,
    "d_model": 128,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": VOCABULARY,
}
FAMILIES: dict[str, Family] = {
    "Bert": ("BertModel", TEXT, of_text),
    "ModernBert": (
        "ModernBertModel",
        {**TEXT, "num_hidden_layers": 4, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
        of_text,
    ),
    "Esm": ("EsmModel", {**TEXT, "position_embedding_type": "rotary", "mask_token_id": 1}, of_text),
    "GPT2": ("GPT2Model", {"n_embd": 128, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, **SPECIAL}, of_text),
    "Qwen2": ("Qwen2Model", {**TEXT, "num_key_value_heads": 1}, of_text),
    "Mistral": ("MistralModel", {**TEXT, "num_key_value_heads": 1, "sliding_window": 6}, of_text),
    "Gemma2": (
        "Gemma2Model",
        {**TEXT, "num_key_value_heads": 1, "sliding_window": 6, "head_dim": 64, "attn_logit_softcapping": 2.0},
        of_text,
    ),
    "ViT": ("ViTModel", {**SIZE, "image_size": 32, "patch_size": 8}, of_pixels),
    "Whisper": ("WhisperModel", {**BOTH, "num_mel_bins": 16, "max_source_positions": 30}, of_sound),
    "Bart": ("BartModel", BOTH, translated),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The name is forgotten afterwards."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    register()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_it_is_with_eager_attention(family):
    name, settings, run = FAMILIES[family]
    torch.manual_seed(0)
    weights = made(name, settings).state_dict()

    def differentiate(implementation: str, dtype: torch.dtype) -> list[Tensor]:
        model = made(name, settings)
        model.load_state_dict(weights)
        model = model.to(dtype).eval()  # without dropout
        model.set_attn_implementation(implementation)
        out = run(model, dtype)
        out.double().square().sum().backward()
        grads = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
        return [out.detach(), grads]

    eager, truth = differentiate("eager", torch.bfloat16), differentiate("eager", torch.float32)
    assert not counts()
    ours = differentiate(NAME, torch.bfloat16)
    assert counts()["reference"] >= 2, "one for each layer"
    for mine, theirs, want in zip(ours, eager, truth):
        assert relative_error(mine, want) <= IDEAL_FACTOR * relative_error(theirs, want)


def made(name: str, settings: dict[str, Any]) -> Any:
    model = getattr(transformers, name)
    return model(model.config_class(**settings))
