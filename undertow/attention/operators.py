"""The forward and the backward pass as operators of torch, for everything that records a graph.

torch.compile, export, selective checkpointing and other dispatch modes see `undertow::forward` and
`undertow::backward`; both are functional. Eager calls do not pay for the dispatcher (`undertow.attention.autograd`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undertow.attention.checks import check
from undertow.attention.forward import run_forward
from undertow.attention.prepared import run
from undertow.attention.problem import Inputs, Problem, sequences_from, settings_from

_OPTIONS = (  # of both operators, behind their tensors
    "Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "float? softmax_scale, bool causal, SymInt? window_left, SymInt? window_right, float? softcap, bool deterministic, "
    "str backend, bool? strict"
)
_NAMES = tuple(part.split()[1] for part in _OPTIONS.split(", "))
FIRST_OPTION = 3  # of forward: behind q, k, v
BACKWARD_TENSORS = 7  # dout, q, k, v, out, lse, dlse

LIBRARY = torch.library.Library("undertow", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
LIBRARY.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
LIBRARY.define(
    f"backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    tags=(*_TAGS, torch.Tag.nondeterministic_bitwise),  # dQ is summed in any order, if deterministic is not asked for
)


def _parts(q: Tensor, options: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `Inputs` besides q, k, v, and those that say who computes."""
    given = dict(zip(_NAMES, options, strict=True))
    settings = settings_from(
        q.shape[-1],
        given["softmax_scale"],
        given["causal"],
        (given["window_left"], given["window_right"]),
        given["softcap"],
        given["deterministic"],
    )
    packing = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")}
    packed = any(x is not None for x in packing.values())
    sequences = sequences_from(**packing) if packed else None
    call = {"settings": settings, "sink": given["sink"], "sequences": sequences}
    return call, {"backend": given["backend"], "strict": given["strict"]}


def _inputs(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Inputs:
    call, _ = _parts(q, options)
    return Inputs(q, k, v, **call)


def _problem(*arguments: Any) -> tuple[Problem, dict[str, Any]]:
    dout, q, k, v, out, lse, dlse = arguments[:BACKWARD_TENSORS]
    call, route = _parts(q, arguments[BACKWARD_TENSORS:])
    return Problem(q, k, v, out=out, lse=lse, dout=dout, dlse=dlse, **call), route


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = run_forward(_inputs(*arguments))
    return out, lse


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _inputs(*arguments)
    check(call)
    return call.q.new_empty(call.q.shape), call.q.new_empty(call.lse_shape, dtype=call.lse_dtype)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, route = _problem(*arguments)
    dq, dk, dv, dsink = run(problem, **route)
    return dq, dk, dv, problem.q.new_empty(0) if dsink is None else dsink


def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, _ = _problem(*arguments)
    check(problem)
    dq, dk, dv = (torch.empty_like(x) for x in (problem.q, problem.k, problem.v))
    return dq, dk, dv, problem.q.new_empty(0) if problem.sink is None else torch.empty_like(problem.sink)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors, *output)
    ctx.options = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.places = tuple(place for place, x in enumerate(inputs) if isinstance(x, Tensor))


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * len(ctx.options)
    if dout is None and dlse is None:
        return tuple(grads)
    *tensors, out, lse = ctx.saved_tensors
    arguments = list(ctx.options)
    for place, tensor in zip(ctx.places, tensors):
        arguments[place] = tensor
    dout = torch.zeros_like(out) if dout is None else dout
    made = torch.ops.undertow.backward(
        dout, *arguments[:FIRST_OPTION], out, lse, dlse, *arguments[FIRST_OPTION:]
    )  # dq, dk, dv, dsink in the order of the first four arguments
    for place, grad in enumerate(made):
        grads[place] = grad if ctx.needs_input_grad[place] else None
    return tuple(grads)


def _refuse_twice(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError("attention cannot be differentiated twice: its backward pass has no derivative")


def _cast_forward(device_type: str):
    def cast(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        q, k, v = autocast(q, k, v)
        with torch.autocast(device_type, enabled=False):
            return torch.ops.undertow.forward(q, k, v, *options)

    return cast


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the dtype of autocast, where that is on for their device; float64 stays, as everywhere in torch."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


for _name, _real, _fake in (("forward", _forward, _forward_fake), ("backward", _backward, _backward_fake)):
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"undertow::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd("undertow::forward", _differentiate, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("undertow::backward", _refuse_twice, lib=LIBRARY)
for _key, _device in (("AutocastCPU", "cpu"), ("AutocastCUDA", "cuda")):
    LIBRARY.impl("forward", _cast_forward(_device), _key)
