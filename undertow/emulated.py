"""The backward pass from end to end without a GPU: tensors in, gradients out, every kernel executed as its PTX says."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch

from undertow import emulator
from undertow.inputs import Batch, Shape
from undertow.kernels.sm100.launch import BackwardTensors, Settings, compile_backward, launches
from undertow.kernels.sm100.plan import plan as plan_of
from undertow.kernels.sm100.tensors import TORCH_TYPES
from undertow.plan.schema import DType, Plan
from undertow.plan.tiles import Tiling
from undertow.reference import Gradients, Scoring

DEFAULT_OPTIONS = emulator.Options()
KERNELS = ("preprocess", "main", "postprocess")  # in launch order


@dataclass(frozen=True)
class EmulatedBackward:
    """Gradients of one emulated backward pass, and what the emulator counted on the way.

    results: one emulator result per kernel of KERNELS. run_seconds: executing instructions; compile_seconds: all the
    rest, which is compiling the kernels, decoding their PTX and building the emulator's back end, less what is cached.
    """

    plan: Plan
    shape: Shape
    settings: Settings
    gradients: Gradients
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
        plan, shape = self.plan, self.shape
        tiling = Tiling(shape.seqlen_q, shape.seqlen_k, self.settings.band, plan.tile_m, plan.tile_n)
        key_tiles = range(-(-shape.seqlen_k // plan.tile_n))
        return sum(tiling.query_tiles(tile).count for tile in key_tiles) * shape.heads * shape.batch

    @property
    def compute_barriers_per_tile(self) -> float:
        """Compute-wide barriers that the main kernel executed, per tile; the epilogue uses none of them."""
        executed = self.results["main"].barriers.get(self.plan.barrier_ids["compute"], 0)
        return executed / max(1, self.tile_iterations)


@functools.lru_cache(maxsize=16)  # decoding takes longer than running a small batch; four schedules have six kernels
def _program(ptx: str, entry: str) -> emulator.Program:
    return emulator.load_program(ptx, entry)


def backward(batch: Batch, *, schedule: str = "split", options: emulator.Options = DEFAULT_OPTIONS) -> EmulatedBackward:
    """dQ, dK, dV of `batch` from the compiled kernels of `schedule`, executed on the emulator.

    Raises: PlanError for an unknown schedule, CompileError, LaunchInputError for tensors the kernels cannot take,
    EmulatorError if a kernel does something that is not legal.
    """
    settings = settings_of(batch.scoring)
    plan = plan_of(schedule, dtype_of(batch), settings.attention)
    begin = time.perf_counter()
    compiled = compile_backward(plan)
    # NaN: an element that no kernel writes must not pass for a gradient
    dq, dk, dv = (torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (batch.q, batch.k, batch.v))
    tensors = BackwardTensors(batch.q, batch.k, batch.v, batch.out, batch.dout, batch.lse, dq, dk, dv)
    results = {
        name: emulator.launch(_program(kernel.ptx, kernel.entry), launch, options)
        for name, (kernel, launch) in zip(KERNELS, launches(compiled, tensors, settings))
    }
    run_seconds = sum(result.seconds for result in results.values())
    compile_seconds = time.perf_counter() - begin - run_seconds
    return EmulatedBackward(plan, batch.shape, settings, Gradients(dq, dk, dv), results, compile_seconds, run_seconds)


def settings_of(scoring: Scoring) -> Settings:
    """The same attention as the launches say it."""
    return Settings(scoring.softmax_scale, scoring.causal, scoring.window)


def dtype_of(batch: Batch) -> DType:
    """The element type of a batch as plans say it."""
    return next(dtype for dtype, torch_type in TORCH_TYPES.items() if torch_type == batch.q.dtype)
