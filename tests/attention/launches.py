"""Our kernels on a machine without a GPU, as far as the host goes: calls on the CPU that launch nothing.

The compiled calls can be real ones for CPU tensors, which check everything that the others do.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import undertow
from tests.attention.places import inputs
from tests.kernels.packings import offsets
from tools.benchmark_host import stub_of
from undertow.attention import backends, counts, dispatch, prepared
from undertow.kernels.sm100 import call as sm100
from undertow.runtime import device, objects

real_stub = functools.cache(stub_of)


class Launches:
    """What reached a compiled call: as it was given, and told so that two calls can be compared."""

    def __init__(self) -> None:
        self.given: list[tuple] = []
        self.long_way = 0
        self.compiled: set[str] = set()  # variants whose compiled call is real; others take everything

    def load(self, architecture: Any, variant: sm100.Variant) -> objects.Loaded:
        def launch(*arguments: Any) -> None:
            if variant.name in self.compiled:
                real_stub(variant)(*arguments)
            self.given.append((variant.name, *arguments))

        return objects.Loaded(launch)

    def told(self, call: dict[str, Any]) -> list[Any]:
        """Numbers as they are; of tensors name, strides, extents and type. Those without a name were made for it."""
        names = {
            x.data_ptr(): name for name, x in call.items() if type(x) in prepared.PLAIN and x.layout == torch.strided
        }

        def place(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(place, x))
            return (names.get(x.data_ptr()), *made(x)) if isinstance(x, Tensor) else x

        def made(x: Any) -> Any:
            return None if x is None else (x.shape, x.stride(), x.dtype)

        return [
            (name, made(workspace), place(reads), tuple(map(made, writes)), numbers)
            for name, workspace, reads, writes, numbers in self.given
        ]


def able(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The kernels for sm100 are taken for able to compute tensors on the CPU."""
    found = Launches()

    def checked(arch: Any, tensors: Any, settings: Any, schedule: str | None) -> Any:
        variant = arch.call.variant_of(schedule, tensors, settings)
        arch.call.check_call(variant, tensors)
        return variant

    def compute(*given: Any) -> Any:
        found.long_way += 1
        return on_the_long_way(*given)

    on_the_long_way = dispatch.compute
    monkeypatch.setattr(dispatch, "compute", compute)
    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(prepared, "_prepared", {})
    monkeypatch.setattr(prepared, "DEVICES", ("cpu",))
    monkeypatch.setitem(dispatch.ORDER, "cpu", ("sm100", "reference"))
    takes_them = dispatch.BACKENDS["sm100"]._replace(unable=backends.outside_kernels)
    monkeypatch.setitem(dispatch.BACKENDS, "sm100", takes_them)
    monkeypatch.setattr(device, "_plans", {})
    monkeypatch.setattr(device, "_checked", checked)
    monkeypatch.setattr(device, "properties", lambda index: device.Device(index, "B200", (10, 0), 148))
    monkeypatch.setattr(objects, "load", found.load)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return found


def dense(**changes: Any) -> dict[str, Any]:
    """A call with every number of its own, so that none can be mistaken for another."""
    q, k, v, dout = inputs((40, 24), (4, 2), 2)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": dout.clone(), "lse": torch.zeros(2, 4, 40), "causal": True}
    return {**given, "softmax_scale": 1.0, **changes}


def packed(**changes: Any) -> dict[str, Any]:
    q, k, v, dout = inputs((40, 24), (4, 2), None)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": dout.clone(), "lse": torch.zeros(4, 40)}
    more = {"cu_seqlens_q": offsets(0, 10, 40), "cu_seqlens_k": offsets(0, 20, 24)}
    return {**given, **more, "dlse": torch.zeros(4, 40), "learnable_sink": torch.zeros(4), **changes}


def outcome(call: dict[str, Any], launches: Launches) -> Any:
    """What comes of a call: what was launched and returned and for whom it counts, or what is said."""
    launches.given.clear()
    before = counts()
    try:
        gradients = undertow.attention_backward(**call)
    except Exception as error:
        return type(error), str(error)
    who = {name: number - before.get(name, 0) for name, number in counts().items()}
    kinds = [(type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in gradients]
    return kinds, {name: number for name, number in who.items() if number}, launches.told(call)
