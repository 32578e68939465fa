"""A whole backward pass on SM90 as one compiled call; see `sm100.call`, whose terms these are.

There is one schedule, and what the kernels do not have yet is refused by name: a softcap, and a softmax_scale of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.kernels.sm90.plan import ROW_TERMS, TILE_M, WARPGROUPS
from undertow.kernels.sm90.plan import plan as plan_of
from undertow.kernels.sm100 import call
from undertow.kernels.sm100.call import arguments
from undertow.kernels.sm100.launch import LaunchInputError, Settings
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS
from undertow.kernels.sm100.tensors import BackwardTensors, query_tiles
from undertow.plan.attention import Attention, RowVariant
from undertow.plan.schema import DType, Plan

# In size: the kernels divide LSE by it, and the terms hold 1e7 in f16. So |q.k| must stay below 6e6 there, too.
SMALLEST_SCALES = {DType.BF16: 1e-20, DType.F16: 4e-6}

__all__ = ["Variant", "arguments", "check_call", "numbers_of", "variant_named", "variant_of", "workspace_floats"]


@dataclass(frozen=True)
class Variant:
    """What the kernels of a call are compiled for: everything in which two objects can differ, as plain values."""

    dtype: DType
    attention: Attention
    rows: RowVariant

    @property
    def plan(self) -> Plan:
        return plan_of(self.dtype, self.attention)

    @property
    def name(self) -> str:
        """Short and unique: architecture, element type, attention, what flows in besides."""
        more = [flag for flag in ("dlse", "sink") if getattr(self.rows, flag)]
        return "-".join(["sm90", self.dtype.label, self.attention.name, *more])


def variant_of(schedule: str, tensors: BackwardTensors, settings: Settings) -> Variant:
    """The variant that a call asks for. schedule: of the SM100 kernel, for which there is no choice here.

    Raises: LaunchInputError for an element type without kernels, and for a softcap.
    """
    if settings.softcap is not None:
        raise LaunchInputError(f"softcap={settings.softcap}: the sm90 kernels have none; must be None")
    asked = call.variant_of(schedule, tensors, settings)
    return Variant(asked.dtype, asked.attention, asked.rows)


def variant_named(name: str, dtype: DType, schedule: str = "") -> Variant:
    """The variant of a name such as `dense`, `causal-packed` or `window-sink`: a mask, then what is present.

    Raises: LaunchInputError naming the word that is none here.
    """
    asked = call.variant_named(name, dtype, schedule)
    if asked.attention.softcap:
        raise LaunchInputError(f"variant {name!r}: the sm90 kernels have no softcap")
    return Variant(asked.dtype, asked.attention, asked.rows)


def check_call(variant: Variant, tensors: BackwardTensors) -> None:
    """Refuse what the kernels cannot take.

    Raises: LaunchInputError naming the tensor, its value and what is allowed.
    """
    call.check_call(variant, tensors)  # type: ignore[arg-type]  # it asks for the plan alone


def workspace_floats(variant: Variant, tensors: BackwardTensors) -> int:
    """Extent of the workspace in 4-byte elements, as `entry.cut` divides it."""
    batch, _, heads, _ = tensors.batched.q.shape
    per_tile = DQ_ACCUMULATOR_TILE + TILE_M * ROW_TERMS // 2
    per_tile += ROW_KERNEL_THREADS // 32 if variant.rows.sink else 0
    per_tile += WARPGROUPS if variant.rows.deterministic else 0
    return batch * heads * query_tiles(tensors) * per_tile


def numbers_of(variant: Variant, tensors: BackwardTensors, settings: Settings, multiprocessors: int) -> tuple:
    """The run-time numbers of a call, in the order of `work.Scalars`.

    Raises: LaunchInputError for a softmax_scale that LSE cannot be divided by.
    """
    smallest = SMALLEST_SCALES[variant.dtype]
    if abs(settings.scale) < smallest:
        raise LaunchInputError(
            f"softmax_scale={settings.scale}: the sm90 kernels divide by it; must be at least {smallest} in size"
        )
    return call.numbers_of(variant, tensors, settings, multiprocessors)  # type: ignore[arg-type]
