"""Backward passes of kept libraries, for what our kernels do not compute: flash-attn-4's, and torch's own.

Each says first, by name, what it cannot do. What a library would answer wrongly is not given to it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from undertow.attention.memory import obstacle
from undertow.attention.problem import Gradients, Inputs, LibraryRefusal, Problem, is_determinism_enforced

FLASH_ATTN_4 = "flash_attn.cute.interface"
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@functools.cache
def flash_attn_4_module() -> ModuleType | str:
    """The module of flash-attn-4 with its functions, or why it cannot be imported."""
    try:
        return importlib.import_module(FLASH_ATTN_4)
    except Exception as error:  # its imports reach into compilers and drivers, which fail in their own ways
        return f"flash-attn-4 cannot be imported: {type(error).__name__}: {error}"


@functools.cache
def _parameters(name: str) -> frozenset[str]:
    module = flash_attn_4_module()
    assert isinstance(module, ModuleType)
    return frozenset(inspect.signature(getattr(module, name)).parameters)


def flash_attn_4_writes_into_given() -> bool:
    """Whether its forward pass takes tensors to write to."""
    return {"out", "lse"} <= _parameters("_flash_attn_fwd")


REFUSALS = (AssertionError, NotImplementedError, TypeError, ValueError)  # how they say no; CUDA's errors are others


@contextlib.contextmanager
def asked(library: str, x: Tensor) -> Iterator[None]:
    """Launch on the device of `x`, and tell a refusal from a failure.

    Raises: LibraryRefusal where the library says no.
    """
    try:
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            yield
    except REFUSALS as error:
        raise LibraryRefusal(f"{library} refuses this call: {type(error).__name__}: {error}") from error


def readable(x: Tensor) -> Tensor:
    """`x`, or a copy where its strides or its address are such as libraries have misread."""
    overlaps = any(step == 0 and extent > 1 for step, extent in zip(x.stride(), x.shape))
    return x.clone(memory_format=torch.contiguous_format) if overlaps or obstacle(x, vectors=True) else x


def bounds(call: Inputs) -> tuple[int | None, int | None]:
    """Causal mask and window as (left, right); a bound that no pair reaches is None."""
    reach = call.q.shape[-3] + call.k.shape[-3]
    left, right = (None if bound is None or bound >= reach else bound for bound in call.settings.band)
    return left, right


def outside_any(call: Inputs) -> str | None:
    """What neither library has."""
    if call.q.device.type != "cuda":
        return f"q is on {call.q.device}: needs a CUDA device"
    if call.q.dtype not in SIXTEEN_BITS:
        return f"dtype is {call.q.dtype}: needs {' or '.join(map(str, SIXTEEN_BITS))}"
    if call.settings.scale <= 0:
        return f"softmax_scale is {call.settings.scale}: needs a positive one"
    if any(bound is not None and bound < 0 for bound in bounds(call)):
        return f"the bounds {bounds(call)} hold a negative one, which it takes for none"
    return None


def outside_flash_attn_4(call: Inputs) -> str | None:
    """Why flash-attn-4 does not compute `call`, forward or, of a Problem, backward; None if it does."""
    reason = outside_any(call)
    if reason:
        return reason
    major = torch.cuda.get_device_capability(call.q.device)[0]
    if major not in (9, 10):
        return f"compute capability {major}.x: needs 9.x or 10.x"
    if call.q.shape[-1] % 8 or call.q.shape[-1] > 128:
        return f"head_dim is {call.q.shape[-1]}: needs a multiple of 8 up to 128"
    module = flash_attn_4_module()
    if isinstance(module, str):
        return module
    backward = isinstance(call, Problem)
    asked = {"learnable_sink": call.sink is not None, "dlse": backward and call.dlse is not None}
    missing = [name for name, is_asked in asked.items() if is_asked and name not in _parameters(_entry(backward))]
    return f"this flash-attn-4 has no {', '.join(missing)}" if missing else None


def _entry(backward: bool) -> str:
    return "_flash_attn_bwd" if backward else "_flash_attn_fwd"


def flash_attn_4(problem: Problem) -> Gradients:
    """Gradients by flash-attn-4's kernels."""
    module = flash_attn_4_module()
    assert isinstance(module, ModuleType)
    with asked("flash-attn-4", problem.q):
        results = module._flash_attn_bwd(
            *(readable(x) for x in (problem.q, problem.k, problem.v, problem.out, problem.dout)),
            problem.lse.contiguous(),
            **options_of(problem),
            deterministic=problem.settings.deterministic,
            **({} if problem.dlse is None else {"dlse": problem.dlse.contiguous()}),
        )
    return _as_expected(problem, results)


def options_of(call: Inputs) -> dict:
    """Settings, sink and packing in the words of flash-attn-4."""
    left, right = bounds(call)
    return {
        "softmax_scale": call.settings.scale,
        "causal": (left, right) == (None, 0),
        "softcap": call.settings.softcap or 0.0,
        "window_size_left": left,
        "window_size_right": None if (left, right) == (None, 0) else right,
        **({} if call.sink is None else {"learnable_sink": call.sink}),
        **({} if call.sequences is None else vars(call.sequences)),
    }


def outside_torch(call: Inputs) -> str | None:
    """Why torch's flash kernels do not compute `call`, forward or, of a Problem, backward; None if they do."""
    reason = outside_any(call)
    if reason:
        return reason
    if call.q.shape[-1] % 8 or call.q.shape[-1] > 256:
        return f"head_dim is {call.q.shape[-1]}: needs a multiple of 8 up to 256"
    if call.settings.softcap is not None or call.sink is not None:
        return "it has neither a softcap nor a sink"
    if bounds(call) != (None, None) and call.sequences is None and call.q.shape[1] != call.k.shape[1]:
        return "a mask over unequal lengths may be lined up with another corner"
    if call.sequences is not None and (call.sequences.seqused_q is not None or call.sequences.seqused_k is not None):
        return "its backward pass has no seqused"
    if isinstance(call, Problem):
        if call.dlse is not None:
            return "it has no gradient of LSE"
        if call.settings.deterministic and not is_determinism_enforced():
            return "it is deterministic only under torch.use_deterministic_algorithms(True) without warn_only"
    return None


def torch_flash(problem: Problem) -> Gradients:
    """Gradients by torch's flash kernel. Rows behind the last sequence, which it does not write, are cleared."""
    q, sequences = problem.q, problem.sequences
    left, right = window_of_torch(problem)
    # nobody's maximum is trusted: all rows are a bound of every sequence that costs blocks which end at once
    with asked("torch", q):
        results = torch.ops.aten._flash_attention_backward(
            *(readable(x) for x in (problem.dout, q, problem.k, problem.v, problem.out)),
            problem.lse.masked_fill(problem.lse == -math.inf, math.inf).contiguous(),  # its word for seeing nothing
            None if sequences is None else sequences.cu_seqlens_q,
            None if sequences is None else sequences.cu_seqlens_k,
            q.shape[-3],
            problem.k.shape[-3],
            0.0,
            (left, right) == (-1, 0),
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=problem.settings.scale,
            window_size_left=left,
            window_size_right=right,
        )
    if sequences is not None:
        sides = ("q", "k", "k")
        masks = [
            unused_rows(getattr(sequences, f"cu_seqlens_{side}"), None, x.shape[0]) for side, x in zip(sides, results)
        ]
        results = [x.masked_fill_(mask[:, None, None], 0.0) for x, mask in zip(results, masks)]
    return _as_expected(problem, results)


def window_of_torch(call: Inputs) -> tuple[int, int]:
    """The bounds with -1 for none."""
    left, right = (-1 if bound is None else bound for bound in bounds(call))
    return left, right


def unused_rows(offsets: Tensor, used: Tensor | None, rows: int) -> Tensor:
    """Which of `rows` no packed sequence uses, (rows) bool, found on the device and without waiting for it."""
    index = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    sequence = torch.searchsorted(offsets, index, right=True) - 1  # the last one that begins here or before
    inside = sequence < offsets.shape[0] - 1
    if used is None or not used.numel():
        return ~inside
    sequence = sequence.clamp(max=used.shape[0] - 1)
    return ~(inside & (index - offsets[sequence] < used[sequence]))


def _as_expected(problem: Problem, results) -> Gradients:
    """Strides and dtypes as the inputs have them."""
    inputs = [x for x in (problem.q, problem.k, problem.v, problem.sink) if x is not None]
    stored = []
    for x, result in zip(inputs, results):
        expected = torch.empty_like(x)
        same = result.stride() == expected.stride() and result.dtype == x.dtype
        stored.append(result if same else expected.copy_(result))
    return Gradients(*stored)
