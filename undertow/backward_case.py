"""The launches of one backward pass as a case: NumPy arrays and PTX, nothing of torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from undertow import emulator
from undertow.cases import Kernel
from undertow.emulated import settings_of, tensors_of
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.backward import compile_backward, compile_for, launches
from undertow.kernels.compile import CompiledKernel
from undertow.plan.description import Launch, Pointer, Tensor, TensorMap
from undertow.plan.schema import Plan

NAMES = ("preprocess", "main", "combine", "postprocess")  # combine only where groups of query heads are split


def backward_case(plan: Plan, shape: Shape, seed: int = 0, arch: str = "sm100") -> tuple[Kernel, ...]:
    """The launches of NAMES on a random batch; results hold NaN, so that an element never written shows.

    Raises: InputError, LaunchInputError for a shape that cannot be run; CompileError.
    """
    return _kernels(launches(compile_backward(arch, plan), tensors_of(random_batch(shape, seed))))


def batch_case(
    batch: Batch, schedule: str = "split", deterministic: bool = False, arch: str = "sm100"
) -> tuple[Kernel, ...]:
    """The launches of a schedule on `batch`, in the variant that its scoring asks for.

    Raises: PlanError, LaunchInputError, CompileError.
    """
    settings, tensors = settings_of(batch.scoring, deterministic), tensors_of(batch)
    return _kernels(launches(compile_for(arch, schedule, tensors, settings), tensors, settings))


def _kernels(described: list[tuple[CompiledKernel, Launch]]) -> tuple[Kernel, ...]:
    arrays: dict[int, np.ndarray] = {}
    names = {name.partition("-")[0]: name for name in NAMES} | {"backward": "main"}
    return tuple(
        Kernel(names[kernel.name.partition("-")[0]], kernel.ptx, _with_arrays(launch, arrays))
        for kernel, launch in described
    )


def main_case(plan: Plan, shape: Shape, seed: int = 0, arch: str = "sm100") -> Kernel:
    """The main kernel alone, on what the preprocess kernel has left."""
    return main_of(backward_case(plan, shape, seed, arch))


def main_of(kernels: tuple[Kernel, ...]) -> Kernel:
    """The main kernel of a backward pass, on what the preprocess kernel has left."""
    preprocess, main, *_ = kernels
    emulator.launch(preprocess.ptx, preprocess.launch, emulator.Options(backend="numpy"))
    return main


def _with_arrays(launch: Launch, arrays: dict[int, np.ndarray]) -> Launch:
    """The launch with a NumPy array in place of every tensor; equal tensors become the same array."""

    def converted(value: Any) -> Any:
        if not isinstance(value, (Tensor, Pointer, TensorMap)):
            return value
        tensor = value.array
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        return dataclasses.replace(value, array=arrays.setdefault(tensor.data_ptr(), bits.numpy()))

    return dataclasses.replace(launch, params=tuple(map(converted, launch.params)))
