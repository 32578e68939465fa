"""Attention for PyTorch: a forward pass from a kept library, the backward pass from the kernels of this package.

`signatures` is what a user calls, `problem` one call as data, `dispatch` decides who computes it and counts, `backends`
and `libraries` compute, `operators` is the same for graphs; `prepared` is the short way of a call whose like went
before. What is asked and cannot be done is refused by name.
"""

from undertow.attention.dispatch import Choice, choose, counts, reset_counts, run_backward
from undertow.attention.explanation import Explanation
from undertow.attention.forward import Forward, choose_forward, forward_counts, reset_forward_counts, run_forward
from undertow.attention.problem import AttentionInputError, BackendError, Gradients, Inputs, Problem, settings_from
from undertow.attention.signatures import attention_backward, explain, flash_attn_func, flash_attn_varlen_func

__all__ = [
    "AttentionInputError",
    "BackendError",
    "Choice",
    "Explanation",
    "Forward",
    "Gradients",
    "Inputs",
    "Problem",
    "attention_backward",
    "choose",
    "choose_forward",
    "counts",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "forward_counts",
    "reset_counts",
    "reset_forward_counts",
    "run_backward",
    "run_forward",
    "settings_from",
]
