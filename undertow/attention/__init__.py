"""Attention for PyTorch: a forward pass from a kept library, the backward pass from the kernels of this package.

`api` is what a user calls, `problem` one call as data, `dispatch` decides who computes it and counts, `backends` and
`libraries` compute, `operators` is the same for graphs. What is asked and cannot be done is refused by name.
"""

from undertow.attention.dispatch import Choice, choose, counts, reset_counts, run_backward
from undertow.attention.problem import AttentionInputError, BackendError, Gradients, Inputs, Problem, settings_from

__all__ = [
    "AttentionInputError",
    "BackendError",
    "Choice",
    "Gradients",
    "Inputs",
    "Problem",
    "choose",
    "counts",
    "reset_counts",
    "run_backward",
    "settings_from",
]
