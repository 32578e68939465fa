"""What kind of attention a kernel is compiled for.

Flags say what is present; sizes, lengths and ratios are run-time numbers. What is absent costs no instruction and no
parameter. Grouped query heads need no flag: a CTA loops over the query heads of its group, and a group of one is plain
multi-head attention.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """The variant of attention: which bounds the keys of a row have.

    left, right: rows see keys only from c - left, only up to c + right (`tiles.band`); causal is right = 0.
    packed: sequences of any lengths follow one another in one tensor.
    """

    left: bool = False
    right: bool = False
    packed: bool = False

    @property
    def masked(self) -> bool:
        """Whether some pair of row and key of a sequence is not seen."""
        return self.left or self.right

    @property
    def name(self) -> str:
        """The mask (dense, causal, window, or left where only the left is bounded), and what else is present."""
        mask = ("window" if self.right else "left") if self.left else ("causal" if self.right else "dense")
        return "-".join([mask, *(flag for flag in ("packed",) if getattr(self, flag))])

    @property
    def descending(self) -> bool:
        """Whether CTAs take the last key/value tile of a head first.

        Longest first: where only the left is bounded the last keys are seen by most rows. Under a causal mask the
        first are, and elsewhere all alike.
        """
        return self.left and not self.right


DENSE = Attention()


@dataclass(frozen=True)
class RowVariant:
    """What the kernels over query rows, before and after the main one, handle besides O, dO and LSE.

    packed: sequences are packed. dlse: a gradient flows into LSE. sink: each head has a learnable score without a key.
    deterministic: dQ is added up in a fixed order, for which turns are counted.
    """

    packed: bool = False
    dlse: bool = False
    sink: bool = False
    deterministic: bool = False


PLAIN = RowVariant()
