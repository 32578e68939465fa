"""The backward pass on a GPU: what the kernels cannot take is said first, then one call launches them all.

A call signature (shapes, what is present, settings, device) is planned once: checks, run-time numbers, workspace. A
plan holds plain numbers and the compiled call of its variant, so that new sizes are planned anew and compile nothing,
unless they are the first that the kernels for sm90 split groups of query heads for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.kernels.compile import refuse_bad_toolchain
from undertow.kernels.sm100.launch import DEFAULT, Settings
from undertow.kernels.sm100.tensors import BackwardTensors, LaunchInputError, Sequences
from undertow.runtime import objects
from undertow.runtime.architectures import Architecture, Call, architecture

MOST_PLANS = 4096  # call signatures that are remembered; the oldest is forgotten
LSE = 5  # its place in what the compiled call reads
_plans: dict[Hashable, LaunchPlan] = {}
_lock = threading.Lock()


class ColdCaptureError(RuntimeError):
    """A CUDA graph is being captured, and the kernels of this call have not run on the device before."""


@dataclass(frozen=True)
class Device:
    """What counts about one GPU. index: as torch numbers it."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int


@dataclass(frozen=True)
class LaunchPlan:
    """How calls of one signature are launched. floats: of the workspace. numbers: as the compiled call takes them."""

    call: Call
    variant: Any
    loaded: objects.Loaded
    floats: int
    numbers: tuple

    def launch_again(self, index: int, reads: tuple, writes: tuple) -> None:
        """Launch on device `index`, where these kernels have run before, on its current stream.

        reads, writes: as `call.arguments` nests them, of the signature of this plan.
        Raises: ValueError, TypeError if the compiled call refuses them; nothing is launched then.
        """
        workspace = reads[LSE].new_empty(self.floats)  # which is float32 there, or else refused
        if torch.cuda.current_device() == index:
            self.loaded.function(workspace, reads, writes, self.numbers)
        else:
            with torch.cuda.device(index):
                self.loaded.function(workspace, reads, writes, self.numbers)


def unsupported(arch: str, tensors: BackwardTensors, settings: Settings = DEFAULT) -> str | None:
    """Why the kernels for `arch` do not compute a call on the device that holds q, or None if they do.

    Tensors, device and the compiler are looked at, and what it made in this process; nothing is compiled or launched.
    """
    try:
        row = architecture(arch)
        variant = _checked(row, tensors, settings, None)
        refuse_bad_toolchain()
    except ValueError as error:
        return str(error)
    return objects.refusal(row, variant)


def backward(arch: str, tensors: BackwardTensors, settings: Settings = DEFAULT, schedule: str | None = None) -> None:
    """Write dq, dk, dv (and dsink) on the current stream of the device of q; the host does not wait.

    Shapes, dtypes: `BackwardTensors`. schedule: the fastest if None. Workspace: up to 37 KB per tile of 128 query rows
    and head, and where sm90 splits groups 64 KB per tile of 128 keys and part, from torch's allocator.
    Error: that of one rounding of P, dS and the results to 16 bits, and of float32 sums.

    Raises: ArchitectureError; LaunchInputError naming the tensor; CompileError, of which MachineCodeError says that
    what the compiler makes is not used; ColdCaptureError while a CUDA graph is captured, if these kernels have not run
    on the device before (`warm_up`).
    """
    plan = plan_of(arch, tensors, settings, schedule)
    index = tensors.q.device.index
    if torch.cuda.current_device() == index:
        _launch_on(index, plan, tensors)
    else:
        with torch.cuda.device(index):
            _launch_on(index, plan, tensors)


def plan_of(
    arch: str, tensors: BackwardTensors, settings: Settings = DEFAULT, schedule: str | None = None
) -> LaunchPlan:
    """How a call is launched; planned, and its kernels loaded, if none of its signature was.

    Raises: as `backward`.
    """
    key = signature(arch, tensors, settings, schedule)
    plan = _plans.get(key)
    if plan is None:
        plan = _planned(architecture(arch), tensors, settings, schedule)
        with _lock:
            while len(_plans) >= MOST_PLANS:
                del _plans[next(iter(_plans))]
            _plans[key] = plan
    return plan


def warm_up(arch: str, like: BackwardTensors, settings: Settings = DEFAULT, schedule: str | None = None) -> None:
    """Compile, load and run once the kernels of a call like this one, on small tensors of its own; then wait for them.

    Afterwards calls of any size that want the same variant can be captured in a CUDA graph on that device.

    Raises: as `backward`.
    """
    if like.q.device.type != "cuda":
        raise LaunchInputError(f"q is on {like.q.device}: must be on a CUDA device")
    row, tensors = architecture(arch), small(like)
    with torch.cuda.device(like.q.device.index):
        _checked(row, tensors, settings, schedule)
        variant = row.call.variant_of(schedule, like, settings)  # sizes may choose it: small ones might another
        _launch_on(like.q.device.index, _plan_for(row, variant, tensors, settings), tensors)
        torch.cuda.synchronize()


def signature(arch: str, tensors: BackwardTensors, settings: Settings, schedule: str | None) -> Hashable:
    """Everything that a plan depends on, as plain values.

    What the compiled call checks itself, whenever it is called, is not here: dtypes, devices, alignment, strides of
    what is read, and that extents agree. Strides of results are, because one of 0 lets CTAs write over each other.
    """
    t = tensors
    packing = t.sequences
    return (
        arch,
        schedule,
        settings,
        t.q.shape,
        t.k.shape,
        t.q.dtype,
        t.q.device,
        t.dq.stride(),
        t.dk.stride(),
        t.dv.stride(),
        t.dlse is not None,
        t.sink is not None,
        None if packing is None else packing.cu_seqlens_q.shape[0],
    )


def launch(plan: LaunchPlan, tensors: BackwardTensors) -> None:
    """Launch a plan on tensors of its signature, on the current stream of their device.

    Raises: LaunchInputError if the compiled call refuses them.
    """
    workspace = tensors.q.new_empty(plan.floats, dtype=torch.float32)
    try:
        plan.loaded.function(*plan.call.arguments(tensors, workspace, plan.numbers))
    except (ValueError, TypeError) as error:
        plan.call.check_call(plan.variant, tensors)  # says the same in our terms
        raise LaunchInputError(str(error)) from error


@functools.lru_cache
def properties(index: int) -> Device:
    """The properties of one device; those of another one in the same machine may differ."""
    found = torch.cuda.get_device_properties(index)
    return Device(index, found.name, (found.major, found.minor), found.multi_processor_count)


def small(like: BackwardTensors) -> BackwardTensors:
    """Tensors of one query row and one key for the kernels of `like`; results that do not matter."""
    packed = like.sequences is not None
    query, key = ((1, 1, 64), (1, 1, 64)) if packed else ((1, 1, 1, 64), (1, 1, 1, 64))

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=like.q.device)

    q, k, v, out, dout, dq, dk, dv = (
        zeros(*shape, dtype=like.q.dtype) for shape in (query, key, key, query, query, query, key, key)
    )
    offsets = torch.arange(2, dtype=torch.int32, device=like.q.device)
    lse = zeros(*query[:-1])
    return replace(
        BackwardTensors(q, k, v, out, dout, lse, dq, dk, dv),
        dlse=None if like.dlse is None else torch.zeros_like(lse),
        sink=None if like.sink is None else zeros(1),
        dsink=None if like.sink is None else zeros(1),
        sequences=Sequences(offsets, offsets) if packed else None,
    )


def _checked(arch: Architecture, tensors: BackwardTensors, settings: Settings, schedule: str | None) -> Any:
    """The variant of a call that the device of q can run.

    Raises: LaunchInputError.
    """
    where = tensors.q.device
    if where.type != "cuda":
        raise LaunchInputError(f"q is on {where}: the {arch.name} kernels need a CUDA device")
    device = properties(where.index)
    if device.capability != arch.capability:
        has, needs = (".".join(map(str, version)) for version in (device.capability, arch.capability))
        raise LaunchInputError(
            f"q is on {where}, {device.name}, of compute capability {has}: the {arch.name} kernels need {needs}"
        )
    variant = arch.call.variant_of(schedule, tensors, settings)
    arch.call.check_call(variant, tensors)
    return variant


def _planned(arch: Architecture, tensors: BackwardTensors, settings: Settings, schedule: str | None) -> LaunchPlan:
    return _plan_for(arch, _checked(arch, tensors, settings, schedule), tensors, settings)


def _plan_for(arch: Architecture, variant: Any, tensors: BackwardTensors, settings: Settings) -> LaunchPlan:
    if not objects.is_loaded(arch, variant):
        _refuse_capture(variant)
    loaded, call = objects.load(arch, variant), arch.call
    numbers = call.numbers_of(variant, tensors, settings, properties(tensors.q.device.index).multiprocessors)
    return LaunchPlan(call, variant, loaded, call.workspace_floats(variant, tensors), numbers)


def _launch_on(index: int, plan: LaunchPlan, tensors: BackwardTensors) -> None:
    if index in plan.loaded.launched_on:
        launch(plan, tensors)
        return
    _refuse_capture(plan.variant)  # the first launch on a device loads the kernels, which no graph can hold
    launch(plan, tensors)
    plan.loaded.launched_on.add(index)


def _refuse_capture(variant: Any) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ColdCaptureError(
            f"the kernels of {variant.name} have not run on this device, and a CUDA graph is being captured: "
            "make the same call, or undertow.runtime.device.warm_up, once before the capture"
        )
