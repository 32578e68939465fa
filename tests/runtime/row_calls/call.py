"""Calls of the two row kernels alone are those of the whole backward pass, seen from the host."""

from undertow.kernels.sm100.call import (
    arguments,
    check_call,
    numbers_of,
    variant_named,
    variant_of,
    workspace_floats,
)

__all__ = ["arguments", "check_call", "numbers_of", "variant_named", "variant_of", "workspace_floats"]
