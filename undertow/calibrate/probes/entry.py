"""The host function that launches a probe, and the kernel that calls its body."""

from __future__ import annotations

import importlib
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from undertow.calibrate.probe import Probe
from undertow.calibrate.probes.context import Context

DATA_ALIGNMENT = 128


def build(probe: Probe, alone: bool) -> tuple[Any, tuple[Any, ...]]:
    """The host function and its arguments. alone: for `compile_kernel`, on the default stream."""
    probe_kernel.set_name_prefix(f"calibrate_{probe.name}", remove_cutlass_symbol=True, keep_mangled_name=False)
    out = make_fake_tensor(Int64, (cute.sym_int32(),), stride=(1,), assumed_align=8)
    data = make_fake_tensor(Float32, (cute.sym_int32(),), stride=(1,), assumed_align=DATA_ALIGNMENT)
    arguments = (Named(probe), out, data, Int32(1), Int32(1))
    return (launch, arguments) if alone else (launch_on, (*arguments, make_fake_stream(use_tvm_ffi_env_stream=True)))


class Named:
    """A probe that the compiler, which makes a symbol of what it reads, reads as its name."""

    def __init__(self, probe: Probe):
        self.probe = probe

    def __repr__(self) -> str:
        return self.probe.name


@cute.jit
def launch(named: Constexpr, out: cute.Tensor, data: cute.Tensor, count: Int32, ctas: Int32):
    """On the default stream."""
    launch_on(named, out, data, count, ctas, ())


@cute.jit
def launch_on(named: Constexpr, out: cute.Tensor, data: cute.Tensor, count: Int32, ctas: Int32, stream: Any):
    """out: 64-bit results, `slots` per CTA. data: the buffer. count: iterations, as the body means them."""
    probe = named.probe
    probe_kernel(named, out, data, count).launch(
        grid=(ctas, 1, 1), block=(probe.threads, 1, 1), smem=probe.smem, min_blocks_per_mp=1, stream=stream
    )


@cute.kernel
def probe_kernel(named: Constexpr, out: cute.Tensor, data: cute.Tensor, count: Int32):
    """Only the body's code."""
    probe = named.probe
    module, function = probe.body.split(".")
    body = getattr(importlib.import_module(f"undertow.calibrate.probes.{module}"), function)
    body(probe.settings, Context(probe, out, data), count)
