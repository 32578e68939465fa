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
    """

    left: bool = False
    right: bool = False

    @property
    def masked(self) -> bool:
        """Whether some pair of row and key of a sequence is not seen."""
        return self.left or self.right

    @property
    def name(self) -> str:
        """One word for the mask: dense, causal, window, or left where only the left is bounded."""
        return ("window" if self.right else "left") if self.left else ("causal" if self.right else "dense")

    @property
    def descending(self) -> bool:
        """Whether CTAs take the last key/value tile of a head first.

        Longest first: where only the left is bounded the last keys are seen by most rows. Under a causal mask the
        first are, and elsewhere all alike.
        """
        return self.left and not self.right


DENSE = Attention()
