"""Batches that a backward pass is run on: random ones by seed, or the user's own from a safetensors file.

Everything is checked here, once and by name, so that a kernel never sees a tensor that it would misread. A refusal
names the tensor, what it is and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.reference import DENSE, Scoring, Sequences, attention_forward, round_to

HEAD_DIM = 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
REQUIRED = ("q", "k", "v", "dout")
OPTIONAL = ("out", "lse")
PACKING = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


class InputError(ValueError):
    """A batch that cannot be run; the message names the tensor or number, its value and what is allowed."""


class Shape(NamedTuple):
    """What is free in a batch; head_dim is 64. kv_heads divides heads; None, which only asks, is as many as heads.

    Of packed sequences: how many, the rows of all of them, and the rows of all their keys.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int | None = None


@dataclass(frozen=True)
class Batch:
    """One backward problem: what the forward read and stored, and the gradient of its output.

    q, dout, out: (batch, seqlen_q, heads, 64); k, v: (batch, seqlen_k, kv_heads, 64). All bf16 or all fp16, of
    any strides.
    lse: (batch, heads, seqlen_q) float32, natural logarithm; -inf where a row sees no key.
    scoring: scale, mask and whatever else makes P of q and k. Packed sequences have no batch dimension, and rows that
    are not used may hold anything. dlse: gradient that flows into lse, like it, or None.
    computed: those of out and lse that the float64 reference made, because nobody gave them.
    Raises: InputError for a wrong type, rank, shape or an element that is not finite.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    scoring: Scoring = field(default=DENSE, kw_only=True)
    dlse: Tensor | None = field(default=None, kw_only=True)
    computed: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in REQUIRED + OPTIONAL}
        check_tensors(given if self.dlse is None else {**given, "dlse": self.dlse}, self.scoring)

    @property
    def shape(self) -> Shape:
        sequences = self.scoring.sequences
        batch = self.q.shape[0] if sequences is None else len(sequences.cu_seqlens_q) - 1
        return Shape(batch, *(x.shape[-3] for x in (self.q, self.k)), *(x.shape[-2] for x in (self.q, self.k)))


def random_batch(shape: Shape, seed: int = 0, scoring: Scoring = DENSE, dtype: torch.dtype = torch.bfloat16) -> Batch:
    """Normal random q, k, v, dout rounded to `dtype`; out and lse from the reference.

    Raises: InputError for an extent below 1 or a seed outside [0, 2**63).
    """
    if not 0 <= seed < 2**63:
        raise InputError(f"seed={seed}: must be in [0, 2**63)")
    kv_heads = shape.heads if shape.kv_heads is None else shape.kv_heads
    for name, extent in zip(Shape._fields, (*shape[:-1], kv_heads)):
        if extent < 1:
            raise InputError(f"{name}={extent}: must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    batch = (shape.batch,) if scoring.sequences is None else ()
    rows, keys = (*batch, shape.seqlen_q, shape.heads, HEAD_DIM), (*batch, shape.seqlen_k, kv_heads, HEAD_DIM)
    q, k, v, dout = (torch.randn(size, generator=generator).to(dtype) for size in (rows, keys, keys, rows))
    return complete({"q": q, "k": k, "v": v, "dout": dout}, scoring)


def read_batch(path: str | Path, scoring: Scoring = DENSE) -> Batch:
    """The batch in a safetensors file: tensors q, k, v, dout, and what there is of out, lse, dlse, sink and PACKING.

    scoring: what the file does not say. Other tensors are ignored.
    Raises: InputError if the file cannot be read as safetensors, lacks a tensor or holds a wrong one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            held = list(file.keys())
            # clone: a file promises no alignment, a kernel needs 16 bytes
            wanted = (*REQUIRED, *OPTIONAL, "dlse", "sink", *PACKING)
            tensors = {name: file.get_tensor(name).clone() for name in wanted if name in held}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from error
    for name in REQUIRED:
        if name not in tensors:
            raise InputError(
                f"{path}: tensor {name} is missing; needed are {', '.join(REQUIRED)}, the file holds "
                f"{', '.join(sorted(held)) or 'none'}"
            )
    try:
        packing = {name: tensors.pop(name) for name in PACKING if name in tensors}
        if packing:
            scoring = replace(scoring, sequences=_sequences(packing))
        return complete(tensors, replace(scoring, sink=tensors.pop("sink", None)))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _sequences(packing: Mapping[str, Tensor]) -> Sequences:
    for name in PACKING[:2]:
        if name not in packing:
            raise InputError(f"tensor {name} is missing beside {', '.join(packing)}")
    count = len(packing[PACKING[0]]) - 1
    for name, tensor in packing.items():
        shape = (count + 1,) if name in PACKING[:2] else (count,)
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
            raise InputError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: must be torch.int32 of {shape}")
    return Sequences(**packing)


def complete(tensors: Mapping[str, Tensor], scoring: Scoring = DENSE) -> Batch:
    """A batch from q, k, v, dout and perhaps out, lse and dlse; the reference makes out and lse, rounded once.

    Raises: InputError as for Batch.
    """
    check_tensors(tensors, scoring)
    missing = tuple(name for name in OPTIONAL if name not in tensors)
    made: dict[str, Tensor] = {}
    if missing:
        forward = attention_forward(tensors["q"], tensors["k"], tensors["v"], scoring)
        dtype = tensors["q"].dtype
        made = {"out": round_to(forward.out, dtype).to(dtype), "lse": forward.lse.float()}
    given = {**made, **tensors}
    tensors_of_batch = (given[name] for name in REQUIRED + OPTIONAL)
    return Batch(*tensors_of_batch, scoring=scoring, dlse=given.get("dlse"), computed=missing)


def check_tensors(tensors: Mapping[str, Tensor], scoring: Scoring = DENSE) -> None:
    """Refuse tensors that are not one batch; out and lse may be absent.

    Raises: InputError naming the first that is wrong.
    """
    for name, tensor in tensors.items():
        _check_dtype(name, tensor, tensors["q"].dtype)
        _check_rank(name, tensor, packed=scoring.sequences is not None)
    q, k = tensors["q"], tensors["k"]
    for name in ("q", "k"):
        _check_extents(name, tensors[name])
    (*batch, seqlen_q, heads, _), (seqlen_k, kv_heads) = q.shape, k.shape[-3:-1]
    if heads % kv_heads:
        raise InputError(f"k has {kv_heads} heads, q has {heads}: heads of k must divide those of q")
    expected = {"q": q.shape, "k": (*batch, seqlen_k, kv_heads, HEAD_DIM), "lse": (*batch, heads, seqlen_q)}
    for name, tensor in tensors.items():
        shape = tuple(expected[{"v": "k", "dlse": "lse"}.get(name, name if name in expected else "q")])
        if tuple(tensor.shape) != shape:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}: must be {shape} beside q and k")
    for name, tensor in tensors.items():
        _check_finite(name, tensor, scoring)


def _check_dtype(name: str, tensor: Tensor, of_q: torch.dtype) -> None:
    if name in ("lse", "dlse"):
        if tensor.dtype != torch.float32:
            raise InputError(f"{name} has dtype {tensor.dtype}: must be torch.float32")
    elif tensor.dtype not in DTYPES.values():
        raise InputError(f"{name} has dtype {tensor.dtype}: must be {' or '.join(map(str, DTYPES.values()))}")
    elif tensor.dtype != of_q:
        raise InputError(f"{name} has dtype {tensor.dtype}: must be {of_q}, as q has")


def _check_rank(name: str, tensor: Tensor, packed: bool) -> None:
    axes = ("batch", "heads", "seqlen_q") if name in ("lse", "dlse") else ("batch", "seqlen", "heads", "head_dim")
    axes = axes[1:] if packed else axes
    if tensor.dim() != len(axes):
        raise InputError(f"{name} has shape {tuple(tensor.shape)}: must be ({', '.join(axes)})")


def _check_extents(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] != HEAD_DIM:
        raise InputError(f"{name} has head_dim {tensor.shape[-1]}: must be {HEAD_DIM}")
    for axis, extent in zip(("heads", "seqlen", "batch"), tensor.shape[-2::-1]):
        if extent == 0:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}: {axis} must be at least 1")


def _check_finite(name: str, tensor: Tensor, scoring: Scoring) -> None:
    finite = torch.isfinite(tensor)
    if name == "lse" and scoring.leaves_rows_empty:
        finite |= tensor == -torch.inf
    if scoring.sequences is not None:
        finite |= ~_used(name, tensor, scoring.sequences)
    if finite.all():
        return
    wrong = torch.nonzero(~finite)
    first = tuple(wrong[0].tolist())
    hint = "; -inf is the LSE of a row without keys, which attention without a mask has not" if name == "lse" else ""
    raise InputError(
        f"{name}{list(first)} is {tensor[first].item()}, one of {len(wrong)} such elements: must be finite{hint}"
    )


def _used(name: str, tensor: Tensor, sequences: Sequences) -> Tensor:
    """Which elements belong to a row that a packed sequence uses."""
    used = torch.zeros_like(tensor, dtype=torch.bool)
    for queries, keys in sequences.used():
        rows = keys if name in ("k", "v") else queries
        if name in ("lse", "dlse"):
            used[:, rows.start : rows.stop] = True
        else:
            used[rows.start : rows.stop] = True
    return used
