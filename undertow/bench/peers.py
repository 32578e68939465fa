"""The attention libraries that this package is measured beside, each through its own interface and at its best.

A library gets what helps it: the longest length of packed sequences, its own out and LSE, contiguous rows. A
deterministic cell goes only to those whose backward pass promises equal bits.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from undertow.bench.providers import Participant, Provider, UnableError, Undertow, as_rows, deterministic_torch
from undertow.bench.work import HEAD_DIM
from undertow.bench.workload import Workload
from undertow.reference import Gradients
from undertow.sweep.matrix import Cell

SCALE = HEAD_DIM**-0.5


class FlashAttention4:
    """flash-attn-4, CuTe DSL: `_flash_attn_fwd`, `_flash_attn_bwd` of `flash_attn.cute.interface`."""

    name, module = "flash-attn-4", "flash_attn.cute.interface"

    def missing(self) -> str | None:
        # it looks when it is imported; what is compiled once, by whichever process, is then kept
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        return _missing(self.module)

    def compiles(self, cell: Cell) -> Hashable:
        return cell.layout, cell.kind, cell.causal, cell.dtype, cell.deterministic

    def prepare(self, workload: Workload) -> Participant:
        library = importlib.import_module(self.module)
        w = workload
        q, k, v, dout = (w.shaped(x) for x in (w.q, w.k, w.v, w.dout))
        left, right = w.bounds
        causal = (left, right) == (None, 0)
        options: dict[str, Any] = {
            "softmax_scale": SCALE,
            "causal": causal,
            "window_size_left": left,
            "window_size_right": None if causal else right,
            **_packing(w),
        }
        with torch.no_grad():
            out, lse = library._flash_attn_fwd(q, k, v, return_lse=True, **options)[:2]
        options["deterministic"] = w.cell.deterministic

        def call() -> Any:
            return library._flash_attn_bwd(q, k, v, out, dout, lse, **options)[:3]

        return Participant(self.name, call, functools.partial(as_rows, w), around=torch.no_grad)


class FlashAttention3:
    """flash-attn 3 for Hopper: `flash_attn_func`, `flash_attn_varlen_func` of `flash_attn_interface`, by autograd."""

    name, module = "flash-attn-3", "flash_attn_interface"

    def missing(self) -> str | None:
        return _missing(self.module)

    def compiles(self, cell: Cell) -> Hashable:
        return None

    def prepare(self, workload: Workload) -> Participant:
        library = importlib.import_module(self.module)
        w = workload
        inputs = [w.shaped(x).detach().requires_grad_() for x in (w.q, w.k, w.v)]
        options: dict[str, Any] = {
            "softmax_scale": SCALE,
            "causal": w.cell.causal,
            "window_size": tuple(-1 if bound is None else bound for bound in w.size.window),
            "deterministic": w.cell.deterministic,
        }
        forward = library.flash_attn_varlen_func if w.size.packed else library.flash_attn_func
        out = forward(*inputs, **options, **_packing(w))
        out = out[0] if isinstance(out, tuple) else out  # releases before July 2025 return LSE, too
        call = functools.partial(torch.autograd.grad, out, inputs, w.shaped(w.dout), retain_graph=True)
        return Participant(self.name, call, functools.partial(as_rows, w))


class TorchFlash:
    """The flash kernel (FlashAttention 2) behind torch's scaled_dot_product_attention, by its aten operators.

    The operators, unlike scaled_dot_product_attention, also take windows and packed sequences.
    """

    name = "torch-flash"

    def missing(self) -> str | None:
        return None

    def compiles(self, cell: Cell) -> Hashable:
        return None

    def prepare(self, workload: Workload) -> Participant:
        w = workload
        q, k, v, dout = (w.shaped(x) for x in (w.q, w.k, w.v, w.dout))
        left, right = (-1 if bound is None else bound for bound in w.bounds)
        offsets = w.offsets if w.size.packed else None
        where = (offsets, offsets, w.max_seqlen, w.max_seqlen, 0.0, (left, right) == (-1, 0))
        bounds = {"scale": SCALE, "window_size_left": left, "window_size_right": right}
        with torch.no_grad():
            out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *where, False, **bounds)

        def call() -> Any:
            return torch.ops.aten._flash_attention_backward(dout, q, k, v, out, lse, *where, state, unused, **bounds)

        around = functools.partial(deterministic_torch, w.cell.deterministic)
        return Participant(self.name, call, functools.partial(as_rows, w), around)


class TorchCudnn:
    """cuDNN's attention behind torch's scaled_dot_product_attention, by autograd."""

    name, backend = "torch-cudnn", SDPBackend.CUDNN_ATTENTION

    def missing(self) -> str | None:
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"

    def compiles(self, cell: Cell) -> Hashable:
        return None  # what it compiles, it forgets with the process

    def prepare(self, workload: Workload) -> Participant:
        w = workload
        if w.size.packed or w.size.window != (None, None):
            raise UnableError("scaled_dot_product_attention has neither packed sequences nor windows without a mask")
        if w.cell.deterministic:
            raise UnableError("torch's cuDNN attention promises no equal bits, and dense calls do not give them")
        inputs = [w.shaped(x).detach().requires_grad_() for x in (w.q, w.k, w.v)]
        dout = w.heads_first(w.dout)
        q, k, v = (x.transpose(1, 2) for x in inputs)
        with sdpa_kernel(self.backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=w.cell.causal, enable_gqa=_grouped(w))
        call = functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
        return Participant(self.name, call, functools.partial(as_rows, w))


class FlexAttention:
    """torch's FlexAttention, compiled with the default options, by autograd; (batch, heads, rows, 64) contiguous."""

    name = "flex"

    def missing(self) -> str | None:
        return _missing("triton")

    def compiles(self, cell: Cell) -> Hashable:
        return None if cell.deterministic else cell.name  # every shape, and of packed sequences every mask

    def prepare(self, workload: Workload) -> Participant:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        w = workload
        if w.cell.deterministic:
            raise UnableError("FlexAttention promises no equal bits")
        torch.compiler.reset()  # beyond a number of shapes torch would give up and run it uncompiled
        inputs = [w.heads_first(x).contiguous().requires_grad_() for x in (w.q, w.k, w.v)]
        dout, rows = w.heads_first(w.dout).contiguous(), inputs[0].shape[2]
        seen, mask = mask_of(w), None
        if seen is not None:
            mask = create_block_mask(seen, None, None, rows, rows, device=str(w.q.device), _compile=True)
        # a backward pass that is run again needs its buffers
        keeping: Any = functools.partial(torch._functorch.config.patch, donated_buffer=False)
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        with keeping():
            out = compiled(*inputs, block_mask=mask, enable_gqa=_grouped(w))
        call = functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)

        def gradients(raw: Any) -> Gradients:
            return Gradients(*map(w.rows_first, raw))

        return Participant(self.name, call, gradients, keeping)


def mask_of(workload: Workload) -> Callable[..., Tensor] | None:
    """Which pairs are seen, as FlexAttention asks it: of (batch, head, row, key); None if all are."""
    left, right = workload.bounds
    document = None
    if workload.size.packed:
        index = torch.arange(workload.size.tokens, device=workload.q.device)
        document = torch.searchsorted(workload.offsets[1:].long(), index, right=True)
    if left is None and right is None and document is None:
        return None

    def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        kept = (row == row) if document is None else document[row] == document[key]
        if left is not None:
            kept = kept & (key >= row - left)
        if right is not None:
            kept = kept & (key <= row + right)
        return kept

    return seen


def _grouped(workload: Workload) -> bool:
    return workload.size.heads.q != workload.size.heads.kv


def _packing(workload: Workload) -> dict[str, Any]:
    if not workload.size.packed:
        return {}
    offsets, longest = workload.offsets, workload.max_seqlen
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _missing(module: str) -> str | None:
    try:
        found = importlib.import_module(module)
    except Exception as error:  # loaders of native libraries fail in their own ways
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None if isinstance(found, ModuleType) else f"{module} is no module"


PEERS: tuple[Provider, ...] = (TorchFlash(), TorchCudnn(), FlashAttention3(), FlashAttention4(), FlexAttention())
PROVIDERS: dict[str, Provider] = {provider.name: provider for provider in (Undertow(), *PEERS)}
