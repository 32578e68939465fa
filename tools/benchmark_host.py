"""What a backward call costs the host, in microseconds; the target is 25.

    python tools/benchmark_host.py            prints a table
    python tools/benchmark_host.py --json     prints one JSON object

On a GPU that our kernels run on: the whole call, measured while the device keeps up. Elsewhere everything but the
launches: the compiled function has the real signature, takes CPU tensors, checks them likewise, and launches nothing.
Each number is the least of several rounds' means, because other work on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor

import undertow
from undertow.attention import prepared
from undertow.attention.dispatch import BACKENDS, ORDER
from undertow.attention.forward import MAKERS
from undertow.integrations import sdpa
from undertow.integrations.flash_operators import SDPA_BACKWARD, Options
from undertow.integrations.operators import Call, Overrides
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
    """The parts of a call of the runtime and their sum, and what a user calls."""
    tensors = small_call("cpu")
    variant = call.variant_of("split", tensors, SETTINGS)
    numbers = call.numbers_of(variant, tensors, SETTINGS, 1)
    loaded = Loaded(stub_of(variant), {None})  # type: ignore[arg-type]  # the index of the CPU
    plan = device.LaunchPlan(call, variant, loaded, call.workspace_floats(variant, tensors), numbers)
    plans = {device.signature("sm100", tensors, SETTINGS, "split"): plan}
    workspace = torch.empty(plan.floats)
    arguments = call.arguments(tensors, workspace, numbers)

    def whole() -> None:
        device.launch(plans[device.signature("sm100", tensors, SETTINGS, "split")], tensors)

    parts = {
        "find the plan": microseconds(lambda: plans[device.signature("sm100", tensors, SETTINGS, "split")]),
        "allocate the workspace": microseconds(lambda: tensors.q.new_empty(plan.floats, dtype=torch.float32)),
        "check and convert the arguments": microseconds(lambda: plan.loaded.function(*arguments)),
        "whole call": microseconds(whole),
    }
    with as_if_on_a_gpu(plan):
        return parts | of_a_user(tensors, "CPU")


@contextlib.contextmanager
def as_if_on_a_gpu(plan: device.LaunchPlan) -> Iterator[None]:
    """Let calls on CPU tensors be computed by `plan`, which is theirs."""
    sm100 = BACKENDS["sm100"]._replace(unable=lambda problem: None)
    with (
        mock.patch.object(device, "_planned", lambda *given: plan),
        mock.patch.object(torch.cuda, "current_device", lambda: None),
        mock.patch.object(prepared, "DEVICES", ("cpu",)),
        mock.patch.dict(ORDER, {"cpu": ("sm100",)}),
        mock.patch.dict(BACKENDS, {"sm100": sm100}),
    ):
        yield
    prepared.forget()


def on_gpu(arch: str) -> dict[str, float]:
    """The call of the runtime, and what a user calls, which also chooses who computes and makes the results."""
    t = small_call("cuda")
    whole = microseconds(lambda: device.backward(arch, t, SETTINGS), torch.cuda.synchronize)
    with mock.patch.dict(MAKERS):
        MAKERS.pop("flash-attn-4")  # the forward pass is not measured, and torch's need not be compiled
        return {"whole call": whole} | of_a_user(t, "CUDA", torch.cuda.synchronize)


def of_a_user(t: BackwardTensors, dispatch_key: str, settle: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """What a user calls, and beside it what torch alone takes for a function and an operator that compute nothing."""
    given = (t.dout, t.q, t.k, t.v, t.out, t.lse)
    leaves = [x.clone().requires_grad_() for x in (t.q, t.k, t.v)]
    graphs = undertow.flash_attn_func(*leaves, causal=True), Nothing.apply(*leaves, t.out, t.lse)
    heads_first, random = [x.transpose(1, 2) for x in given[:5]], torch.zeros(2, dtype=torch.uint64, device=t.q.device)
    arguments = (*heads_first, t.lse, None, None, 128, 128, 0.0, True, random, random)

    def differentiate(out: Any) -> None:
        torch.autograd.grad(out, leaves, t.dout, retain_graph=True)

    def operator() -> None:
        torch.ops.aten._scaled_dot_product_flash_attention_backward(*arguments)

    def empty(called: Call) -> Any:
        return called["query"], called["key"], called["value"]

    found = {
        "undertow.attention_backward": microseconds(lambda: undertow.attention_backward(*given, causal=True), settle),
        "backward of flash_attn_func": microseconds(lambda: differentiate(graphs[0]), settle),
        "  of an empty autograd.Function": microseconds(lambda: differentiate(graphs[1]), settle),
    }
    options = Options("torch" if dispatch_key == "CUDA" else "reference", strict=True, dispatch_key=dispatch_key)
    with sdpa.enable_with(options, prefer_flash=False):
        found["backward of SDPA, undertow.enable()"] = microseconds(operator, settle)
    overrides = Overrides(dispatch_key, {SDPA_BACKWARD: empty})
    found["  of an empty operator in Python"] = microseconds(operator, settle)
    overrides.remove()
    return found


class Nothing(torch.autograd.Function):
    """Saves as many tensors and makes as many gradients as attention."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*given)
        return torch.empty_like(given[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


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
        print("\n".join(f"  {name:36} {value:6.2f}" for name, value in parts.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
