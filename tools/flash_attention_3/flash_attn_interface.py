"""FlashAttention 3 for torch where only its build for JAX is installed, so that it can take part in a benchmark.

    PYTHONPATH=tools/flash_attention_3 undertow bench --provider undertow --provider flash-attn-3 ...

The kernels are those of the package dew-flash-attn-cu13, a build for JAX of FlashAttention 3's CUDA sources, in a
library that knows nothing of JAX but XLA's C interface for calls. Here such calls are made on torch tensors and torch's
current stream; JAX is not needed. The names are those of FlashAttention 3's own package for torch, as far as the
benchmark uses them. This build has no deterministic backward pass.

The structures are those of xla/ffi/api/c_api.h (XLA FFI 0.x); the library refuses a call whose frame has another size.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = "libdew_flash_attn3.so"
DTYPES = {torch.int32: 4, torch.float16: 10, torch.float32: 11, torch.bfloat16: 16}
PRED, S64, F64 = 1, 5, 12  # attributes
BUFFER, SCALAR, EXECUTE = 1, 3, 3
BLOCK_ROWS = 128  # the most to which the backward pass rounds the rows of a sequence


class Buffer(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    ]


class Span(Structure):
    _fields_ = [("text", c_char_p), ("length", c_size_t)]


class Scalar(Structure):
    _fields_ = [("dtype", c_int), ("value", c_void_p)]


class Values(Structure):
    """Arguments, or results."""

    _fields_ = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", POINTER(c_int)),
        ("values", POINTER(c_void_p)),
    ]


class Attributes(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(POINTER(Span))),
        ("values", POINTER(c_void_p)),
    ]


class Frame(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("api", c_void_p),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", Values),
        ("results", Values),
        ("attributes", Attributes),
        ("future", c_void_p),
    ]


class Asked(Structure):
    """The beginning of what all functions of the interface are given, and most of what ours look at."""

    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("first", c_void_p), ("second", c_void_p)]


class AskedMemory(Structure):
    _fields_ = [*Asked._fields_[:3], ("bytes", c_size_t), ("alignment", c_size_t), ("data", c_void_p)]


class AskedDevice(Structure):
    _fields_ = [*Asked._fields_[:3], ("ordinal", c_int32)]


class AskedError(Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int)]


FUNCTIONS = (  # the order of XLA_FFI_Api
    *("Error_Create", "Error_GetDetails", "Error_Destroy", "Handler_Register", "Stream_Get", "Type_Register"),
    *("InvokeContext_Get", "State_Set", "State_Get", "DeviceMemory_Allocate", "DeviceMemory_Free"),
    *("ThreadPool_Schedule", "ThreadPool_NumThreads", "Future_Create", "Future_SetAvailable", "Future_SetError"),
    *("RunId_Get", "DeviceOrdinal_Get", "InvokeContext_FindExtension"),
)


class Api(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("version_size", c_size_t),
        ("version_extension", c_void_p),
        ("major", c_int),
        ("minor", c_int),
        ("internal", c_void_p),
        *((name, c_void_p) for name in FUNCTIONS),
    ]


class Call:
    """One call, for whose time it answers what the library asks: the stream, the device, memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.complaint, self.memory = device, "", list[Tensor]()

    def error(self, given: Any) -> int:
        self.complaint = given.contents.message.decode(errors="replace")
        return 1  # anything but null is an error

    def stream(self, given: Any) -> int | None:
        given.contents.second = torch.cuda.current_stream(self.device).cuda_stream
        return None

    def ordinal(self, given: Any) -> int | None:
        given.contents.ordinal = self.device.index or 0
        return None

    def allocate(self, given: Any) -> int | None:
        self.memory.append(torch.empty(max(1, given.contents.bytes), dtype=torch.uint8, device=self.device))
        given.contents.data = self.memory[-1].data_ptr()
        return None

    def free(self, given: Any) -> int | None:
        return None  # torch's allocator orders what comes later on the stream behind it


ANSWERS = {
    "Error_Create": (AskedError, Call.error),
    "Stream_Get": (Asked, Call.stream),
    "DeviceOrdinal_Get": (AskedDevice, Call.ordinal),
    "DeviceMemory_Allocate": (AskedMemory, Call.allocate),
    "DeviceMemory_Free": (AskedMemory, Call.free),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Found without importing its package, which would import JAX.

    Raises: ImportError.
    """
    found = importlib.util.find_spec("dew_flash_attn")
    if found is None or found.origin is None:
        raise ImportError("dew-flash-attn-cu13, which holds the kernels of FlashAttention 3, is not installed")
    return ctypes.CDLL(str(Path(found.origin).with_name(LIBRARY)))


library()  # whoever imports this module asks whether it can be used


def run(name: str, arguments: Sequence[Tensor], results: Sequence[Tensor], attributes: dict[str, Any]) -> None:
    """Put one of the library's functions on the current stream.

    Raises: RuntimeError with what it says.
    """
    call = Call(arguments[0].device)
    kept: list[Any] = []  # what the frame points to

    def answer(kind: type[Structure], how: Callable[[Call, Any], int | None]) -> c_void_p:
        function = ctypes.CFUNCTYPE(c_void_p, POINTER(kind))(lambda given: how(call, given))
        kept.append(function)
        return ctypes.cast(function, c_void_p)

    api = Api(ctypes.sizeof(Api), None, 24, None, 0, 1, None)
    for asked, (kind, how) in ANSWERS.items():
        setattr(api, asked, answer(kind, how))
    of_frame = _values(arguments, kept), _values(results, kept), _attributes(attributes, kept)
    size = Frame.attributes.offset + ctypes.sizeof(Attributes)
    frame = Frame(size, None, ctypes.addressof(api), 1, EXECUTE, *of_frame, None)
    function = getattr(library(), name)
    function.restype, function.argtypes = c_void_p, (POINTER(Frame),)
    if function(ctypes.byref(frame)) is not None:
        raise RuntimeError(f"{name}: {call.complaint}")


def _values(tensors: Sequence[Tensor], kept: list[Any]) -> Values:
    count = len(tensors)
    buffers = [
        Buffer(ctypes.sizeof(Buffer), None, DTYPES[x.dtype], x.data_ptr(), x.dim(), (c_int64 * x.dim())(*x.shape))
        for x in tensors
    ]
    types = (c_int * count)(*[BUFFER] * count)
    pointers = (c_void_p * count)(*map(ctypes.addressof, buffers))
    kept += [buffers, types, pointers]
    return Values(ctypes.sizeof(Values), None, count, types, pointers)


def _attributes(given: dict[str, Any], kept: list[Any]) -> Attributes:
    count = len(given)
    names, scalars = [], []
    for name, value in sorted(given.items()):
        kind, dtype = {bool: (ctypes.c_bool, PRED), int: (c_int64, S64), float: (c_double, F64)}[type(value)]
        held, text = kind(value), name.encode()
        scalars.append(Scalar(dtype, ctypes.addressof(held)))
        names.append(Span(text, len(text)))
        kept += [held, text]
    types = (c_int * count)(*[SCALAR] * count)
    of_names = (POINTER(Span) * count)(*map(ctypes.pointer, names))
    pointers = (c_void_p * count)(*map(ctypes.addressof, scalars))
    kept += [names, scalars, types, of_names, pointers]
    return Attributes(ctypes.sizeof(Attributes), None, count, types, of_names, pointers)


class Attention(torch.autograd.Function):
    """Both passes. starts: none, or the offsets of packed sequences, of queries and of keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, ...], attributes: dict) -> Tensor:
        heads = q.shape[-2]
        out = torch.empty_like(q)
        rows = (heads, q.shape[0]) if starts else (q.shape[0], heads, q.shape[1])
        lse, unused, unused_too = (q.new_empty(s, dtype=torch.float32) for s in (rows, (1, 1, 1, 1), (1, 1, 1)))
        run(
            f"dew_flash3_mha_{'varlen_' * bool(starts)}fwd",
            (q, k, v, *starts),
            (out, lse, unused, unused_too),
            attributes,
        )
        ctx.save_for_backward(q, k, v, out, lse, *starts)
        ctx.attributes = attributes
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse, *starts = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        tokens = q.shape[:-2].numel()
        sequences = len(starts[0]) - 1 if starts else q.shape[0]
        rows = q.shape[-2] * (tokens + BLOCK_ROWS * (sequences + 1))
        scratch = [q.new_empty(rows, dtype=torch.float32) for _ in range(2)]
        given = (grads[0].contiguous(), q, k, v, out, lse, *starts)
        run(f"dew_flash3_mha_{'varlen_' * bool(starts)}bwd", given, (dq, dk, dv, *scratch), ctx.attributes)
        return dq, dk, dv, None, None


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **mode: Any) -> Tensor:
    """q: (batch, seqlen, heads, head_dim) bf16 or fp16; k, v likewise, with heads that divide those of q.

    mode: softmax_scale, causal, window_size (-1 is no bound) and deterministic, all of them.
    Raises: NotImplementedError for the deterministic mode.
    """
    return _attention((q, k, v), (), {}, mode)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **mode: Any
) -> Tensor:
    """The same of packed sequences, (tokens, heads, head_dim), that begin and end at int32 offsets.

    mode: as above, and the longest sequence of each, max_seqlen_q and max_seqlen_k.
    """
    longest = {"max_seqlen": mode.pop("max_seqlen_q"), "max_seqlen_k": mode.pop("max_seqlen_k")}
    return _attention((q, k, v), (cu_seqlens_q, cu_seqlens_k), longest, mode)


def _attention(
    tensors: tuple[Tensor, ...], starts: tuple[Tensor, ...], longest: dict[str, int], mode: dict[str, Any]
) -> Tensor:
    if mode["deterministic"]:
        raise NotImplementedError("this build of FlashAttention 3 has no deterministic backward pass")
    left, right = mode["window_size"]
    attributes = {"softmax_scale": float(mode["softmax_scale"]), "is_causal": mode["causal"], **longest}
    attributes |= {"window_size_left": left, "window_size_right": right}
    q, k, v = (x.contiguous() for x in tensors)
    return Attention.apply(q, k, v, starts, attributes)
