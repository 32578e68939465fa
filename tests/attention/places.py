"""Where a test of attention runs: on the CPU by the reference or by the emulated kernels, or on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import undertow
from tests.public_cases.batches import BF16, randn
from undertow.reference import DENSE, Gradients, Scoring, attention_backward
from undertow.tolerance import yardstick


class Place(NamedTuple):
    """device: of the tensors. backend: who computes the gradients."""

    device: str
    backend: str

    def leaf(self, x: Tensor) -> Tensor:
        """A copy of `x` there, with its strides, that collects its gradient."""
        return on(self.device, x).requires_grad_()


REFERENCE, EMULATOR, GPU = Place("cpu", "reference"), Place("cpu", "emulator"), Place("cuda", "auto")


def on(device: str, x: Tensor) -> Tensor:
    """A copy of `x` on `device` with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def inputs(
    lengths: tuple[int, int],
    heads: tuple[int, int] = (2, 2),
    batch: int | None = 1,
    dtype: torch.dtype = BF16,
    head_dim: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout from seeds 0 to 3; without a batch dimension if `batch` is None."""
    lead = () if batch is None else (batch,)
    (seqlen_q, seqlen_k), (query_heads, kv_heads) = lengths, heads
    rows, keys = (*lead, seqlen_q, query_heads, head_dim), (*lead, seqlen_k, kv_heads, head_dim)
    q, k, v, dout = (randn(seed, *shape).to(dtype) for seed, shape in enumerate((rows, keys, keys, rows)))
    return q, k, v, dout


def grad_of(leaf: Tensor) -> Tensor:
    """The gradient that has arrived at `leaf`; there must be one."""
    assert leaf.grad is not None
    return leaf.grad


def compiled(function: Any, backend: str = "aot_eager", **how: Any) -> Any:
    """`function` as one graph, or an error."""
    return torch.compile(function, backend=backend, fullgraph=True, **how)


class Ran(NamedTuple):
    """What one forward and one backward pass gave, on the CPU."""

    out: Tensor
    lse: Tensor
    grads: Gradients
    dsink: Tensor | None


class Saved(NamedTuple):
    """What a backward pass was given, for the yardstick."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor


def run(place: Place, tensors: tuple[Tensor, ...], dlse: Tensor | None = None, **options: Any) -> Ran:
    """Forward and backward at a place: tensors are q, k, v, dout; a `cu_seqlens_q` makes the sequences packed."""
    q, k, v = (place.leaf(x) for x in tensors[:3])
    sink = options.pop("learnable_sink", None)
    sink = None if sink is None else place.leaf(sink)
    options = {name: x.to(place.device) if isinstance(x, Tensor) else x for name, x in options.items()}
    function = undertow.flash_attn_varlen_func if "cu_seqlens_q" in options else undertow.flash_attn_func
    out, lse = function(q, k, v, learnable_sink=sink, return_lse=True, backend=place.backend, **options)
    dout = tensors[3].to(place.device) if tensors[3].device.type != place.device else tensors[3]
    torch.autograd.backward(*(((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse.to(place.device)))))
    dq, dk, dv = (grad_of(x).cpu() for x in (q, k, v))
    dsink = None if sink is None else grad_of(sink).cpu()
    return Ran(out.detach().cpu(), lse.detach().cpu(), Gradients(dq, dk, dv), dsink)


def complaints(
    tensors: tuple[Tensor, ...], ran: Ran, scoring: Scoring = DENSE, dlse: Tensor | None = None
) -> list[str]:
    """The gradients whose error against float64 exceeds 1.25 times that of the ideal pipeline."""
    q, k, v, dout = tensors
    measure = yardstick(Saved(q, k, v, dout, ran.out, ran.lse), scoring, dlse)
    errors, budgets = measure.errors(ran.grads), measure.budget
    return [f"{n}: {e:.3e} > {b:.3e}" for n, e, b in zip(("dq", "dk", "dv"), errors, budgets) if not e <= b]


def exact(tensors: tuple[Tensor, ...], scoring: Scoring = DENSE, dlse: Tensor | None = None) -> Gradients:
    """The gradients in float64."""
    q, k, v, dout = tensors
    return attention_backward(q, k, v, dout, dlse, scoring)
