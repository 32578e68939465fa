"""A whole backward pass on SM90 as one compiled call; see `sm100.call`, whose terms these are.

There is one schedule. What the kernels do not have is refused by name: a softmax_scale near zero, but under a softcap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from undertow.kernels.sm90.launch import asked_attention, numbers, parts_for, planned, settings_used
from undertow.kernels.sm90.plan import TILE_M, WARPGROUPS
from undertow.kernels.sm90.tensors import CLAIMS, PARTIAL_TILE, ROW_TERMS_TILE, check_scale
from undertow.kernels.sm100 import call
from undertow.kernels.sm100.call import arguments
from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS
from undertow.kernels.sm100.tensors import BackwardTensors, kv_tiles, query_tiles
from undertow.plan.attention import Attention, RowVariant
from undertow.plan.schema import DType, Plan

__all__ = [
    "Variant", "arguments", "check_call", "numbers_of", "used_for", "variant_named", "variant_of", "workspace_floats",
]  # fmt: skip

SPLIT = "split"  # the word for it in the name of a variant


@dataclass(frozen=True)
class Variant:
    """What the kernels of a call are compiled for: everything in which two objects can differ, as plain values."""

    dtype: DType
    attention: Attention
    rows: RowVariant
    events: bool = False  # its kernels have named spans: see kernels.events

    @property
    def plan(self) -> Plan:
        return replace(planned(None, self.dtype, self.attention), events=self.events)

    @property
    def name(self) -> str:
        """Short and unique: architecture, element type, attention, what flows in besides."""
        more = [flag for flag in ("dlse", "sink") if getattr(self.rows, flag)] + ["events"] * self.events
        return "-".join(["sm90", self.dtype.label, self.attention.name, *more])


def variant_of(schedule: str | None, tensors: BackwardTensors, settings: Settings) -> Variant:
    """The variant that computes a call. schedule: the only one, or None.

    Raises: LaunchInputError naming an element type, schedule, option or scale without kernels.
    """
    settings = settings_used(settings, tensors)
    asked = call.variant_of(None, tensors, settings)
    attention = asked_attention(settings, tensors)
    planned(schedule, asked.dtype, attention)
    check_scale(settings, asked.dtype)
    return Variant(asked.dtype, attention, asked.rows)


def variant_named(name: str, dtype: DType, schedule: str | None = None) -> Variant:
    """The variant of a name such as `dense`, `causal-packed` or `window-split-sink`: a mask, then what is present.

    Raises: LaunchInputError naming the word that is none here.
    """
    words = name.split("-")
    asked = call.variant_named("-".join(word for word in words if word != SPLIT), dtype)
    attention = replace(asked.attention, split=SPLIT in words)
    planned(schedule, dtype, attention)
    return Variant(asked.dtype, attention, asked.rows)


def used_for(variant: Variant) -> tuple[Variant, ...]:
    """What computes calls that ask for a variant, by their sizes: itself, with turns, with split groups, with both."""
    in_turn = replace(variant.attention, deterministic=True), replace(variant.rows, deterministic=True)
    kinds = [(variant.attention, variant.rows), *([] if variant.attention.softcap else [in_turn])]
    every = [(replace(attention, split=split), rows) for split in (False, True) for attention, rows in kinds]
    others = [replace(variant, attention=attention, rows=rows) for attention, rows in every]
    return tuple(dict.fromkeys((variant, *others)))


def check_call(variant: Variant, tensors: BackwardTensors) -> None:
    """Refuse what the kernels cannot take.

    Raises: LaunchInputError naming the tensor, its value and what is allowed.
    """
    call.check_call(variant, tensors)  # type: ignore[arg-type]  # it asks for the plan alone


def workspace_floats(variant: Variant, tensors: BackwardTensors) -> int:
    """Extent of the workspace in 4-byte elements, as `entry.cut` divides it."""
    batch, _, heads, _ = tensors.batched.q.shape
    per_tile = DQ_ACCUMULATOR_TILE + ROW_TERMS_TILE // 2
    per_tile += TILE_M if variant.attention.softcap else 0
    per_tile += ROW_KERNEL_THREADS // 32 if variant.rows.sink else 0
    per_tile += WARPGROUPS if variant.rows.deterministic else 0
    floats = batch * heads * query_tiles(tensors) * per_tile + CLAIMS
    if variant.attention.split:
        virtual_heads = tensors.k.shape[-2] * parts_for(variant.attention, tensors)
        floats += batch * virtual_heads * kv_tiles(tensors) * PARTIAL_TILE
    return floats


def numbers_of(variant: Variant, tensors: BackwardTensors, settings: Settings, multiprocessors: int) -> tuple:
    """The run-time numbers of a call, as `work.LaunchScalars` orders them; what the kernels divide by, `entry` derives.

    Raises: LaunchInputError for a softmax_scale that LSE cannot be divided by.
    """
    check_scale(settings, variant.dtype)
    return numbers(variant.attention, tensors, settings, multiprocessors)
