"""Host side of the SM90 backward pass: compile the kernels, describe their launches on given tensors.

As `sm100.launch`, whose settings and tensors these are; only what lies between the kernels differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from undertow.kernels.compile import CompiledKernel, compile_kernel
from undertow.kernels.sm90.parts import WAVE, parts_of
from undertow.kernels.sm90.plan import WARP_ROWS
from undertow.kernels.sm90.plan import plan as plan_of
from undertow.kernels.sm90.storing import takes_turns
from undertow.kernels.sm90.tensors import Workspaces, allocate_partial, allocate_workspaces, check_scale
from undertow.kernels.sm100 import launch as sm100
from undertow.kernels.sm100.descriptions import (
    packing,
    query_grid,
    rows,
    rows_map,
    scalars,
    tensor_map,
    tiles,
    vector,
)
from undertow.kernels.sm100.launch import (
    DEFAULT,
    LOG2_E,
    CompiledBackward,
    Settings,
    attention_of,
    average_rows,
    in_order,
    postprocess_launch,
    row_variant_of,
)
from undertow.kernels.sm100.layouts import ROW_KERNEL_THREADS
from undertow.kernels.sm100.tensors import BackwardTensors, LaunchInputError, dtype_of, kv_tiles
from undertow.plan.attention import PLAIN, Attention, RowVariant
from undertow.plan.description import Launch, Tensor
from undertow.plan.grid import Grid, heads_per_bundle
from undertow.plan.labels import PlanLabels
from undertow.plan.schema import DType, Plan, PlanError

ARCH, TARGET = "sm90", "sm_90a"
EMULATED_MULTIPROCESSORS = 2
CTAS = 8  # place of their number among those of `work.LaunchScalars`
SCHEDULES = ("pingpong",)
L2_BYTES = 18 * 2**20  # of the query side of a bundle, of the 50 MB of an H200: with more, CTAs wait for memory


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


def compile_for(schedule: str | None, tensors: BackwardTensors, settings: Settings = DEFAULT) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels for what a call asks.

    Raises: LaunchInputError for a schedule, element type or option without kernels; CompileError.
    """
    plan = planned(schedule, dtype_of(tensors), asked_attention(settings, tensors))
    return compile_backward(plan, row_variant_of(settings, tensors))


def asked_attention(settings: Settings, tensors: BackwardTensors) -> Attention:
    """The variant of attention that a call asks for; large groups are split."""
    attention = attention_of(settings, tensors)
    return replace(attention, split=parts_for(attention, tensors) > 1)


def settings_used(settings: Settings, tensors: BackwardTensors) -> Settings:
    """The settings of the kernels that a call on a GPU uses: as asked, or deterministic where turns cost less."""
    in_turn = replace(settings, deterministic=True)
    attention = asked_attention(in_turn, tensors)
    items = num_items(tensors, parts_for(attention, tensors))
    takes = takes_turns(attention, _group(tensors), average_keys(tensors), settings.band, items)
    return in_turn if takes else settings


def average_keys(tensors: BackwardTensors) -> int:
    """Keys of a sequence, in the mean."""
    given = tensors.batched
    return given.k.shape[1] // (1 if given.sequences is None else max(1, given.sequences.count))


def parts_for(attention: Attention, tensors: BackwardTensors) -> int:
    """Parts of every group of a call. attention: of its kernels, whether they split groups or not."""
    return parts_of(attention, dtype_of(tensors), _group(tensors), average_rows(tensors), num_items(tensors))


def _group(tensors: BackwardTensors) -> int:
    return tensors.q.shape[-2] // tensors.k.shape[-2]


def compile_backward(plan: Plan, rows: RowVariant = PLAIN) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels of `plan`.

    Raises: CompileError from `compile_kernel`.
    """

    def built(module: str) -> Any:
        from undertow.kernels.sm90 import combine, kernel, postprocess, preprocess

        if module == "main":
            return kernel.build(plan)
        if module == "combine":
            return combine.build(plan.dtype, rows.packed)
        if module == "preprocess":
            return preprocess.build(plan.dtype, rows, softcap)
        return postprocess.build(plan.dtype, rows)

    softcap = plan.attention.softcap
    before = compile_kernel(f"preprocess-{ARCH}", (plan.dtype, rows, softcap), lambda: built("preprocess"), TARGET)
    after = compile_kernel(f"postprocess-{ARCH}", (plan.dtype, rows), lambda: built("postprocess"), TARGET)
    main = compile_kernel(f"backward-{ARCH}-{plan.name}", plan, lambda: built("main"), TARGET, plan.events)
    combine = None
    if plan.attention.split:
        combine = compile_kernel(f"combine-{ARCH}", (plan.dtype, rows.packed), lambda: built("combine"), TARGET)
    return CompiledBackward(plan, rows, before, main, after, ARCH, combine)


def launches(
    compiled: CompiledBackward,
    tensors: BackwardTensors,
    settings: Settings = DEFAULT,
    workspaces: Workspaces | None = None,
) -> list[tuple[CompiledKernel, Launch]]:
    """Describe the launches that turn `tensors` into dq, dk, dv and dsink, in order, as `sm100.launch.launches` does.

    The main kernel's are for an emulator: few CTAs, so that those of small problems have several items.

    Args:
        settings: scale and mask; the kernels must be compiled for them, with split groups or without.
        workspaces: buffers to use; made here if None. If they have `partial`, groups have as many parts as fit there.
    Raises:
        LaunchInputError: before anything is launched, when a kernel could not take a tensor or a number as it is.
    """
    check_variant(compiled, tensors, settings)
    check_scale(settings, compiled.plan.dtype)
    capped = settings.softcap is not None
    work = allocate_workspaces(tensors, settings.deterministic, capped) if workspaces is None else workspaces
    if compiled.plan.attention.split and work.partial is None:
        work = replace(work, partial=allocate_partial(tensors, parts_for(compiled.plan.attention, tensors)))
    described = in_order(
        compiled,
        tensors,
        lambda: preprocess_launch(compiled.preprocess, tensors, work, settings),
        lambda: main_launch(compiled, tensors, work, settings),
        lambda: postprocess_launch(compiled.postprocess, tensors, work, settings.scale, turns_of(work)),
    )
    if compiled.combine is not None and tensors.k.numel():
        place = 1 + [kernel for kernel, _ in described].index(compiled.main)
        described.insert(place, (compiled.combine, combine_launch(compiled.combine, tensors, work, settings.scale)))
    return described


def check_variant(compiled: CompiledBackward, tensors: BackwardTensors, settings: Settings) -> None:
    """As `sm100.launch.check_variant`; kernels of either kind, with split groups or without, take any group.

    Raises: LaunchInputError.
    """
    attention = replace(compiled.plan.attention, split=False)
    sm100.check_variant(replace(compiled, plan=replace(compiled.plan, attention=attention)), tensors, settings)


def turns_of(work: Workspaces) -> list[Any]:
    """The counted turns, in deterministic mode."""
    return [] if work.turns is None else [scalars(work.turns, "turns")]


def lse_factor(settings: Settings) -> list[float]:
    """What the preprocess kernel multiplies LSE * log2(e) with, as `entry.lse_factor` has it."""
    if settings.softcap is not None:
        return []
    return [-1.0 / float(torch.tensor(settings.scale * LOG2_E, dtype=torch.float32))]


def lse_of(work: Workspaces) -> list[Any]:
    """LSE apart from the row terms, under a softcap."""
    return [] if work.lse is None else [tiles(work.lse, "LSE")]


def preprocess_launch(kernel: CompiledKernel, tensors: BackwardTensors, work: Workspaces, settings: Settings) -> Launch:
    """Describe the launch that fills `work` from out, dout and lse."""
    given = tensors.batched
    inputs: list[Any] = [rows(given.out, "out"), rows(given.dout, "dout"), scalars(given.lse, "lse")]
    outputs: list[Any] = [tiles(work.terms, "row terms"), tiles(work.dq_accumulator, "dQ accumulator")]
    outputs.append(Tensor(work.claims, dims=(), name="claims"))
    outputs += lse_of(work)
    if given.dlse is not None:
        inputs.append(scalars(given.dlse, "dlse"))
    if given.sink is not None:
        inputs.append(vector(given.sink, "sink"))
    outputs += turns_of(work)
    if work.dsink_parts is not None:
        outputs.append(scalars(work.dsink_parts, "dsink parts"))
    return Launch(
        kernel=kernel.entry,
        grid=query_grid(work.dq_accumulator),
        block=(ROW_KERNEL_THREADS, 1, 1),
        params=(*inputs, *outputs, *packing(given, "q"), *lse_factor(settings)),
    )


def numbers(attention: Attention, tensors: BackwardTensors, settings: Settings, multiprocessors: int) -> tuple:
    """The run-time numbers of a call, in the order of `work.SplitScalars`: a CTA for each multiprocessor.

    Also in deterministic mode, where an item waits for those with smaller numbers. Measured: a CTA for each item takes
    4% longer (dense, 8k) to 34% (causal, 512): it begins and ends for one tile (`results/hopper/deterministic.txt`).
    """
    parts = parts_for(attention, tensors) if attention.split else 1
    items = num_items(tensors, parts)
    others = scalars_of(attention, tensors, settings, parts)
    return *others, min(items, multiprocessors), items, *([parts] if attention.split else [])


def emulated_numbers(attention: Attention, tensors: BackwardTensors, settings: Settings, parts: int | None) -> tuple:
    """The same for an emulator, which runs one CTA as far as it gets: each may claim a fair part of the items.

    parts: of a group, None where groups are whole.
    """
    items = num_items(tensors, parts or 1)
    ctas = min(items, EMULATED_MULTIPROCESSORS)
    others = scalars_of(attention, tensors, settings, parts or 1)
    return *others, ctas, -(-items // max(1, ctas)), *([] if parts is None else [parts])


def num_items(tensors: BackwardTensors, parts: int = 1) -> int:
    """Key/value tiles of a launch, each as often as a group has parts."""
    batch, _, kv_heads, _ = tensors.batched.k.shape
    return Grid(kv_tiles(tensors), kv_heads * parts, batch).num_ctas


def main_launch(compiled: CompiledBackward, tensors: BackwardTensors, work: Workspaces, settings: Settings) -> Launch:
    """Describe the launch that writes dk and dv and adds up the dQ accumulator."""
    plan, given = compiled.plan, tensors.batched
    parts = None if work.partial is None else work.partial.shape[1] // given.k.shape[2]
    given_numbers = emulated_numbers(plan.attention, tensors, settings, parts if plan.attention.split else None)
    loads = {"sQ": "q", "sK": "k", "sV": "v", "sdO": "dout"}
    return Launch(
        kernel=compiled.main.entry,
        grid=(given_numbers[CTAS], 1, 1),
        block=(plan.num_threads, 1, 1),
        dynamic_smem=plan.smem_bytes,
        labels=PlanLabels(plan),
        params=(
            *(tensor_map(plan, region, given, name) for region, name in loads.items()),
            *(
                []
                if plan.attention.split
                else [rows_map(getattr(given, name), plan.dtype, WARP_ROWS, name) for name in ("dv", "dk")]
            ),
            tiles(work.terms, "row terms"),
            tiles(work.dq_accumulator, "dQ accumulator"),
            Tensor(work.claims, dims=(), name="claims"),
            *lse_of(work),
            *turns_of(work),
            *([tiles(work.partial, "partial dV and dK")] if plan.attention.split and work.partial is not None else []),
            rows(given.dk, "dk"),
            rows(given.dv, "dv"),
            *given_numbers,
            *packing(given, "q"),
            *packing(given, "k"),
        ),
    )


def combine_launch(kernel: CompiledKernel, tensors: BackwardTensors, work: Workspaces, scale: float) -> Launch:
    """Describe the launch that adds up the parts of every group in `work`."""
    assert work.partial is not None
    given = tensors.batched
    batch, _, kv_heads, _ = given.k.shape
    _, virtual_heads, count, _ = work.partial.shape
    return Launch(
        kernel=kernel.entry,
        grid=(count * kv_heads * batch, 2, 1),
        block=(ROW_KERNEL_THREADS, 1, 1),
        params=(
            tiles(work.partial, "partial dV and dK"),
            rows(given.dk, "dk"),
            rows(given.dv, "dv"),
            *packing(given, "k"),
            virtual_heads // kv_heads,
            scale,
        ),
    )


def scalars_of(
    attention: Attention, tensors: BackwardTensors, settings: Settings, parts: int = 1
) -> tuple[int | float, ...]:
    """The run-time numbers of a call, in the order of `work.Scalars`. parts: of every group."""
    return sm100.scalars_of(attention, tensors, settings, bundle_of(attention, tensors, parts))


def bundle_of(attention: Attention, tensors: BackwardTensors, parts: int = 1) -> int:
    """Key/value heads to a bundle, of this call; every part of a group counts as one."""
    batch, _, kv_heads, _ = tensors.batched.k.shape
    heads = kv_heads * parts
    group = tensors.q.shape[-2] // heads
    return bundle_for(attention, average_rows(tensors), group, (batch, heads), kv_tiles(tensors))


def bundle_for(attention: Attention, seqlen_q: int, group: int, heads: tuple[int, int], tiles: int) -> int:
    """Key/value heads to a bundle: those whose query side fits in L2, and at least a wave of CTAs.

    Interleaved heads matter most in deterministic mode without a mask: all CTAs of a head visit the query tiles in one
    order, one behind the other, and a CTA that starts when the first of a head ends should take the place of that one
    in another head, not the next place in a queue. There a wave does not matter, and of groups, whose query heads make
    a queue that much longer, fewer heads are better. Measured: `docs/hopper.md`.

    heads: batch elements, and heads of each.
    """
    batch, kv_heads = heads
    many = batch * kv_heads
    most = many if attention.deterministic and group == 1 else kv_heads
    fitting = heads_per_bundle(seqlen_q, group, most, L2_BYTES)
    return fitting if attention.deterministic else max(fitting, min(many, -(-WAVE // max(1, tiles))))
