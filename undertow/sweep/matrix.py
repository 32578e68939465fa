"""The 124 configurations that the kernel is judged on, as data.

The FlashAttention-4 authors measured "a wider sweep of 124 configurations - sequence lengths 512 to 32k, MHA/GQA/MQA,
dense, causal, local and variable-length, both dtypes, deterministic and not", with 32 query heads and 64k tokens a
call. They speak of "the deterministic half", so there are 62 cells without and the same 62 with the deterministic mode.
They do not list the cells. Each axis has its extremes in the text (seven powers of two from 512 to 32k; 32:32, 32:8
and, for MQA, 32:1 heads; two dtypes), and the whole product, 7 x 3 x 4 x 2 = 168 to a half, is too many. So this is
our choice of 62, not theirs:

    42  every length x every head layout x dense and causal, in bf16, which is what they show unless noted
     6  every head layout x dense and causal, in fp16, at 8k, where they show fp16
     7  local, one for every length
     7  packed sequences of variable length, one for every length of the longest

In the last two lines layout, dtype and causality turn with the length, with periods of 3, 2 and 4: every layout comes
with every dtype, and every dtype with and without a causal mask.

A cell has three sizes. `full` is for a GPU: 64k tokens, 32 query heads. `scaled` is for the emulator: the same ratio of
heads, one to four tiles of 128 rows, with and without a partial last tile, no two lengths alike. `watched` is the same
for the emulator under observers, which take 50 times as long, with at most four query heads to a key/value head: a CTA
does them one after another, and the fifth like the fourth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TOKENS = 2**16  # of a call at full size
SEQLENS = tuple(512 << i for i in range(7))
FP16_SEQLEN = 8192
DTYPES = ("bf16", "fp16")


class Heads(NamedTuple):
    """Query heads and key/value heads."""

    q: int
    kv: int


class Layout(NamedTuple):
    """One way to share keys and values between query heads, at all sizes."""

    full: Heads
    scaled: Heads
    watched: Heads


LAYOUTS = {
    "mha": Layout(Heads(32, 32), Heads(2, 2), Heads(2, 2)),
    "gqa": Layout(Heads(32, 8), Heads(8, 2), Heads(8, 2)),
    "mqa": Layout(Heads(32, 1), Heads(32, 1), Heads(4, 1)),
}
SCALED = {  # seqlen: batch and length in emulation
    512: (2, 128),
    1024: (2, 150),
    2048: (1, 200),
    4096: (1, 256),
    8192: (1, 300),
    16384: (1, 384),
    32768: (1, 450),
}
KINDS = ("plain", "local", "varlen")
FULL_WINDOW, SCALED_WINDOW = 1024, 180  # keys beside a row's own; more than the two shortest sequences have
EIGHTHS = (8, 3, 0, 5)  # of the longest one: packed sequences, repeated; twice the longest in sum


@dataclass(frozen=True)
class Size:
    """One backward problem with as many keys as query rows.

    heads: of queries, and of keys and values. lengths: of the sequences; all alike unless they are packed.
    window: keys that a row sees to the left and to the right of its own; None is no bound.
    """

    heads: Heads
    lengths: tuple[int, ...]
    packed: bool = False
    window: tuple[int | None, int | None] = (None, None)

    @property
    def tokens(self) -> int:
        """Query rows of a head, of all sequences."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Cell:
    """One configuration.

    layout: of LAYOUTS. kind: of KINDS. causal: rows see no key behind their own. dtype: of DTYPES. seqlen: of SEQLENS,
    at full size; of packed sequences the longest one.
    """

    layout: str
    kind: str
    causal: bool
    seqlen: int
    dtype: str
    deterministic: bool

    @property
    def name(self) -> str:
        """What the cell is called everywhere: `gqa-causal-8k-fp16`, `mha-local-512-bf16-deterministic`."""
        mask = "causal" if self.causal else "dense"
        kind = mask if self.kind == "plain" else f"{self.kind}-causal" if self.causal else self.kind
        seqlen = str(self.seqlen) if self.seqlen < 1024 else f"{self.seqlen // 1024}k"
        return "-".join([self.layout, kind, seqlen, self.dtype, *["deterministic"] * self.deterministic])

    @property
    def full(self) -> Size:
        """For a GPU: TOKENS tokens."""
        return self._size(LAYOUTS[self.layout].full, TOKENS // self.seqlen, self.seqlen, FULL_WINDOW)

    @property
    def scaled(self) -> Size:
        """For the emulator."""
        return self._size(LAYOUTS[self.layout].scaled, *SCALED[self.seqlen], SCALED_WINDOW)

    @property
    def watched(self) -> Size:
        """For the emulator under observers."""
        return self._size(LAYOUTS[self.layout].watched, *SCALED[self.seqlen], SCALED_WINDOW)

    def _size(self, heads: Heads, batch: int, seqlen: int, window: int) -> Size:
        if self.kind == "varlen":
            return Size(heads, tuple(seqlen * eighths // 8 for eighths in EIGHTHS) * -(-batch // 2), packed=True)
        if self.kind == "local":
            sides = (window, 0) if self.causal else (window // 2, window // 2)
            return Size(heads, (seqlen,) * batch, window=sides)
        return Size(heads, (seqlen,) * batch)


def _half(deterministic: bool) -> Iterator[Cell]:
    for layout in LAYOUTS:
        for causal in (False, True):
            for seqlen in SEQLENS:
                yield Cell(layout, "plain", causal, seqlen, "bf16", deterministic)
            yield Cell(layout, "plain", causal, FP16_SEQLEN, "fp16", deterministic)
    for kind in ("local", "varlen"):
        for turn, seqlen in enumerate(SEQLENS):
            layout, dtype = list(LAYOUTS)[turn % 3], DTYPES[turn % 2]
            yield Cell(layout, kind, turn // 2 % 2 == 1, seqlen, dtype, deterministic)


CELLS = (*_half(deterministic=False), *_half(deterministic=True))
