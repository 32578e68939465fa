"""Train a three-layer transformer with head dim 64 through undertow's backward pass, and through the reference's.

    python examples/train_small_gpt.py                       on a GPU its kernels, on a CPU the emulated ones
    python examples/train_small_gpt.py --backend reference   float64 gradients alone
    python examples/train_small_gpt.py --steps 100 --seqlen 1024 --batch 8

The model predicts the next character of this file. Attention is in bf16, everything else in float32; both runs begin
with the same weights and see the same characters, so that their losses differ by the rounding of attention's gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import undertow
from undertow.attention import counts, reset_counts

HEAD_DIM = 64
VOCABULARY = 128  # ASCII
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes and seeds of one run."""

    layers: int = 3
    heads: int = 2
    kv_heads: int = 1
    seqlen: int = 160
    batch: int = 1
    steps: int = 20
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM


class Block(nn.Module):
    """Causal attention with grouped heads, and a feed-forward layer, each behind a norm and beside the residual."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.config, self.attention = config, attention
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(2))
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * HEAD_DIM, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        kv_heads = self.config.kv_heads
        heads = self.qkv(self.norms[0](x)).to(torch.bfloat16).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((self.config.heads, kv_heads, kv_heads), dim=2)  # views: nothing is copied
        x = x + self.out(self.attention(q, k, v).flatten(2).to(x.dtype))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class SmallGPT(nn.Module):
    """Characters in, logits of the next ones out."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.seqlen, config.width)
        self.blocks = nn.Sequential(*(Block(config, attention) for _ in range(config.layers)))
        self.norm, self.logits = nn.LayerNorm(config.width), nn.Linear(config.width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return self.logits(self.norm(self.blocks(x)))


def train(config: Config, attention: Attention, device: str = "cpu") -> list[float]:
    """The loss of every step."""
    torch.manual_seed(config.seed)
    model = SmallGPT(config, attention)  # made on the CPU, so that every device begins with the same weights
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)
    text = torch.tensor(list(Path(__file__).read_bytes()), dtype=torch.long)
    generator = torch.Generator().manual_seed(config.seed)
    losses = []
    for _ in range(config.steps):
        starts = torch.randint(len(text) - config.seqlen - 1, (config.batch,), generator=generator).tolist()
        window = torch.stack([text[start : start + config.seqlen + 1] for start in starts]).to(device)
        loss = functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def attention_by(backend: str) -> Attention:
    """Causal attention whose gradients `backend` computes."""
    return lambda q, k, v: undertow.flash_attn_func(q, k, v, causal=True, backend=backend)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto" if device == "cuda" else "emulator", help="who computes gradients")
    for name in ("steps", "seqlen", "batch", "heads", "kv_heads", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Config, name))
    arguments = vars(parser.parse_args())
    backend = arguments.pop("backend")
    config = Config(**arguments)

    reset_counts()
    losses = train(config, attention_by(backend), device)
    print(f"backward passes: {counts()}")
    if backend == "reference":
        print("\n".join(f"step {step:3d}  loss {loss:.4f}" for step, loss in enumerate(losses)))
        return
    reference = train(config, attention_by("reference"), device)
    print(f"step   {backend:>10}   reference   difference")
    for step, (loss, want) in enumerate(zip(losses, reference)):
        print(f"{step:4d}   {loss:10.4f}  {want:10.4f}  {loss - want:+11.2e}")


if __name__ == "__main__":
    main()
