"""Batches that a backward pass is run on: random ones by seed, or the user's own from a safetensors file.

Everything is checked here, once and by name, so that a kernel never sees a tensor that it would misread. A refusal
names the tensor, what it is and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.reference import attention_forward, round_to

HEAD_DIM = 64
DTYPES = (torch.bfloat16,)
REQUIRED = ("q", "k", "v", "dout")
OPTIONAL = ("out", "lse")


class InputError(ValueError):
    """A batch that cannot be run; the message names the tensor or number, its value and what is allowed."""


class Shape(NamedTuple):
    """What is free in a batch; head_dim is 64."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int


@dataclass(frozen=True)
class Batch:
    """One backward problem: what the forward read and stored, and the gradient of its output.

    q, dout, out: (batch, seqlen_q, heads, 64) bf16; k, v: (batch, seqlen_k, heads, 64) bf16; any strides.
    lse: (batch, heads, seqlen_q) float32, natural logarithm.
    computed: those of out and lse that the float64 reference made, because nobody gave them.
    Raises: InputError for a wrong type, rank, shape or an element that is not finite.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    computed: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        check_tensors({name: getattr(self, name) for name in REQUIRED + OPTIONAL})

    @property
    def shape(self) -> Shape:
        batch, seqlen_q, heads, _ = self.q.shape
        return Shape(batch, seqlen_q, self.k.shape[1], heads)


def random_batch(shape: Shape, seed: int = 0) -> Batch:
    """Normal random q, k, v, dout rounded to bf16; out and lse from the reference.

    Raises: InputError for an extent below 1 or a seed outside [0, 2**63).
    """
    if not 0 <= seed < 2**63:
        raise InputError(f"seed={seed}: must be in [0, 2**63)")
    for name, extent in zip(Shape._fields, shape):
        if extent < 1:
            raise InputError(f"{name}={extent}: must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    rows, keys = ((shape.batch, seqlen, shape.heads, HEAD_DIM) for seqlen in (shape.seqlen_q, shape.seqlen_k))
    q, k, v, dout = (torch.randn(size, generator=generator).bfloat16() for size in (rows, keys, keys, rows))
    return complete({"q": q, "k": k, "v": v, "dout": dout})


def read_batch(path: str | Path) -> Batch:
    """The batch in a safetensors file: tensors q, k, v, dout, and out and lse if they are there; others are ignored.

    Raises: InputError if the file cannot be read as safetensors, lacks a tensor or holds a wrong one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            held = list(file.keys())
            # clone: a file promises no alignment, a kernel needs 16 bytes
            tensors = {name: file.get_tensor(name).clone() for name in REQUIRED + OPTIONAL if name in held}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from error
    for name in REQUIRED:
        if name not in tensors:
            raise InputError(
                f"{path}: tensor {name} is missing; needed are {', '.join(REQUIRED)}, the file holds "
                f"{', '.join(sorted(held)) or 'none'}"
            )
    try:
        return complete(tensors)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def complete(tensors: Mapping[str, Tensor]) -> Batch:
    """A batch from q, k, v, dout and perhaps out and lse; the reference makes what is not given, rounded once.

    Raises: InputError as for Batch.
    """
    check_tensors(tensors)
    missing = tuple(name for name in OPTIONAL if name not in tensors)
    made: dict[str, Tensor] = {}
    if missing:
        forward = attention_forward(tensors["q"], tensors["k"], tensors["v"])
        made = {"out": round_to(forward.out, torch.bfloat16).bfloat16(), "lse": forward.lse.float()}
    return Batch(*({**made, **tensors}[name] for name in REQUIRED + OPTIONAL), computed=missing)


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not one batch; out and lse may be absent.

    Raises: InputError naming the first that is wrong.
    """
    for name, tensor in tensors.items():
        _check_dtype(name, tensor)
        _check_rank(name, tensor)
    q, k = tensors["q"], tensors["k"]
    for name in ("q", "k"):
        _check_extents(name, tensors[name])
    if k.shape[2] != q.shape[2]:
        raise InputError(
            f"k has {k.shape[2]} heads, q has {q.shape[2]}: must be equal (grouped query heads are not supported yet)"
        )
    expected = {"k": (q.shape[0], k.shape[1], *q.shape[2:]), "lse": (q.shape[0], q.shape[2], q.shape[1])}
    for name, tensor in tensors.items():
        shape = tuple(expected.get(name, expected["k"] if name == "v" else q.shape))
        if tuple(tensor.shape) != shape:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}: must be {shape} beside q and k")
    for name, tensor in tensors.items():
        _check_finite(name, tensor)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if name == "lse":
        if tensor.dtype != torch.float32:
            raise InputError(f"lse has dtype {tensor.dtype}: must be torch.float32")
    elif tensor.dtype == torch.float16:
        raise InputError(f"{name} has dtype torch.float16: not supported yet, must be torch.bfloat16")
    elif tensor.dtype not in DTYPES:
        raise InputError(f"{name} has dtype {tensor.dtype}: must be torch.bfloat16")


def _check_rank(name: str, tensor: Tensor) -> None:
    axes = ("batch", "heads", "seqlen_q") if name == "lse" else ("batch", "seqlen", "heads", "head_dim")
    if tensor.dim() != len(axes):
        raise InputError(f"{name} has shape {tuple(tensor.shape)}: must be ({', '.join(axes)})")


def _check_extents(name: str, tensor: Tensor) -> None:
    if tensor.shape[3] != HEAD_DIM:
        raise InputError(f"{name} has head_dim {tensor.shape[3]}: must be {HEAD_DIM}")
    for axis, extent in zip(("batch", "seqlen", "heads"), tensor.shape):
        if extent == 0:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}: {axis} must be at least 1")


def _check_finite(name: str, tensor: Tensor) -> None:
    finite = torch.isfinite(tensor)
    if finite.all():
        return
    wrong = torch.nonzero(~finite)
    first = tuple(wrong[0].tolist())
    hint = "; -inf is the LSE of a row without keys, which dense attention has not" if name == "lse" else ""
    raise InputError(
        f"{name}{list(first)} is {tensor[first].item()}, one of {len(wrong)} such elements: must be finite{hint}"
    )
