"""The host side of a compiled call, executed on the CPU: what it refuses, and what it hands the kernels."""

from __future__ import annotations

import dataclasses
import functools
import mmap

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import make_fake_tensor

from tests.runtime import host_only
from tests.runtime.calls import EVERYTHING, settings_for, tensors_for, variant
from tools.benchmark_host import on_cpu, stub_of
from undertow.kernels.sm100 import call, entry
from undertow.kernels.sm100.launch import LaunchInputError, legal_strides
from undertow.kernels.sm100.tensors import allocate_workspaces
from undertow.plan.schema import DType
from undertow.runtime import device
from undertow.runtime.objects import Loaded

GENERIC = cutlass.AddressSpace.generic
NUMBERS = 64
MAP_NORESERVE = 0x4000  # of Linux; Python has no name for it before 3.13


@functools.cache
def stub(name: str):
    return stub_of(variant(name))


def plan_for(name: str, tensors) -> device.LaunchPlan:
    chosen, settings = variant(name), settings_for(name)
    assert call.variant_of("split", tensors, settings) == chosen
    numbers = call.numbers_of(chosen, tensors, settings, multiprocessors=148)
    return device.LaunchPlan(call, chosen, Loaded(stub(name)), call.workspace_floats(chosen, tensors), numbers)


def numbers_argument():
    return make_fake_tensor(cutlass.Int64, (NUMBERS,), stride=(1,), memspace=GENERIC, assumed_align=8)


@functools.cache
def layout_writer(packed: bool):
    extents = tuple(cute.sym_int32() for _ in range(2 if packed else 3))
    rows = on_cpu(entry.rows_of(DType.BF16, extents))
    return cute.compile(host_only.write_layout, rows, packed, numbers_argument(), options="--enable-tvm-ffi")


def layout_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents and strides that the kernels get for rows."""
    out = torch.zeros(NUMBERS, dtype=torch.int64)
    layout_writer(tensor.ndim == 3)(tensor, out)
    return tuple(out[:4].tolist()), tuple(out[4:8].tolist())


@pytest.mark.parametrize("name", ["dense", "causal-packed-sink", EVERYTHING])
def test_accepts_what_the_launches_accept(name):
    tensors = tensors_for(name)
    device.launch(plan_for(name, tensors), tensors)


def test_rows_of_a_graph_with_gradients_are_accepted():
    tensors = tensors_for("dense")
    tensors.q.requires_grad_()
    device.launch(plan_for("dense", tensors), tensors)


WRONG = {  # name of the tensor: (how to make it from the right one, what is said)
    "v": (lambda x: x[:, :100], r"v has shape \(2, 100, 2, 64\): must be \(2, 200, 2, 64\)"),
    "out": (lambda x: x.half(), "out has dtype torch.float16: must be torch.bfloat16"),
    "dout": (lambda x: torch.zeros(2, 300, 4, 68, dtype=x.dtype)[..., :64], "dout has a stride of 136 bytes"),
    "k": (lambda x: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape), "k begins at an address that is 2"),
    "lse": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "lse has stride 4 in its last dimension"),
    "dq": (lambda x: x[..., :32], r"dq has shape \(2, 300, 4, 32\)"),
    "dsink": (lambda x: None, "sink and dsink: one is given and the other is None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_compiled_call_refuses_what_it_cannot_take_and_it_is_told_in_our_terms(name):
    """Shapes, dtypes, strides and alignment are checked in the compiled function, at every call."""
    kind = "dense-sink" if name == "dsink" else "dense"
    right = tensors_for(kind)
    plan = plan_for(kind, right)
    device.launch(plan, right)
    make, said = WRONG[name]
    wrong = dataclasses.replace(right, **{name: make(getattr(right, name))})
    with pytest.raises((ValueError, TypeError)) as refusal:
        plan.loaded.function(*call.arguments(wrong, torch.empty(plan.floats), plan.numbers))
    assert not isinstance(refusal.value, LaunchInputError), "refused by the compiled function itself"
    with pytest.raises(LaunchInputError, match=said):
        device.launch(plan, wrong)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_batch_of_one_with_stride_0_bakes_nothing_in(order):
    """Public case K02: one compiled function, whichever comes first."""
    for batch in order:
        whole = torch.zeros(2, 300, 4, 64, dtype=torch.bfloat16)
        one = torch.as_strided(whole, (1, 300, 4, 64), (0, 256, 64, 1))
        given = one if batch == 1 else whole
        assert layout_of(given) == (tuple(given.shape), (300 * 256, 256, 64, 1))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((1, 300, 1, 64), (3, 64, 7, 1)),  # extents of 1 may have any stride, and torch leaves them as they come
        ((1, 1, 1, 64), (1, 1, 1, 1)),
        ((2, 1, 3, 64), (4096, 5, 64, 1)),
        ((3, 40, 2, 64), (64, 384, 192, 1)),  # every second dimension of something larger, transposed
        ((2, 30, 4, 64), (0, 64, 0, 1)),  # expanded
    ],
)
def test_kernels_get_the_strides_that_the_launches_describe(shape, strides):
    """What `launch.py` describes is what was emulated."""
    tensor = torch.zeros(2**15, dtype=torch.bfloat16).as_strided(shape, strides)
    assert layout_of(tensor) == (shape, legal_strides(tensor))


def test_packed_rows_are_those_of_one_batch_element():
    tensor = torch.zeros(50, 4, 64, dtype=torch.bfloat16)[:, ::2]
    assert layout_of(tensor) == ((1, 50, 2, 64), legal_strides(tensor.unsqueeze(0)))


def test_a_stride_beyond_32_bits_arrives_whole():
    far = 2**32 + 64
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE  # addresses without memory behind them
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (far + 64 * 64), flags=flags), dtype=torch.bfloat16)
    tensor = memory.as_strided((2, 8, 2, 64), (far, 128, 64, 1))
    assert layout_of(tensor) == ((2, 8, 2, 64), (far, 128, 64, 1))


@pytest.mark.parametrize("name", ["dense", "causal-sink", EVERYTHING])
def test_buffers_are_those_of_the_description_and_fill_the_workspace(name):
    tensors, chosen = tensors_for(name), variant(name)
    expected = allocate_workspaces(tensors, chosen.attention.deterministic)
    floats = call.workspace_floats(chosen, tensors)
    workspace = on_cpu(make_fake_tensor(cutlass.Float32, (cute.sym_int64(),), stride=(1,), assumed_align=16))
    extents = tuple(cutlass.Int32(1) for _ in range(3))
    write = cute.compile(
        host_only.write_buffers, chosen, workspace, extents, numbers_argument(), options="--enable-tvm-ffi"
    )
    out = torch.zeros(NUMBERS, dtype=torch.int64)
    write(torch.empty(floats), tuple(expected.dq_accumulator.shape[:3]), out)
    at, spans = 0, []
    for field in dataclasses.fields(expected):
        buffer = getattr(expected, field.name)
        if buffer is None:
            continue
        offset, rank = int(out[at]), buffer.ndim
        assert tuple(out[at + 1 : at + 1 + rank].tolist()) == tuple(buffer.shape), field.name
        assert tuple(out[at + 1 + rank : at + 1 + 2 * rank].tolist()) == buffer.stride(), field.name
        assert offset % 16 == 0, field.name
        spans.append((offset, offset + buffer.numel() * buffer.element_size()))
        at += 1 + 2 * rank
    spans.sort()
    assert [0, *(end for _, end in spans)] == [*(begin for begin, _ in spans), 4 * floats], "gaps or overlaps"
