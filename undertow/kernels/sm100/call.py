"""A whole backward pass as one compiled call: its variant, the workspace it needs, the numbers that it is given.

What `entry.py` compiles, seen from a host that has tensors; nothing here needs the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from undertow.kernels.sm100.launch import (
    MAX_GRID,
    LaunchInputError,
    Settings,
    attention_of,
    row_variant_of,
    scalars_of,
)
from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS
from undertow.kernels.sm100.plan import SCHEDULES, TILE_M
from undertow.kernels.sm100.plan import plan as plan_of
from undertow.kernels.sm100.tensors import BackwardTensors, check_tensors, dtype_of, kv_tiles, query_tiles
from undertow.plan.attention import Attention, RowVariant
from undertow.plan.schema import DType, Plan

MASKS = {
    "dense": {},
    "causal": {"right": True},
    "window": {"left": True, "right": True},
    "left": {"left": True},
}
FLAGS = ("packed", "softcap", "deterministic", "dlse", "sink")


@dataclass(frozen=True)
class Variant:
    """What the kernels of a call are compiled for: everything in which two objects can differ, as plain values."""

    schedule: str
    dtype: DType
    attention: Attention
    rows: RowVariant
    events: bool = False  # its kernels have named spans: see kernels.events

    @property
    def plan(self) -> Plan:
        return replace(plan_of(self.schedule, self.dtype, self.attention), events=self.events)

    @property
    def name(self) -> str:
        """Short and unique: schedule, element type, attention, what flows in besides."""
        more = [flag for flag in ("dlse", "sink") if getattr(self.rows, flag)] + ["events"] * self.events
        return "-".join([self.schedule, self.dtype.label, self.attention.name, *more])


def variant_of(schedule: str | None, tensors: BackwardTensors, settings: Settings) -> Variant:
    """The variant that a call asks for. schedule: the fastest if None.

    Raises: LaunchInputError for an element type without kernels.
    """
    asked = attention_of(settings, tensors), row_variant_of(settings, tensors)
    return Variant(schedule or SCHEDULES[-1], dtype_of(tensors), *asked)


def variant_named(name: str, dtype: DType, schedule: str | None = None) -> Variant:
    """The variant of a name such as `dense`, `causal-packed` or `window-softcap-sink`: a mask, then what is present.

    Raises: LaunchInputError naming the word that is none.
    """
    mask, *flags = name.split("-")
    for word, words in ((mask, MASKS), *((flag, FLAGS) for flag in flags)):
        if word not in words:
            raise LaunchInputError(f"variant {name!r}: {word!r} is unknown here; known are {', '.join(words)}")
    shared = {flag: flag in flags for flag in ("packed", "deterministic")}
    attention = Attention(**MASKS[mask], softcap="softcap" in flags, **shared)
    return Variant(
        schedule or SCHEDULES[-1], dtype, attention, RowVariant(dlse="dlse" in flags, sink="sink" in flags, **shared)
    )


def used_for(variant: Variant) -> tuple[Variant, ...]:
    """What computes calls that ask for a variant: here itself, whatever their sizes."""
    return (variant,)


def check_call(variant: Variant, tensors: BackwardTensors) -> None:
    """Refuse what the kernels cannot take.

    Raises: LaunchInputError naming the tensor, its value and what is allowed.
    """
    check_tensors(variant.plan, tensors)
    for name in ("q", "k"):
        if not getattr(tensors, name).numel():
            shape = tuple(getattr(tensors, name).shape)
            raise LaunchInputError(f"{name} has shape {shape}: must have a row, or else there is nothing to launch")
    batch, _, heads, _ = tensors.batched.q.shape
    grids = {"q": batch * heads * query_tiles(tensors), "k": batch * tensors.k.shape[-2] * kv_tiles(tensors)}
    for name, ctas in grids.items():
        if ctas > MAX_GRID:
            raise LaunchInputError(f"{name} would need {ctas} CTAs, one a tile: at most {MAX_GRID}")


def workspace_floats(variant: Variant, tensors: BackwardTensors) -> int:
    """Extent of the workspace in 4-byte elements, as `entry.cut` divides it."""
    batch, _, heads, _ = tensors.batched.q.shape
    per_tile = DQ_ACCUMULATOR_TILE + 2 * TILE_M
    per_tile += ROW_KERNEL_THREADS // 32 if variant.rows.sink else 0
    per_tile += 1 if variant.rows.deterministic else 0
    return batch * heads * query_tiles(tensors) * per_tile


def numbers_of(variant: Variant, tensors: BackwardTensors, settings: Settings, multiprocessors: int) -> tuple:
    """The run-time numbers of a call, in the order of `work.Scalars`.

    multiprocessors: of the device that holds the tensors; here every tile has a CTA, so they do not matter.
    """
    del multiprocessors
    return scalars_of(variant.attention, tensors, settings)


def arguments(tensors: BackwardTensors, workspace: torch.Tensor, numbers: tuple) -> tuple:
    """What the compiled function takes, in the nesting of `entry.backward_pass`; None for what is absent."""
    packing = tensors.sequences
    t, packings = tensors, None
    if packing is not None:
        sides = (
            (packing.cu_seqlens_q, packing.seqused_q),
            (packing.cu_seqlens_k, packing.seqused_k),
        )
        packings = tuple((cu, cu.narrow(0, 0, 0) if used is None else used) for cu, used in sides)
    reads = (t.q, t.k, t.v, t.out, t.dout, t.lse, t.dlse, t.sink, packings)
    return workspace, reads, (t.dq, t.dk, t.dv, t.dsink), numbers
