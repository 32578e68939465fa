"""The backward pass from end to end without a GPU: tensors in, gradients out, every kernel executed as its PTX says."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from undertow import emulator
from undertow.inputs import Batch, Shape
from undertow.kernels.backward import SCHEDULES, compile_for, launches
from undertow.kernels.sm100.launch import BackwardTensors, CompiledBackward, Settings
from undertow.kernels.sm100.tensors import Sequences
from undertow.plan.schema import Plan
from undertow.plan.tiles import Tiling
from undertow.reference import Gradients, Scoring

DEFAULT_OPTIONS = emulator.Options()
KERNELS = ("preprocess", "main", "postprocess")  # in launch order
COMBINE = "combine"  # behind the main one, where groups of query heads are split


@dataclass(frozen=True)
class EmulatedBackward:
    """Gradients of one emulated backward pass, and what the emulator counted on the way.

    scoring, settings: the attention, as the reference and as the launches say it. dsink: gradient of the sink, if there
    is one. results: one emulator result per kernel that was launched. run_seconds: executing instructions;
    compile_seconds: all the rest, which is compiling the kernels, decoding their PTX and building the emulator's back
    end, less what is cached.
    """

    plan: Plan
    shape: Shape
    scoring: Scoring
    settings: Settings
    gradients: Gradients
    dsink: torch.Tensor | None
    results: dict[str, emulator.Result]
    compile_seconds: float
    run_seconds: float

    @property
    def backend(self) -> str:
        """The emulator back end that ran the kernels."""
        return self.results["main"].backend

    @property
    def tile_iterations(self) -> int:
        """Trips of the main kernel's tile loop, over all CTAs."""
        band, tiles = self.settings.band, (self.plan.tile_m, self.plan.tile_n)
        if self.scoring.sequences is None:
            lengths = [(self.shape.seqlen_q, self.shape.seqlen_k)] * self.shape.batch
        else:
            lengths = [(len(queries), len(keys)) for queries, keys in self.scoring.sequences.used()]
        tilings = [Tiling(*pair, band, *tiles) for pair in lengths]
        return self.shape.heads * sum(
            t.query_tiles(n).count for t in tilings for n in range(-(-t.seqlen_k // t.tile_n))
        )

    @property
    def compute_barriers_per_tile(self) -> float:
        """Compute-wide barriers that the main kernel executed, per tile; the epilogue uses none of them."""
        if "compute" not in self.plan.barrier_ids:
            return 0.0
        executed = self.results["main"].barriers.get(self.plan.barrier_ids["compute"], 0)
        return executed / max(1, self.tile_iterations)


def program(ptx: str, entry: str | None) -> emulator.Program:
    """The kernel decoded, from memory where it is remembered."""
    return emulator.remembered_program(ptx, entry)


def backward(
    batch: Batch,
    *,
    schedule: str | None = None,
    deterministic: bool = False,
    options: emulator.Options = DEFAULT_OPTIONS,
    arch: str = "sm100",
) -> EmulatedBackward:
    """dQ, dK, dV of `batch` from the compiled kernels of `schedule`, executed on the emulator.

    schedule: of the kernels for `arch`; None is the fastest.

    Raises: PlanError for an unknown schedule, CompileError, LaunchInputError for tensors the kernels cannot take,
    EmulatorError if a kernel does something that is not legal.
    """
    settings, tensors = settings_of(batch.scoring, deterministic), tensors_of(batch)
    begin = time.perf_counter()
    compiled = compile_for(arch, schedule or SCHEDULES[arch][-1], tensors, settings)
    results = execute(compiled, tensors, settings, options)
    run_seconds = sum(result.seconds for result in results.values())
    compile_seconds = time.perf_counter() - begin - run_seconds
    gradients = Gradients(tensors.dq, tensors.dk, tensors.dv)
    return EmulatedBackward(
        compiled.plan,
        batch.shape,
        batch.scoring,
        settings,
        gradients,
        tensors.dsink,
        results,
        compile_seconds,
        run_seconds,
    )


def execute(
    compiled: CompiledBackward,
    tensors: BackwardTensors,
    settings: Settings,
    options: emulator.Options = DEFAULT_OPTIONS,
) -> dict[str, emulator.Result]:
    """Run the kernels on `tensors`, in place; results by name (KERNELS, COMBINE), of those that were launched.

    Raises: LaunchInputError, EmulatorError.
    """
    names = dict(zip((compiled.preprocess, compiled.main, compiled.postprocess, compiled.combine), (*KERNELS, COMBINE)))
    return {
        names[kernel]: emulator.launch(program(kernel.ptx, kernel.entry), launch, options)
        for kernel, launch in launches(compiled, tensors, settings)
    }


def tensors_of(batch: Batch) -> BackwardTensors:
    """The tensors of `batch`, and results full of NaN: an element that no kernel writes must not pass for a number."""
    dq, dk, dv = (torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (batch.q, batch.k, batch.v))
    sink, sequences = batch.scoring.sink, batch.scoring.sequences
    return BackwardTensors(
        batch.q,
        batch.k,
        batch.v,
        batch.out,
        batch.dout,
        batch.lse,
        dq,
        dk,
        dv,
        dlse=batch.dlse,
        sink=sink,
        dsink=None if sink is None else torch.full_like(sink, torch.nan),
        sequences=None if sequences is None else Sequences(**vars(sequences)),
    )


def settings_of(scoring: Scoring, deterministic: bool = False) -> Settings:
    """The same attention as the launches say it."""
    return Settings(scoring.softmax_scale, scoring.causal, scoring.window, scoring.softcap, deterministic)
