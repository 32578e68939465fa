"""FlashAttention 3 by its build for JAX: how calls are laid out. That they are right, the gate says on a GPU."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).resolve().parents[2] / "tools" / "flash_attention_3" / "flash_attn_interface.py"
OFFSETS_OF_A_FRAME = [0, 8, 16, 24, 32, 40, 80, 120, 168]  # 64-bit; XLA_FFI_CallFrame


def loaded(monkeypatch: pytest.MonkeyPatch, found: object) -> ModuleType:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    spec = importlib.util.spec_from_file_location("flash_attn_interface", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def module(monkeypatch) -> ModuleType:
    return loaded(monkeypatch, importlib.machinery.ModuleSpec("dew_flash_attn", None, origin="/there/__init__.py"))


def test_without_the_package_there_is_no_such_module(monkeypatch, module):
    assert module.library() == "/there/libdew_flash_attn3.so"
    with pytest.raises(ImportError, match=r"dew-flash-attn-cu13, .* is not installed"):
        loaded(monkeypatch, None)


def test_structures_have_the_layout_of_the_interface(module):
    assert [getattr(module.Frame, name).offset for name, _ in module.Frame._fields_] == OFFSETS_OF_A_FRAME
    assert ctypes.sizeof(module.Buffer) == 48 and ctypes.sizeof(module.Attributes) == 48
    assert ctypes.sizeof(module.Api) == 48 + 8 * 19


def test_a_call_hands_over_tensors_and_attributes_in_order(module, monkeypatch):
    seen = {}

    def function(pointer):
        frame = pointer._obj
        buffers = [ctypes.cast(v, ctypes.POINTER(module.Buffer)).contents for v in frame.arguments.values[:2]]
        seen["buffers"] = [(b.dtype, b.data, b.dims[: b.rank]) for b in buffers]
        names = [frame.attributes.names[i].contents for i in range(frame.attributes.count)]
        seen["names"] = [name.text[: name.length] for name in names]
        scalars = [ctypes.cast(v, ctypes.POINTER(module.Scalar)).contents for v in frame.attributes.values[:3]]
        kinds = (ctypes.c_bool, ctypes.c_double, ctypes.c_int64)
        seen["values"] = [ctypes.cast(s.value, ctypes.POINTER(kind)).contents.value for s, kind in zip(scalars, kinds)]
        seen["frame"] = (frame.size, frame.stage, frame.results.count)
        api = ctypes.cast(frame.api, ctypes.POINTER(module.Api)).contents
        asked = module.AskedError(ctypes.sizeof(module.AskedError), None, b"wrong shape", 3)
        failing = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(api.Error_Create)
        return failing(ctypes.addressof(asked)) if frame.results.count == 2 else None

    monkeypatch.setattr(module, "library", lambda: type("Library", (), {"call": staticmethod(function)}))
    q, offsets = torch.zeros(3, 2, 64, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    attributes = {"window": -1, "scale": 0.125, "causal": True}
    module.run("call", (q, offsets), (q,), attributes)
    assert seen["buffers"] == [(16, q.data_ptr(), [3, 2, 64]), (4, offsets.data_ptr(), [2])]
    assert (seen["names"], seen["values"]) == ([b"causal", b"scale", b"window"], [True, 0.125, -1])
    assert seen["frame"] == (168, 3, 1)
    with pytest.raises(RuntimeError, match="call: wrong shape"):
        module.run("call", (q, offsets), (q, q), attributes)


def test_the_deterministic_mode_is_refused(module):
    q = torch.zeros(1, 4, 2, 64)
    with pytest.raises(NotImplementedError, match="no deterministic backward pass"):
        module.flash_attn_func(q, q, q, softmax_scale=1.0, causal=True, window_size=(-1, -1), deterministic=True)
