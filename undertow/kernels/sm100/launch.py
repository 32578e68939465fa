"""Host side of the backward pass: compile the three kernels, describe their launches on given tensors.

The description is data (`undertow.plan.description`), so what is proved on an emulator is what a GPU is later handed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from undertow.kernels.compile import CompiledKernel, compile_kernel
from undertow.kernels.sm100.descriptions import packing, query_grid, rows, scalars, tensor_map, tiles, vector
from undertow.kernels.sm100.layouts import ROW_KERNEL_THREADS
from undertow.kernels.sm100.plan import HEAD_DIM
from undertow.kernels.sm100.plan import plan as planned
from undertow.kernels.sm100.tensors import (
    BackwardTensors,
    LaunchInputError,
    Workspaces,
    allocate_workspaces,
    check_tensors,
    dtype_of,
    kv_tiles,
)
from undertow.plan.attention import PLAIN, Attention, RowVariant
from undertow.plan.description import Launch
from undertow.plan.grid import Grid, heads_per_bundle
from undertow.plan.labels import PlanLabels
from undertow.plan.schema import DType, Plan
from undertow.plan.tiles import Band, band

LOG2_E = math.log2(math.e)
SOFTCAPS = (1e-16, 1e30)  # below, the tanh of a pair that is not seen (`softmax.UNSEEN_TANH`) leaves a P that counts
MAX_SCALE = 1e20  # so that its products and its quotient with a softcap are float32 numbers
Described = Callable[[], Launch]
MAX_GRID = 2**31 - 1  # CTAs of a launch in x: CUDA programming guide


@dataclass(frozen=True)
class Settings:
    """The numbers of one call.

    softmax_scale: factor on the scores, up to MAX_SCALE in size, of any sign; None is 1/sqrt(64).
    causal, window: which keys a row sees, as `plan.tiles.band` says; None is no bound.
    softcap: a number within SOFTCAPS that tanh keeps the scores below, or None.
    deterministic: the same bits in every run; dK, dV and dsink have them anyway.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    deterministic: bool = False

    @property
    def cap(self) -> float:
        """The softcap; 1 where there is none and nobody reads it."""
        if self.softcap is None:
            return 1.0
        if not SOFTCAPS[0] <= self.softcap <= SOFTCAPS[1]:
            raise LaunchInputError(f"softcap={self.softcap}: must be in [{SOFTCAPS[0]}, {SOFTCAPS[1]}], or None")
        return float(self.softcap)

    @property
    def scale(self) -> float:
        if self.softmax_scale is None:
            return HEAD_DIM**-0.5
        if not abs(self.softmax_scale) <= MAX_SCALE:
            raise LaunchInputError(f"softmax_scale={self.softmax_scale}: must be in [-{MAX_SCALE}, {MAX_SCALE}]")
        return float(self.softmax_scale)

    @property
    def band(self) -> Band:
        """The bounds that hold, within 32 bits."""
        for side, bound in zip(("left", "right"), self.window):
            if bound is not None and not isinstance(bound, int):
                raise LaunchInputError(f"window: {side}={bound!r}: must be an integer or None")
        return band(self.causal, self.window)


DEFAULT = Settings()


@dataclass(frozen=True)
class CompiledBackward:
    """The three kernels of one plan, in launch order.

    rows: what the first and the last are compiled for. arch: the architecture, as `kernels.backward` names it.
    """

    plan: Plan
    rows: RowVariant
    preprocess: CompiledKernel
    main: CompiledKernel
    postprocess: CompiledKernel
    arch: str = "sm100"


def attention_of(settings: Settings, tensors: BackwardTensors) -> Attention:
    """The variant of attention that a call asks for: what to make the plan for."""
    left, right = settings.band
    return Attention(
        left=left is not None,
        right=right is not None,
        packed=tensors.sequences is not None,
        softcap=settings.softcap is not None,
        deterministic=settings.deterministic,
    )


def row_variant_of(settings: Settings, tensors: BackwardTensors) -> RowVariant:
    """The variant of the kernels over query rows that a call asks for."""
    return RowVariant(
        packed=tensors.sequences is not None,
        dlse=tensors.dlse is not None,
        sink=tensors.sink is not None,
        deterministic=settings.deterministic,
    )


def compile_for(schedule: str, tensors: BackwardTensors, settings: Settings = DEFAULT) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels of a schedule for what a call asks.

    Raises: PlanError for an unknown schedule; LaunchInputError for an element type without kernels; CompileError.
    """
    plan = planned(schedule, dtype_of(tensors), attention_of(settings, tensors))
    return compile_backward(plan, row_variant_of(settings, tensors))


def compile_backward(plan: Plan, rows: RowVariant = PLAIN) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels of `plan`.

    Raises: CompileError from `compile_kernel`.
    """

    def build() -> Any:
        from undertow.kernels.sm100 import kernel

        return kernel.build(plan)

    main = compile_kernel(f"backward-{plan.name}", plan, build, events=plan.events)
    return CompiledBackward(
        plan, rows, compile_preprocess(plan.dtype, rows), main, compile_postprocess(plan.dtype, rows)
    )


def compile_preprocess(dtype: DType, rows: RowVariant = PLAIN) -> CompiledKernel:
    """Compile the preprocess kernel for O and dO of `dtype`."""

    def build() -> Any:
        from undertow.kernels.sm100 import preprocess

        return preprocess.build(dtype, rows)

    return compile_kernel("preprocess", (dtype, rows), build)


def compile_postprocess(dtype: DType, rows: RowVariant = PLAIN) -> CompiledKernel:
    """Compile the postprocess kernel for dQ of `dtype`."""

    def build() -> Any:
        from undertow.kernels.sm100 import postprocess

        return postprocess.build(dtype, rows)

    return compile_kernel("postprocess", (dtype, rows), build)


def launches(
    compiled: CompiledBackward,
    tensors: BackwardTensors,
    settings: Settings = DEFAULT,
    workspaces: Workspaces | None = None,
) -> list[tuple[CompiledKernel, Launch]]:
    """Describe the launches that turn `tensors` into dq, dk, dv and dsink, in order.

    A kernel that would write nothing is left out: without a query row there is nothing before and after the main
    kernel (dsink is then the caller's to clear), without a key no main kernel.

    Args:
        settings: scale and mask; the kernels must be compiled for this variant (`attention_of`, `row_variant_of`).
        workspaces: buffers to use (`allocate_workspaces`); made here if None. The descriptions keep them alive.
    Raises:
        LaunchInputError: before anything is launched, when a kernel could not take a tensor or a number as it is.
    """
    check_variant(compiled, tensors, settings)
    work = allocate_workspaces(tensors, settings.deterministic) if workspaces is None else workspaces
    return in_order(
        compiled,
        tensors,
        lambda: preprocess_launch(compiled.preprocess, tensors, work),
        lambda: main_launch(compiled, tensors, work, settings),
        lambda: postprocess_launch(compiled.postprocess, tensors, work, settings.scale),
    )


def check_variant(compiled: CompiledBackward, tensors: BackwardTensors, settings: Settings) -> None:
    """Refuse what the kernels are not compiled for, and tensors that they cannot take.

    Raises: LaunchInputError.
    """
    for asked, has in (
        (attention_of(settings, tensors), compiled.plan.attention),
        (row_variant_of(settings, tensors), compiled.rows),
    ):
        if asked != has:
            raise LaunchInputError(f"settings and tensors ask for {asked}: the kernels are compiled for {has}")
    check_tensors(compiled.plan, tensors)


def in_order(
    compiled: CompiledBackward, tensors: BackwardTensors, before: Described, main: Described, after: Described
) -> list[tuple[CompiledKernel, Launch]]:
    """The kernels that have something to write, with their launches: those over query rows, and the main one.

    Raises: LaunchInputError for more CTAs than a launch can have.
    """
    described = []
    if tensors.q.numel():
        described.append((compiled.preprocess, before()))
    if tensors.k.numel():
        described.append((compiled.main, main()))
    if tensors.q.numel():
        described.append((compiled.postprocess, after()))
    for kernel, launch in described:
        if math.prod(launch.grid) > MAX_GRID:
            raise LaunchInputError(f"{kernel.name} would need {math.prod(launch.grid)} CTAs: at most {MAX_GRID}")
    return described


def preprocess_launch(kernel: CompiledKernel, tensors: BackwardTensors, work: Workspaces) -> Launch:
    """Describe the launch that fills `work` from out, dout and lse."""
    given = tensors.batched
    inputs: list[Any] = [rows(given.out, "out"), rows(given.dout, "dout"), scalars(given.lse, "lse")]
    outputs: list[Any] = [
        scalars(work.lse_log2, "LSE_log2"),
        scalars(work.d, "D"),
        tiles(work.dq_accumulator, "dQ accumulator"),
    ]
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
        params=(*inputs, *outputs, *packing(given, "q")),
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
            scalars(work.lse_log2, "LSE_log2"),
            scalars(work.d, "D"),
            tiles(work.dq_accumulator, "dQ accumulator"),
            *([] if work.turns is None else [scalars(work.turns, "turns")]),
            rows(given.dk, "dk"),
            rows(given.dv, "dv"),
            *scalars_of(plan.attention, tensors, settings),
            *packing(given, "q"),
            *packing(given, "k"),
        ),
    )


def scalars_of(
    attention: Attention, tensors: BackwardTensors, settings: Settings, bundle: int | None = None
) -> tuple[int | float, ...]:
    """The run-time numbers of a call, in the order of `work.Scalars`. bundle: heads to one, if others than here."""
    given = tensors.batched
    (_, seqlen_q, heads, _), kv_heads = given.q.shape, given.k.shape[2]
    if bundle is None:
        bundle = heads_per_bundle(average_rows(tensors), heads // kv_heads, kv_heads) if attention.masked else 1
    return (
        seqlen_q,
        *(0 if bound is None else bound for bound in settings.band),
        bundle,
        settings.scale * LOG2_E,
        settings.scale,
        settings.cap * LOG2_E,
        settings.scale / settings.cap,
    )


def average_rows(tensors: BackwardTensors) -> int:
    """Query rows of a sequence, in the mean."""
    given = tensors.batched
    return given.q.shape[1] // (1 if given.sequences is None else max(1, given.sequences.count))


def postprocess_launch(
    kernel: CompiledKernel, tensors: BackwardTensors, work: Any, scale: float, more: Sequence[Any] = ()
) -> Launch:
    """Describe the launch that writes dq from the accumulator, and dsink from its parts, whatever else `work` has.

    more: what the kernel reads besides its sums.
    """
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
        params=(*sums, *more, *results, *packing(given, "q"), scale),
    )
