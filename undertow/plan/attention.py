"""What kind of attention a kernel is compiled for.

Flags say what is present; sizes, lengths and ratios are run-time numbers. What is absent costs no instruction.
Grouped query heads need no flag: a CTA loops over the query heads of its group, and a group of one is plain multi-head
attention. Only who divides the group between CTAs needs one, because sums are then left for another kernel to add up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """The variant of attention: which bounds the keys of a row have.

    left, right: rows see keys only from c - left, only up to c + right (`tiles.band`); causal is right = 0.
    packed: sequences of any lengths follow one another in one tensor. softcap: tanh keeps scores below a cap.
    deterministic: CTAs add to dQ in a fixed order, so that its bits do not depend on which comes first.
    split: the query heads of a group are divided between CTAs; their dK and dV are added up afterwards (sm90 alone).
    """

    left: bool = False
    right: bool = False
    packed: bool = False
    softcap: bool = False
    deterministic: bool = False
    split: bool = False

    @property
    def masked(self) -> bool:
        """Whether some pair of row and key of a sequence is not seen."""
        return self.left or self.right

    @property
    def name(self) -> str:
        """The mask (dense, causal, window, or left where only the left is bounded), and what else is present."""
        mask = ("window" if self.right else "left") if self.left else ("causal" if self.right else "dense")
        present = (flag for flag in ("packed", "softcap", "deterministic", "split") if getattr(self, flag))
        return "-".join([mask, *present])

    @property
    def descending(self) -> bool:
        """Whether CTAs take the last key/value tile of a head first.

        If nothing else matters, the longest first: where only the left is bounded the last keys are seen by most rows,
        under a causal mask the first, and elsewhere all alike.

        Deterministic: CTAs add to the dQ of a query tile in the order in which they take their tiles, so that each
        waits only for CTAs that have started before it. With a bound on the right, a CTA begins with the query tile
        to which it is the last to contribute, and every later one adds to its s-th tile as the s-th of all: in
        descending order nobody waits for long. Without one all CTAs begin with the same query tile and queue up once.
        """
        return self.right if self.deterministic else self.left and not self.right


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
