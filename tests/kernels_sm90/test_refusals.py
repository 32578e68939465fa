"""What the SM90 kernels do not have is refused by name, before anything is compiled or launched."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.calls import EVERYTHING, settings_for, tensors_for
from tests.runtime.test_device import machine  # noqa: F401  # a fixture
from undertow.commands.precompile import HOT
from undertow.inputs import Shape, random_batch
from undertow.kernels.backward import compile_for, launches, schedules_of
from undertow.kernels.sm90 import call
from undertow.kernels.sm90.tensors import LEAST_SCALE
from undertow.kernels.sm100.launch import LaunchInputError, Settings
from undertow.plan.schema import DType
from undertow.runtime import device

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def test_schedules_are_those_of_the_architecture():
    assert schedules_of("sm90") == ["pingpong"]
    for arch, schedule in (("sm90", "split"), ("sm100", "pingpong")):
        with pytest.raises(LaunchInputError, match=f"schedule '{schedule}' is unknown on {arch}; allowed: "):
            schedules_of(arch, [schedule])
    with pytest.raises(LaunchInputError, match="schedule 'split' is unknown on sm_90a"):
        call.variant_of("split", tensors_for("dense"), Settings())


@pytest.mark.parametrize(
    ("dtype", "of"), [(torch.bfloat16, DType.BF16), (torch.float16, DType.F16)], ids=["bf16", "f16"]
)
def test_a_scale_that_lse_cannot_be_divided_by_is_refused(dtype, of):
    tensors, least = tensors_for("dense", dtype=dtype), LEAST_SCALE[of]
    compiled = compile_for("sm90", "pingpong", tensors)
    for scale in (0.0, least / 2, -least / 2):
        with pytest.raises(LaunchInputError, match=f"softmax_scale={scale}: must be at least {least:g} in size"):
            launches(compiled, tensors, Settings(scale))
        with pytest.raises(LaunchInputError, match="softmax_scale="):
            call.variant_of(None, tensors, Settings(scale))
    launches(compiled, tensors, Settings(-least))


@pytest.mark.parametrize("name", [*HOT.split(","), EVERYTHING, "left-packed-deterministic-dlse-sink"])
def test_the_device_takes_every_variant(machine, name):  # noqa: F811
    tensors = tensors_for(name, device="cuda:0")  # the H200
    assert device.unsupported("sm90", tensors, settings_for(name)) is None
    device.backward("sm90", tensors, settings_for(name))
    assert len(machine.launches) == 1


def test_the_device_says_what_it_does_not_take(machine):  # noqa: F811
    tensors = tensors_for("dense", device="cuda:0")
    assert "softmax_scale=0.0: must be at least" in (device.unsupported("sm90", tensors, Settings(0.0)) or "")
    elsewhere = device.unsupported("sm90", tensors_for("dense", device="cuda:1"))
    assert elsewhere == "q is on cuda:1, B200, of compute capability 10.0: the sm90 kernels need 9.0"
    assert machine.launches == []


def test_a_batch_that_is_refused_is_not_compiled(monkeypatch):
    from undertow import emulated

    monkeypatch.setattr(emulated, "launches", None)
    with pytest.raises(LaunchInputError, match="schedule 'split' is unknown on sm_90a"):
        emulated.backward(random_batch(Shape(1, 16, 16, 1)), schedule="split", arch="sm90")
