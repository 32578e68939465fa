"""A Hugging Face model on our attention: the same losses as eager attention, step for step.

    python examples/huggingface.py                          CPU: float64 reference
    python examples/huggingface.py --backend emulator       CPU: the sm100 kernels, executed by the emulator (minutes)
    python examples/huggingface.py --steps 100              on a GPU, if there is one: our kernels, or what falls back

The model is a small gpt-oss with random weights: head dim 64, grouped key/value heads, attention sinks, a sliding
window in every second layer. It learns to count. Needs transformers.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from undertow.attention import counts, reset_counts
from undertow.integrations.transformers import register

VOCABULARY = 64


def model(device: str) -> GptOssForCausalLM:
    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        hidden_size=128,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        attention_dropout=0.0,
    )
    learner: Any = GptOssForCausalLM(config)
    return learner.to(device, torch.bfloat16).train()


def batch(step: int, device: str) -> tuple[Tensor, Tensor]:
    """Sequences that count on from a random number, and which of their tokens are no padding."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    tokens = (start + torch.arange(48)) % (VOCABULARY - 1) + 1
    length = torch.randint(24, 49, (4, 1), generator=generator)
    return tokens.to(device), (torch.arange(48) < length).long().to(device)


def train(implementation: str, steps: int, device: str) -> list[float]:
    """The loss of every step."""
    learner = model(device)
    learner.set_attn_implementation(implementation)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens, seen = batch(step, device)
        loss = learner(tokens, attention_mask=seen, labels=tokens.masked_fill(seen == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> tuple[list[float], list[float]]:
    """Losses with eager attention and with ours."""
    parser = argparse.ArgumentParser(description="a small Hugging Face model with eager attention, and with ours")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", default="auto", help="auto, emulator, reference, sm100, sm90")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    reset_counts()
    eager = train("eager", options.steps, options.device)
    ours = train(register(options.backend), options.steps, options.device)
    print("step     eager  undertow")
    for step, losses in enumerate(zip(eager, ours)):
        print("{:4d}  {:8.4f}  {:8.4f}".format(step, *losses))
    print(f"backward passes by {counts()}")
    return eager, ours


if __name__ == "__main__":
    main()
