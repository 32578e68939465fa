"""What a backward call costs the host, in microseconds; the target is 25.

    python tools/benchmark_host.py            prints a table
    python tools/benchmark_host.py --json     prints one JSON object

On a GPU that our kernels run on: the whole call, measured while the device keeps up. Elsewhere everything but the
launches: the compiled function has the real signature, takes CPU tensors, checks them likewise, and launches nothing.
Each number is the least of several rounds' means, because other work on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor

import undertow
from undertow.kernels.compile import FUNCTION, OBJECT
from undertow.kernels.sm100 import call, entry
from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.tensors import BackwardTensors
from undertow.kernels.sm100.work import Scalars
from undertow.runtime import device
from undertow.runtime.architectures import ARCHITECTURES
from undertow.runtime.objects import Loaded, load_object

TARGET_MICROSECONDS = 25.0
ROUNDS, CALLS = 400, 50  # short rounds: some of them are not interrupted
SETTINGS = Settings(causal=True)


def on_cpu(argument: Any) -> Any:
    """The same arguments of a compilation as tensors in CPU memory."""
    if isinstance(argument, cute.Tensor):
        return make_fake_tensor(
            argument.element_type,
            argument.shape,
            stride=argument.stride,
            memspace=cutlass.AddressSpace.generic,
            assumed_align=argument._assumed_align,
        )
    if is_dataclass(argument):
        return type(argument)(*(on_cpu(getattr(argument, field.name)) for field in fields(argument)))
    return argument


@cute.jit
def without_launches(workspace: cute.Tensor, reads: entry.Reads, writes: entry.Writes, scalars: Scalars):
    """Takes what the compiled call takes, checks it likewise, does nothing."""


def stub_of(variant: call.Variant) -> Callable[..., None]:
    """A function with the signature of the compiled call of `variant`, for CPU tensors, which launches nothing."""
    _, (_, *arguments, _) = entry.build(variant)
    compiled = cute.compile(without_launches, *map(on_cpu, arguments), options="--enable-tvm-ffi")
    with tempfile.TemporaryDirectory() as folder:  # loaded from a file, as the real ones are
        compiled.export_to_c(object_file_path=f"{folder}/{OBJECT}", function_name=FUNCTION)
        return load_object(Path(folder) / OBJECT)


def microseconds(work: Callable[[], Any], settle: Callable[[], Any] = lambda: None) -> float:
    """The least mean of ROUNDS x CALLS calls. settle: what to wait for between two rounds."""
    means = []
    for _ in range(ROUNDS):
        work()
        settle()
        begin = time.perf_counter()
        for _ in range(CALLS):
            work()
        means.append((time.perf_counter() - begin) / CALLS)
        settle()
    return min(means) * 1e6


def small_call(where: str) -> BackwardTensors:
    """One tile a head: the device is done before the host is."""
    rows = [torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16, device=where) for _ in range(8)]
    q, k, v, out, dout, dq, dk, dv = rows
    lse = torch.zeros(1, 4, 128, device=where)
    return BackwardTensors(q, k, v, out, dout, lse, dq, dk, dv)


def without_gpu() -> dict[str, float]:
    """The parts of a call, and their sum."""
    tensors = small_call("cpu")
    variant = call.variant_of("split", tensors, SETTINGS)
    numbers = call.numbers_of(variant, tensors, SETTINGS, 1)
    plan = device.LaunchPlan(call, variant, Loaded(stub_of(variant)), call.workspace_floats(variant, tensors), numbers)
    plans = {device.signature("sm100", tensors, SETTINGS, "split"): plan}
    workspace = torch.empty(plan.floats)
    arguments = call.arguments(tensors, workspace, numbers)

    def whole() -> None:
        device.launch(plans[device.signature("sm100", tensors, SETTINGS, "split")], tensors)

    return {
        "find the plan": microseconds(lambda: plans[device.signature("sm100", tensors, SETTINGS, "split")]),
        "allocate the workspace": microseconds(lambda: torch.empty(plan.floats, dtype=torch.float32, device="cpu")),
        "check and convert the arguments": microseconds(lambda: plan.loaded.function(*arguments)),
        "whole call": microseconds(whole),
    }


def on_gpu(arch: str) -> dict[str, float]:
    """The whole call, and what a user calls, which also chooses who computes and makes the results."""
    t = small_call("cuda")
    given = (t.dout, t.q, t.k, t.v, t.out, t.lse)
    return {
        "whole call": microseconds(lambda: device.backward(arch, t, SETTINGS), torch.cuda.synchronize),
        "undertow.attention_backward": microseconds(
            lambda: undertow.attention_backward(*given, causal=True), torch.cuda.synchronize
        ),
    }


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(words)
    arch = None
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        arch = next((row.name for row in ARCHITECTURES.values() if row.capability == capability), None)
    parts = without_gpu() if arch is None else on_gpu(arch)
    what = (
        "measured without a GPU and without launches" if arch is None else f"measured on {torch.cuda.get_device_name()}"
    )
    if arguments.json:
        print(json.dumps({"what": what, "microseconds": parts, "target": TARGET_MICROSECONDS}))
    else:
        print(f"Host time of a backward call, us, {what} (target {TARGET_MICROSECONDS:g}):")
        print("\n".join(f"  {name:32} {value:6.2f}" for name, value in parts.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
