"""A whole backward pass as one compiled call: its variant, the workspace it needs, the numbers that it is given.

What `entry.py` compiles, seen from a host that has tensors; nothing here needs the compiler. As `sm100.call`.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.kernels.sm90.launch import SCHEDULES, dtype_of, lse_factor, planned
from undertow.kernels.sm90.plan import WARPGROUPS
from undertow.kernels.sm90.tensors import ROW_TERMS_TILE, check_scale
from undertow.kernels.sm100 import call as sm100
from undertow.kernels.sm100.launch import Settings, attention_of, row_variant_of, scalars_of
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS
from undertow.kernels.sm100.tensors import BackwardTensors, query_tiles
from undertow.plan.schema import DType, Plan

__all__ = ["SCHEDULES", "Variant", "arguments", "check_call", "numbers_of", "variant_named", "variant_of"]

check_call, arguments = sm100.check_call, sm100.arguments  # tensors are the same ones on every architecture


@dataclass(frozen=True)
class Variant(sm100.Variant):
    """What the kernels of a call are compiled for: everything in which two objects can differ, as plain values."""

    @property
    def plan(self) -> Plan:
        return planned(self.schedule, self.dtype, self.attention)


def variant_of(schedule: str | None, tensors: BackwardTensors, settings: Settings) -> Variant:
    """The variant that a call asks for.

    Raises: LaunchInputError naming an element type, schedule, option or scale without kernels.
    """
    dtype = dtype_of(tensors)
    check_scale(settings.scale, dtype)
    attention = attention_of(settings, tensors)
    plan = planned(schedule, dtype, attention)
    return Variant(plan.name, dtype, attention, row_variant_of(settings, tensors))


def variant_named(name: str, dtype: DType, schedule: str | None = None) -> Variant:
    """The variant of a name such as `dense`, `causal-packed` or `window-sink`, as `sm100.call.variant_named`.

    Raises: LaunchInputError naming the word that is none, or what these kernels do not have.
    """
    said = sm100.variant_named(name, dtype)
    plan = planned(schedule, dtype, said.attention)
    return Variant(plan.name, dtype, said.attention, said.rows)


def workspace_floats(variant: Variant, tensors: BackwardTensors) -> int:
    """Extent of the workspace in 4-byte elements, as `entry.cut` divides it."""
    batch, _, heads, _ = tensors.batched.q.shape
    per_tile = DQ_ACCUMULATOR_TILE + ROW_TERMS_TILE // 2
    per_tile += ROW_KERNEL_THREADS // 32 if variant.rows.sink else 0
    per_tile += WARPGROUPS if variant.rows.deterministic else 0
    return batch * heads * query_tiles(tensors) * per_tile


def numbers_of(variant: Variant, tensors: BackwardTensors, settings: Settings, multiprocessors: int) -> tuple:
    """The run-time numbers of a call, in the order of `entry.Numbers`.

    multiprocessors: of the device that holds the tensors; here every tile has a CTA, so they do not matter.
    """
    del multiprocessors
    return scalars_of(variant.attention, tensors, settings), lse_factor(settings)
