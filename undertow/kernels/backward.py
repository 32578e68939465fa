"""The backward pass of any architecture that has kernels: what they are called, compiled for a call, and launched."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from undertow.kernels.compile import CompiledKernel
from undertow.kernels.sm90 import launch as sm90
from undertow.kernels.sm90.launch import SCHEDULES as SM90_SCHEDULES
from undertow.kernels.sm100 import launch as sm100
from undertow.kernels.sm100.launch import DEFAULT, CompiledBackward, Settings
from undertow.kernels.sm100.plan import SCHEDULES as SM100_SCHEDULES
from undertow.kernels.sm100.tensors import BackwardTensors, LaunchInputError
from undertow.plan.attention import DENSE, PLAIN, Attention, RowVariant
from undertow.plan.description import Launch
from undertow.plan.schema import DType, Plan

SCHEDULES = {"sm100": SM100_SCHEDULES, "sm90": SM90_SCHEDULES}  # by architecture, the fastest last
_LAUNCHES: dict[str, ModuleType] = {"sm100": sm100, "sm90": sm90}


def schedules_of(arch: str, asked: list[str] | None = None) -> list[str]:
    """The schedules asked for, or all of an architecture.

    Raises: LaunchInputError for one that is not there.
    """
    for schedule in asked or ():
        if schedule not in SCHEDULES[arch]:
            raise LaunchInputError(f"schedule {schedule!r} is unknown on {arch}; allowed: {', '.join(SCHEDULES[arch])}")
    return list(asked or SCHEDULES[arch])


def plan_named(arch: str, schedule: str, dtype: DType = DType.BF16, attention: Attention = DENSE) -> Plan:
    """The plan of a schedule of an architecture.

    Raises: PlanError, LaunchInputError for what it does not have.
    """
    return _LAUNCHES[arch].planned(schedule, dtype, attention)


def compile_for(arch: str, schedule: str, tensors: BackwardTensors, settings: Settings = DEFAULT) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels of a schedule for what a call asks.

    Raises: PlanError, LaunchInputError for what has no kernels; CompileError.
    """
    return _LAUNCHES[arch].compile_for(schedule, tensors, settings)


def compile_backward(arch: str, plan: Plan, rows: RowVariant = PLAIN) -> CompiledBackward:
    """Compile (or fetch from the disk cache) the kernels of a plan.

    Raises: CompileError.
    """
    return _LAUNCHES[arch].compile_backward(plan, rows)


def allocate_workspaces(arch: str, tensors: BackwardTensors, deterministic: bool = False) -> Any:
    """The buffers between the kernels of an architecture for a call, for `launches`; they have a `dq_accumulator`."""
    return _LAUNCHES[arch].allocate_workspaces(tensors, deterministic)


def launches(
    compiled: CompiledBackward, tensors: BackwardTensors, settings: Settings = DEFAULT, workspaces: Any = None
) -> list[tuple[CompiledKernel, Launch]]:
    """Describe the launches of compiled kernels on given tensors, in order.

    Raises: LaunchInputError before anything is launched, when a kernel could not take a tensor or a number as it is.
    """
    return _LAUNCHES[compiled.arch].launches(compiled, tensors, settings, workspaces)
