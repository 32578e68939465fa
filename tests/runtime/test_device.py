"""Launching on a GPU, as far as it goes without one: fake tensors on fake devices, and a call that only remembers.

Public cases C02, C08, K01, K02, K04 and the refusal of a cold start during capture (C05).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.runtime.calls import settings_for, tensors_for
from undertow.kernels import compile as compiling
from undertow.kernels.sm100.launch import LaunchInputError, Settings
from undertow.runtime import device, objects
from undertow.runtime.architectures import ArchitectureError

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
B200, H200 = ("B200", (10, 0), 148), ("H200", (9, 0), 132)


class Machine:
    """Devices 0 and 1 as torch would tell of them, and everything that was loaded and launched."""

    def __init__(self, *devices: tuple[str, tuple[int, int], int]):
        self.devices = [device.Device(index, *facts) for index, facts in enumerate(devices)]
        self.current, self.capturing = 0, False
        self.loaded: list[Any] = []
        self.launches: list[tuple[int, tuple]] = []

    def load(self, architecture, variant) -> objects.Loaded:
        if not any(variant == known for known, _ in self.loaded):
            self.loaded.append((variant, objects.Loaded(self.remember)))
        return next(loaded for known, loaded in self.loaded if known == variant)

    def remember(self, *arguments: Any) -> None:
        self.launches.append((self.current, arguments))

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before


@pytest.fixture
def machine(monkeypatch) -> Iterator[Machine]:
    found = Machine(H200, B200)
    monkeypatch.setattr(device, "_plans", {})
    monkeypatch.setattr(device, "properties", lambda index: found.devices[index])
    monkeypatch.setattr(objects, "load", found.load)
    monkeypatch.setattr(objects, "is_loaded", lambda _, variant: any(variant == known for known, _ in found.loaded))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "device", found.on)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with FakeTensorMode():
        yield found


def fakes(name: str = "dense", rows: tuple[int, int] = (300, 200), where: str = "cuda:1"):
    return tensors_for(name, rows, device=where)


def test_tensors_on_the_cpu_are_refused_by_name():
    tensors = tensors_for("dense")
    assert device.unsupported("sm100", tensors) == "q is on cpu: the sm100 kernels need a CUDA device"
    with pytest.raises(LaunchInputError, match="q is on cpu"):
        device.backward("sm100", tensors)
    with pytest.raises(LaunchInputError, match="q is on cpu"):
        device.warm_up("sm100", tensors)


def test_an_unknown_architecture_is_refused_by_name():
    assert "there are kernels for sm100 (sm_100a), sm90 (sm_90a)" in (
        device.unsupported("sm80", tensors_for("dense")) or ""
    )
    with pytest.raises(ArchitectureError, match="arch='sm80'"):
        device.backward("sm80", tensors_for("dense"))


def test_the_device_of_the_tensors_decides_not_the_first_one(machine):
    """Public case C08: device 0 is another GPU."""
    assert device.unsupported("sm100", fakes(where="cuda:1")) is None
    reason = device.unsupported("sm100", fakes(where="cuda:0"))
    assert reason == "q is on cuda:0, H200, of compute capability 9.0: the sm100 kernels need 10.0"
    machine.devices.reverse()
    assert device.unsupported("sm100", fakes(where="cuda:0")) is None


def test_a_compiler_that_is_known_to_be_bad_leaves_the_call_to_others(machine, monkeypatch):
    """Public case K07: told before anything hangs, so that a dispatcher can fall back."""
    monkeypatch.setattr(compiling, "toolchain_version", lambda package: "4.6.1")
    assert "nvidia-cutlass-dsl 4.6.1 is installed" in (device.unsupported("sm100", fakes()) or "")


def test_the_launch_happens_on_the_device_of_the_tensors(machine):
    """Public case C02: the current device is 0."""
    device.backward("sm100", fakes(where="cuda:1"))
    assert [where for where, _ in machine.launches] == [1] and machine.current == 0
    workspace, reads, writes, _ = machine.launches[0][1]
    assert {x.device.index for x in (workspace, *reads, *writes) if x is not None} == {1}


def test_what_the_kernels_cannot_take_is_refused_before_anything_is_loaded(machine):
    for wrong, said in (
        (dataclasses.replace(fakes(), k=fakes().k.narrow(2, 0, 0)), "kv_heads=0"),
        (fakes(rows=(0, 200)), r"q has shape \(2, 0, 4, 64\): must have a row"),
        (dataclasses.replace(fakes(), dk=fakes().k.narrow(2, 0, 1).expand(2, 200, 2, 64)), "dk has stride 0"),
        (tensors_for("dense", dtype=torch.float32, device="cuda:1"), "q has dtype torch.float32"),
    ):
        with pytest.raises(LaunchInputError, match=said):
            device.backward("sm100", wrong)
    assert machine.loaded == [] and machine.launches == []


def test_new_sizes_and_scales_compile_nothing(machine):
    """Public cases K01, K04: 20 calls of any length, and one variant."""
    for step in range(20):
        tensors = fakes("causal", rows=(64 + 8 * step, 128 + 8 * step))
        device.backward("sm100", tensors, Settings(softmax_scale=0.1 + step, causal=True))
    assert len(machine.loaded) == 1 and len(machine.launches) == 20
    scales = [arguments[3][5] for _, arguments in machine.launches]
    assert scales == [0.1 + step for step in range(20)]
    assert [arguments[3][0] for _, arguments in machine.launches] == [64 + 8 * step for step in range(20)]


def test_packed_sequences_of_any_number_compile_nothing(machine):
    for rows in ((40, 40), (50, 60), (300, 10)):
        device.backward("sm100", fakes("dense-packed", rows=rows))
    assert len(machine.loaded) == 1


def test_what_a_kernel_is_compiled_for_is_loaded_once_each(machine):
    for name in ("dense", "causal", "window-softcap", "dense", "causal-packed", "causal-sink-dlse", "causal"):
        device.backward("sm100", fakes(name), settings_for(name))
    assert len(machine.loaded) == 5 and len(machine.launches) == 7


def test_a_plan_is_made_once_a_signature(machine, monkeypatch):
    checks = []
    architecture = device.architecture("sm100")
    check = architecture.call.check_call
    monkeypatch.setattr(architecture.call, "check_call", lambda *given: (checks.append(given), check(*given)))
    for _ in range(3):
        device.backward("sm100", fakes())
    device.backward("sm100", fakes(rows=(301, 200)))
    assert len(checks) == 2


def test_a_batch_of_one_with_stride_0_is_followed_by_two(machine):
    """Public case K02, in both orders: the same compiled call, and each its own tensors."""
    two = fakes()
    one = dataclasses.replace(
        two,
        **{
            name: getattr(two, name).narrow(0, 0, 1) for name in ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
        },
    )
    one = dataclasses.replace(one, q=one.q.as_strided((1, 300, 4, 64), (0, 256, 64, 1)))
    for tensors in (one, two, one):
        device.backward("sm100", tensors)
    assert len(machine.loaded) == 1
    assert [arguments[1][0].shape[0] for _, arguments in machine.launches] == [1, 2, 1]


def test_old_plans_are_forgotten(machine, monkeypatch):
    monkeypatch.setattr(device, "MOST_PLANS", 3)
    for rows in range(1, 9):
        device.backward("sm100", fakes(rows=(rows, 200)))
    assert len(device._plans) == 3


def test_a_cold_start_during_capture_is_refused_and_a_warm_one_is_not(machine):
    machine.capturing = True
    with pytest.raises(device.ColdCaptureError, match=r"kernels of split-bf16-causal have not run.*warm_up"):
        device.backward("sm100", fakes("causal"), settings_for("causal"))
    assert machine.loaded == []
    machine.capturing = False
    device.warm_up("sm100", fakes("causal"), settings_for("causal"))
    assert [arguments[1][0].shape for _, arguments in machine.launches] == [(1, 1, 1, 64)]
    machine.capturing = True
    device.backward("sm100", fakes("causal", rows=(4096, 4096)), settings_for("causal"))
    assert len(machine.loaded) == 1 and len(machine.launches) == 2


def test_warm_on_one_device_is_cold_on_another(machine):
    machine.devices[0] = dataclasses.replace(machine.devices[1], index=0)
    device.warm_up("sm100", fakes(where="cuda:1"))
    machine.capturing = True
    with pytest.raises(device.ColdCaptureError):
        device.backward("sm100", fakes(where="cuda:0"))
    device.backward("sm100", fakes(where="cuda:1"))


@pytest.mark.parametrize("name", ["dense", "causal-packed", "window-softcap-dlse-sink", "left-deterministic"])
def test_warming_up_uses_small_tensors_of_the_same_variant(machine, name):
    device.warm_up("sm100", fakes(name), settings_for(name))
    device.backward("sm100", fakes(name), settings_for(name))
    assert len(machine.loaded) == 1


def test_a_refusal_of_the_compiled_call_is_told_even_if_we_see_no_fault(machine, monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise ValueError("Mismatched Tensor on argument #1")

    monkeypatch.setattr(machine, "remember", refuse)
    with pytest.raises(LaunchInputError, match="Mismatched Tensor"):
        device.backward("sm100", fakes())
