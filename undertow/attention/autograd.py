"""One differentiable call: eager, without the dispatcher's cost, or as an operator where a graph is recorded."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from undertow.attention import operators
from undertow.attention.checks import check_max_seqlen
from undertow.attention.dispatch import choose, is_strict
from undertow.attention.forward import run_forward
from undertow.attention.prepared import PLAIN, again, first, options_of
from undertow.attention.problem import (
    AttentionInputError,
    Gradients,
    Inputs,
    Problem,
    require_tensors,
    sequences_from,
    settings_from,
)
from undertow.kernels.sm100.tensors import Sequences


@dataclass(frozen=True)
class Request:
    """What a user asks for besides q, k, v, in the spellings of flash-attn. backend, strict: as in `run_backward`."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    deterministic: bool = False
    sink: Tensor | None = None
    packing: dict[str, Tensor | None] | None = None
    max_seqlen: tuple[Any, Any] = (None, None)
    backend: str = "auto"
    strict: bool | None = None

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
        """The call as the backends read it.

        Raises: AttentionInputError.
        """
        return Inputs(q, k, v, **self.parts(q))

    def parts(self, q: Tensor) -> dict[str, Any]:
        """The arguments of `Inputs` besides q, k, v."""
        settings = settings_from(
            q.shape[-1] if q.dim() else 1,
            self.softmax_scale,
            self.causal,
            self.window_size,
            self.softcap,
            self.deterministic,
        )
        sequences = None if self.packing is None else sequences_from(**self.packing)
        return {"settings": settings, "sink": self.sink, "sequences": sequences}

    def options(self) -> tuple[Any, ...]:
        """The arguments of both operators behind their tensors; the operators check them, so that a tracer need not."""
        packing = {} if self.packing is None else vars(sequences_from(**self.packing))
        return (
            self.sink,
            *(packing.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")),
            self.softmax_scale,
            self.causal,
            *self.window_size,
            self.softcap,
            self.deterministic,
            self.backend,
            self.strict,
        )


def attend(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """out and LSE, both differentiable by q, k, v and the sink.

    Raises: AttentionInputError; BackendError if a backend asked for by name, or strict mode, cannot compute gradients.
    """
    require_tensors(q=q, k=k, v=v)
    _refuse_tangents(q=q, k=k, v=v)
    if _is_recorded(q, k, v):
        return torch.ops.undertow.forward(q, k, v, *request.options())
    q, k, v = operators.autocast(q, k, v)
    call = request.inputs(q, k, v)
    check_max_seqlen(call, *request.max_seqlen)
    sink = request.sink
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, sink)):
        return _Attention.apply(q, k, v, sink, call, request)  # pyright: ignore[reportReturnType]
    out, lse = run_forward(call)
    return out, lse


def differentiate(problem: Problem, request: Request, options: Hashable) -> Gradients:
    """The gradients of `problem`, directly or as an operator where a graph is recorded.

    options: as of `prepared.first`.
    """
    if _is_recorded(problem.q, problem.k, problem.v):
        given = (getattr(problem, name) for name in ("dout", "q", "k", "v", "out", "lse", "dlse"))
        dq, dk, dv, dsink = torch.ops.undertow.backward(*given, *request.options())
        return Gradients(dq, dk, dv, None if problem.sink is None else dsink)
    check_max_seqlen(problem, *request.max_seqlen)
    return first(problem, request.backend, request.strict, options)


def _is_recorded(*tensors: Tensor) -> bool:
    """Whether somebody listens to the dispatcher: a compiler, a mode, a subclass or a transform of torch.func."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or any(type(x) not in PLAIN or is_functorch_wrapped_tensor(x) for x in tensors)
    )


def _refuse_tangents(**tensors: Tensor) -> None:
    """Operators drop tangents without a word."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for name, x in tensors.items():
        if forward_ad.unpack_dual(x).tangent is not None:
            raise AttentionInputError(f"{name} carries a tangent: attention has no forward-mode derivative")


class _Attention(torch.autograd.Function):
    """Forward by a kept library, backward by `run_backward`; LSE is a result with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, v, sink, call, request = arguments
        out, lse = run_forward(call)
        if request.backend != "auto" or is_strict(request.strict):
            problem = Problem(q, k, v, out=out, lse=lse, dout=out, **_rest(call))
            choose(problem, request.backend, request.strict)  # refuse now, not in the backward pass
        packing = () if call.sequences is None else tuple(vars(call.sequences).values())
        ctx.save_for_backward(q, k, v, out, lse, *(() if sink is None and not packing else (sink, *packing)))
        ctx.settings, ctx.request = call.settings, (request.backend, request.strict)
        ctx.options = options_of(call.settings, request.backend)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _refused_twice(ctx, *grads) if torch.is_grad_enabled() else _differentiate(ctx, *grads)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 6
    q, k, v, out, lse, *rest = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    sink, packing = (rest[0], tuple(rest[1:])) if rest else (None, ())
    more = None if dlse is None and not rest else (dlse, sink, *(packing or (None,) * 4))
    made = again(ctx.options, (q, k, v, out, dout, lse), more)
    if made is None:
        sequences = Sequences(*packing) if packing else None
        problem = Problem(
            q, k, v, out=out, lse=lse, dout=dout, dlse=dlse, sink=sink, settings=ctx.settings, sequences=sequences
        )
        backend, strict = ctx.request
        made = first(problem, backend, strict, ctx.options)
    needed = ctx.needs_input_grad
    return (
        made[0] if needed[0] else None,
        made[1] if needed[1] else None,
        made[2] if needed[2] else None,
        made[3] if needed[3] else None,
        None,
        None,
    )


_refused_twice = once_differentiable(_differentiate)


def _rest(call: Inputs) -> dict[str, Any]:
    return {name: getattr(call, name) for name in ("settings", "sink", "sequences")}
