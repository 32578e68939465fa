"""The problems that `hopper_measure.py` measures and checks; copied to the GPU beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

HEAD_DIM = 64


@dataclass(frozen=True)
class Shape:
    """One problem; window as in `undertow.plan.tiles.band`, lengths of packed sequences instead of a batch.

    extras: each head has a sink, and a gradient flows into LSE.
    """

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = ()
    extras: bool = False

    @property
    def band(self) -> tuple[int | None, int | None]:
        left, right = self.window
        return left, 0 if self.causal else right

    @property
    def flops(self) -> float:
        """Of a backward pass: 2.5 times the two GEMMs of the forward pass, half of it under a causal mask."""
        return 2.5 * 4 * self.batch * self.heads * self.seqlen**2 * HEAD_DIM * (0.5 if self.causal else 1)


LENGTHS = {"": 8192, "512": 512, "1k": 1024, "2k": 2048, "4k": 4096, "32k": 32768}
TOKENS = 2**16
MASKS = {  # key/value heads, of 32, and whether there is a causal mask
    "dense": (32, False),
    "causal": (32, True),
    "gqa": (8, False),
    "gqacausal": (8, True),
    "mqa": (1, False),
    "mqacausal": (1, True),
}
BENCH = {
    name + suffix: Shape(TOKENS // seqlen, seqlen, 32, kv_heads, causal)
    for suffix, seqlen in LENGTHS.items()
    for name, (kv_heads, causal) in MASKS.items()
}
CHECKS = {  # name of the library, and what it is tried on
    "dense": [Shape(1, 128, 1, 1), Shape(1, 300, 2, 1), Shape(2, 1024, 8, 2), BENCH["dense"], BENCH["gqa"]],
    "causal": [Shape(1, 128, 1, 1, True), Shape(1, 333, 2, 1, True), BENCH["causal"], BENCH["gqacausal"]],
    "window": [Shape(1, 1000, 4, 2, window=(200, 100)), Shape(1, 2048, 2, 2, window=(256, 0))],
    "left": [Shape(1, 1000, 4, 2, window=(300, None))],
    "causal_packed": [Shape(1, 1290, 4, 2, True, lengths=(128, 1, 700, 61, 400))],
    "dense_f16": [Shape(1, 300, 2, 1, dtype=torch.float16), Shape(2, 1024, 8, 2, dtype=torch.float16)],
    "causal_f16": [Shape(1, 333, 2, 1, True, dtype=torch.float16)],
    "dense_sink_dlse": [Shape(2, 1000, 8, 2, extras=True)],
    "dense_split": [Shape(2, 1000, 12, 2), BENCH["mqa"]],
    "causal_split": [Shape(2, 1000, 8, 1, True), BENCH["mqacausal"]],
    "dense_split_f16": [replace(BENCH["mqa"], dtype=torch.float16)],
    "causal_packed_split_deterministic": [Shape(1, 2890, 16, 2, True, lengths=(128, 1, 700, 61, 2000))],
    "dense_deterministic": [Shape(4, 2048, 16, 16), Shape(2, 1000, 8, 2), BENCH["dense"], BENCH["gqa"]],
    "causal_deterministic": [Shape(4, 2048, 16, 16, True), Shape(2, 1000, 8, 2, True), BENCH["causal"]],
    "window_deterministic": [Shape(2, 2048, 8, 2, window=(500, 100)), Shape(2, 2048, 8, 8, window=(256, 0))],
    "causal_packed_deterministic": [Shape(1, 2890, 8, 2, True, lengths=(128, 1, 700, 61, 2000))],
    "dense_packed_deterministic": [Shape(1, 2890, 8, 2, lengths=(128, 1, 700, 61, 2000))],
}
