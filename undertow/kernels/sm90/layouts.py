"""Workspace layouts of the SM90 kernel. Standard library only: kernels, host code and tests read the same numbers."""

from __future__ import annotations

from undertow.kernels.sm100.layouts import RowLayout
from undertow.kernels.sm90.plan import dq_accumulator_index, row_scalar_index

# The affine forms of the two functions of the plan; dQ columns are (% 2, // 2 % 4, // 8).
SM90_ROWS = RowLayout(
    name="sm90",
    dq_shape=((8, 2, 4, 2), (2, 4, 8)),
    dq_strides=(
        tuple(dq_accumulator_index(row, 0) for row in (1, 8, 16, 64)),
        tuple(dq_accumulator_index(0, column) for column in (1, 2, 8)),
    ),
    scalar_shape=(2, 4, 2, 8),
    scalar_strides=tuple(row_scalar_index(row) for row in (1, 2, 8, 16)),
    negates_d=True,
)
