"""How much arithmetic a cell is, by the convention of the published benchmarks, and what a GPU could do at most.

A backward pass counts as 2.5 forward passes, a forward pass as 4 operations for every pair of row and key that is
kept, every query head and every element of head_dim. A causal mask over whole sequences counts as half of all pairs,
as published; of windows and of packed sequences exactly the kept pairs count.
"""

from __future__ import annotations

from undertow.sweep.matrix import Cell, Size

HEAD_DIM = 64
FORWARD_PER_PAIR = 4 * HEAD_DIM  # two products, a multiplication and an addition each
BACKWARD_PER_FORWARD = 2.5  # five products instead of two

# Dense bf16 and fp16, TFLOP/s, of the data sheets (without sparsity), of the SXM parts.
PEAKS = {"H200": 989.4, "H100": 989.4, "B200": 2250.0}
# Operations of the tensor cores per cycle and multiprocessor, by compute capability; measured by several, and the peaks
# above are these times the boost clock.
RATES = {(9, 0): 4096, (10, 0): 8192}


def kept_pairs(size: Size, causal: bool) -> int:
    """Pairs of row and key that are seen, in all sequences of one head."""
    left, right = size.window
    right = 0 if causal else right
    return sum(length + _within(length, left) + _within(length, right) for length in size.lengths)


def _within(length: int, bound: int | None) -> int:
    """Sum over rows of the keys on one side of the row's own that are at most `bound` away."""
    if bound is None or bound >= length:
        return length * (length - 1) // 2
    return bound * (bound + 1) // 2 + (length - 1 - bound) * bound if length else 0


def counted_pairs(size: Size, causal: bool) -> float:
    """Pairs that the published numbers count: half of all for a causal mask over whole sequences, else those kept."""
    if causal and not size.packed and size.window == (None, None):
        return sum(length * length for length in size.lengths) / 2
    return kept_pairs(size, causal)


def backward_flops(cell: Cell, size: Size) -> float:
    """Operations of one backward pass of `cell` at one of its sizes."""
    return BACKWARD_PER_FORWARD * FORWARD_PER_PAIR * counted_pairs(size, cell.causal) * size.heads.q


def peak_tflops(device_name: str) -> float | None:
    """The published dense 16-bit peak of a GPU by its name; None of one that is not listed."""
    words = device_name.split()
    if "PCIe" in words:  # boards of the same name with a lower clock
        return None
    return next((peak for name, peak in PEAKS.items() if name in words), None)


def tensor_flops_per_cycle(capability: tuple[int, int], multiprocessors: int) -> int | None:
    """What all tensor cores do in a cycle; None of an architecture that is not listed."""
    rate = RATES.get(capability)
    return None if rate is None else rate * multiprocessors
