"""Host side of the SM90 backward pass: compile the three kernels, describe their launches on given tensors.

As `sm100.launch`, whose settings and tensors these are; only what lies between the kernels differs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from undertow.kernels.compile import CompiledKernel, compile_kernel
from undertow.kernels.sm90.plan import plan as plan_of
from undertow.kernels.sm90.tensors import Workspaces, allocate_workspaces, check_scale
from undertow.kernels.sm100.descriptions import packing, query_grid, rows, scalars, tensor_map, tiles, vector
from undertow.kernels.sm100.launch import (
    DEFAULT,
    LOG2_E,
    MAX_GRID,
    CompiledBackward,
    Settings,
    attention_of,
    row_variant_of,
    scalars_of,
)
from undertow.kernels.sm100.layouts import ROW_KERNEL_THREADS
from undertow.kernels.sm100.tensors import TORCH_TYPES, BackwardTensors, LaunchInputError, check_tensors, kv_tiles
from undertow.plan.attention import PLAIN, Attention, RowVariant
from undertow.plan.description import Launch
from undertow.plan.grid import Grid
from undertow.plan.labels import PlanLabels
from undertow.plan.schema import DType, Plan, PlanError

ARCH, TARGET = "sm90", "sm_90a"
SCHEDULES = ("pingpong",)


def planned(schedule: str | None, dtype: DType, attention: Attention) -> Plan:
    """The plan of a schedule, of the only one if None.

    Raises: LaunchInputError for an unknown schedule, and naming what these kernels do not have.
    """
    if schedule is not None and schedule not in SCHEDULES:
        raise LaunchInputError(f"schedule {schedule!r} is unknown on {TARGET}; allowed: {', '.join(SCHEDULES)}")
    try:
        return plan_of(dtype, attention)
    except PlanError as error:
        raise LaunchInputError(str(error)) from error


def dtype_of(tensors: BackwardTensors) -> DType:
    """The element type of the kernels for a call.

    Raises: LaunchInputError for one without kernels.
    """
    for ours, theirs in TORCH_TYPES.items():
        if theirs == tensors.q.dtype:
            return ours
    raise LaunchInputError(f"q has dtype {tensors.q.dtype}: must be torch.bfloat16 or torch.float16")


def compile_for(schedule: str | None, tensors: BackwardTensors, settings: Settings = DEFAULT) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels for what a call asks.

    Raises: LaunchInputError for a schedule, element type or option without kernels; CompileError.
    """
    plan = planned(schedule, dtype_of(tensors), attention_of(settings, tensors))
    return compile_backward(plan, row_variant_of(settings, tensors))


def compile_backward(plan: Plan, rows: RowVariant = PLAIN) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels of `plan`.

    Raises: CompileError from `compile_kernel`.
    """

    def built(module: str) -> Any:
        from undertow.kernels.sm90 import kernel, postprocess, preprocess

        if module == "main":
            return kernel.build(plan)
        return {"preprocess": preprocess, "postprocess": postprocess}[module].build(plan.dtype, rows)

    before, after = (
        compile_kernel(f"{name}-{ARCH}", (plan.dtype, rows), lambda name=name: built(name), TARGET)
        for name in ("preprocess", "postprocess")
    )
    main = compile_kernel(f"backward-{ARCH}-{plan.name}", plan, lambda: built("main"), TARGET, plan.events)
    return CompiledBackward(plan, rows, before, main, after, ARCH)


def launches(
    compiled: CompiledBackward,
    tensors: BackwardTensors,
    settings: Settings = DEFAULT,
    workspaces: Workspaces | None = None,
) -> list[tuple[CompiledKernel, Launch]]:
    """Describe the launches that turn `tensors` into dq, dk, dv and dsink, in order, as `sm100.launch.launches` does.

    Raises:
        LaunchInputError: before anything is launched, when a kernel could not take a tensor or a number as it is.
    """
    for asked, has in (
        (attention_of(settings, tensors), compiled.plan.attention),
        (row_variant_of(settings, tensors), compiled.rows),
    ):
        if asked != has:
            raise LaunchInputError(f"settings and tensors ask for {asked}: the kernels are compiled for {has}")
    check_tensors(compiled.plan, tensors)
    check_scale(settings.scale, compiled.plan.dtype)
    work = allocate_workspaces(tensors, settings.deterministic) if workspaces is None else workspaces
    described = []
    if tensors.q.numel():
        described.append((compiled.preprocess, preprocess_launch(compiled.preprocess, tensors, work, settings)))
    if tensors.k.numel():
        described.append((compiled.main, main_launch(compiled, tensors, work, settings)))
    if tensors.q.numel():
        described.append((compiled.postprocess, postprocess_launch(compiled.postprocess, tensors, work, settings)))
    for kernel, launch in described:
        if math.prod(launch.grid) > MAX_GRID:
            raise LaunchInputError(f"{kernel.name} would need {math.prod(launch.grid)} CTAs: at most {MAX_GRID}")
    return described


def lse_factor(settings: Settings) -> float:
    """-1 / (softmax_scale * log2(e)), of the float32 number that the main kernel multiplies with."""
    return -1.0 / float(torch.tensor(settings.scale * LOG2_E, dtype=torch.float32))


def preprocess_launch(kernel: CompiledKernel, tensors: BackwardTensors, work: Workspaces, settings: Settings) -> Launch:
    """Describe the launch that fills `work` from out, dout and lse."""
    given = tensors.batched
    inputs: list[Any] = [rows(given.out, "out"), rows(given.dout, "dout"), scalars(given.lse, "lse")]
    outputs: list[Any] = [tiles(work.terms, "row terms"), tiles(work.dq_accumulator, "dQ accumulator")]
    if given.dlse is not None:
        inputs.append(scalars(given.dlse, "dlse"))
    if given.sink is not None:
        inputs.append(vector(given.sink, "sink"))
    if work.turns is not None:
        outputs.append(scalars(work.turns, "turns"))
    if work.dsink_parts is not None:
        outputs.append(scalars(work.dsink_parts, "dsink parts"))
    return Launch(
        kernel=kernel.entry,
        grid=query_grid(work.dq_accumulator),
        block=(ROW_KERNEL_THREADS, 1, 1),
        params=(*inputs, *outputs, *packing(given, "q"), lse_factor(settings)),
    )


def main_launch(compiled: CompiledBackward, tensors: BackwardTensors, work: Workspaces, settings: Settings) -> Launch:
    """Describe the launch that writes dk and dv and adds up the dQ accumulator."""
    plan, given = compiled.plan, tensors.batched
    batch, _, kv_heads, _ = given.k.shape
    loads = {"sQ": "q", "sK": "k", "sV": "v", "sdO": "dout"}
    return Launch(
        kernel=compiled.main.entry,
        grid=(Grid(kv_tiles(tensors), kv_heads, batch).num_ctas, 1, 1),
        block=(plan.num_threads, 1, 1),
        dynamic_smem=plan.smem_bytes,
        labels=PlanLabels(plan),
        params=(
            *(tensor_map(plan, region, given, name) for region, name in loads.items()),
            tiles(work.terms, "row terms"),
            tiles(work.dq_accumulator, "dQ accumulator"),
            *([] if work.turns is None else [scalars(work.turns, "turns")]),
            rows(given.dk, "dk"),
            rows(given.dv, "dv"),
            *scalars_of(plan.attention, tensors, settings),
            *packing(given, "q"),
            *packing(given, "k"),
        ),
    )


def postprocess_launch(
    kernel: CompiledKernel, tensors: BackwardTensors, work: Workspaces, settings: Settings
) -> Launch:
    """Describe the launch that writes dq from the accumulator, and dsink from its parts."""
    given = tensors.batched
    sums = [tiles(work.dq_accumulator, "dQ accumulator")]
    results = [rows(given.dq, "dq")]
    if given.dsink is not None and work.dsink_parts is not None:
        sums.append(scalars(work.dsink_parts, "dsink parts"))
        results.append(vector(given.dsink, "dsink"))
    return Launch(
        kernel=kernel.entry,
        grid=query_grid(work.dq_accumulator),
        block=(ROW_KERNEL_THREADS, 1, 1),
        params=(*sums, *results, *packing(given, "q"), settings.scale),
    )
