"""The three launches of one backward pass as a case: NumPy arrays and PTX, nothing of torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from undertow import emulator
from undertow.cases import Kernel
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm100.launch import BackwardTensors, compile_backward, launches
from undertow.plan.description import Launch, Pointer, Tensor, TensorMap
from undertow.plan.schema import Plan

NAMES = ("preprocess", "main", "postprocess")


def backward_case(plan: Plan, shape: Shape, seed: int = 0) -> tuple[Kernel, ...]:
    """The launches of NAMES on a random batch; results hold NaN, so that an element never written shows.

    Raises: InputError, LaunchInputError for a shape that cannot be run; CompileError.
    """
    batch: Batch = random_batch(shape, seed)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (batch.q, batch.k, batch.v))
    tensors = BackwardTensors(batch.q, batch.k, batch.v, batch.out, batch.dout, batch.lse, dq, dk, dv)
    arrays: dict[int, np.ndarray] = {}
    return tuple(
        Kernel(name, kernel.ptx, _with_arrays(launch, arrays))
        for name, (kernel, launch) in zip(NAMES, launches(compile_backward(plan), tensors))
    )


def main_case(plan: Plan, shape: Shape, seed: int = 0) -> Kernel:
    """The main kernel alone, on what the preprocess kernel has left."""
    preprocess, main, _ = backward_case(plan, shape, seed)
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
