"""What a backward pass reads and writes, and what the kernels cannot take, said by name before anything is launched.

Layouts: rows are (batch, seqlen, heads, 64) with any strides, LSE is (batch, heads, seqlen_q) fp32. Packed sequences
have no batch dimension; the kernels see them as the rows of one batch element.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace

import torch

from undertow.kernels.sm100.layouts import DQ_ACCUMULATOR_TILE, ROW_KERNEL_THREADS, num_tiles
from undertow.kernels.sm100.plan import HEAD_DIM, TILE_M, TILE_N
from undertow.plan.schema import DType, Plan
from undertow.plan.tiles import MAX_SEQLEN

ALIGNMENT = 16  # bytes; of every base address and stride, for 16-byte accesses and for TMA
MAX_HEADS = 2**20  # so that products of heads and tiles stay far from 2^31
TORCH_TYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}


class LaunchInputError(ValueError):
    """A tensor or scalar that the kernels cannot take; the message names it, its value and what is allowed."""


@dataclass(frozen=True)
class Sequences:
    """Packed sequences: they follow one another along the rows of tensors without a batch dimension.

    cu_seqlens_q, cu_seqlens_k: (sequences + 1) int32, ascending from 0: sequence b has the rows [cu[b], cu[b + 1]).
    seqused_q, seqused_k: (sequences) int32: only the first rows of a sequence hold data; None: all do.
    Gradients of rows that hold no data, those behind the last sequence included, are zero. Their values do not matter.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1


@dataclass(frozen=True)
class BackwardTensors:
    """What a backward pass reads and, in dq, dk, dv and dsink, writes. Nothing is copied.

    q, out, dout, dq: (batch, seqlen_q, heads, 64); k, v, dk, dv: (batch, seqlen_k, kv_heads, 64), all of the plan's
    type; kv_heads divides heads, and query head h reads key/value head h // (heads / kv_heads).
    lse: (batch, heads, seqlen_q) fp32, natural logarithm, -inf where a row attended nothing; it includes a sink.
    dlse: the gradient that flows into lse, like it, or None. sink, dsink: (heads) fp32, a score without a key, or None.
    sequences: if the sequences are packed; then no tensor has the first dimension.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    _: KW_ONLY
    dlse: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    dsink: torch.Tensor | None = None
    sequences: Sequences | None = None

    @property
    def batched(self) -> BackwardTensors:
        """The same with packed rows as those of a single batch element."""
        if self.sequences is None:
            return self
        names = [field.name for field in fields(self) if field.name not in ("sink", "dsink", "sequences")]
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{name: None if x is None else x.unsqueeze(0) for name, x in given.items()})


@dataclass(frozen=True)
class Workspaces:
    """Buffers between the kernels, in whole tiles of query rows; preprocess fills every element of them.

    Packed sequences share a batch element; every sequence has tiles of its own (`kernels.sm100.sequences`).
    """

    lse_log2: torch.Tensor  # (batch, heads, padded rows) fp32
    d: torch.Tensor  # (batch, heads, padded rows) fp32
    dq_accumulator: torch.Tensor  # (batch, heads, tiles, 8192) fp32
    turns: torch.Tensor | None = None  # (batch, heads, tiles) int32, in deterministic mode
    dsink_parts: torch.Tensor | None = None  # (batch, heads, 8 tiles) fp32, with a sink


def allocate_workspaces(tensors: BackwardTensors, deterministic: bool = False) -> Workspaces:
    """Allocate the buffers for a backward pass, on the device of q."""
    batch, _, heads, _ = tensors.batched.q.shape
    tiles = query_tiles(tensors)
    rows = (batch, heads, tiles * TILE_M)

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return tensors.q.new_empty(shape, dtype=dtype)

    return Workspaces(
        buffer(*rows),
        buffer(*rows),
        buffer(batch, heads, tiles, DQ_ACCUMULATOR_TILE),
        buffer(batch, heads, tiles, dtype=torch.int32) if deterministic else None,
        buffer(batch, heads, tiles * (ROW_KERNEL_THREADS // 32)) if tensors.sink is not None else None,
    )


def dtype_of(tensors: BackwardTensors) -> DType:
    """The element type of the kernels for a call.

    Raises: LaunchInputError for one without kernels.
    """
    for ours, theirs in TORCH_TYPES.items():
        if theirs == tensors.q.dtype:
            return ours
    raise LaunchInputError(f"q has dtype {tensors.q.dtype}: must be torch.bfloat16 or torch.float16")


def query_tiles(tensors: BackwardTensors) -> int:
    """Tiles of query rows of a batch element in the workspaces."""
    return _tiles(tensors.batched.q.shape[1], TILE_M, tensors.sequences)


def kv_tiles(tensors: BackwardTensors) -> int:
    """Key/value tiles of a batch element and head, each of which gets a CTA."""
    return _tiles(tensors.batched.k.shape[1], TILE_N, tensors.sequences)


def _tiles(rows: int, tile: int, sequences: Sequences | None) -> int:
    """Tiles that cover the rows; of packed sequences enough for any lengths, and for the rows behind the last one."""
    return num_tiles(rows, tile) if sequences is None else rows // tile + sequences.count + 1


def check_tensors(plan: Plan, tensors: BackwardTensors) -> None:
    """Refuse what the kernels cannot take.

    Raises: LaunchInputError for a wrong rank, shape, type, device, stride or alignment, naming the tensor.
    """
    packed = tensors.sequences is not None
    rank, axes = (3, f"(rows, heads, {HEAD_DIM})") if packed else (4, f"(batch, seqlen, heads, {HEAD_DIM})")
    for name in ("q", "k"):
        tensor = getattr(tensors, name)
        if tensor.ndim != rank:
            raise LaunchInputError(f"{name} has shape {tuple(tensor.shape)}: must be {axes}")
    whole = tensors.batched
    (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = whole.q.shape, whole.k.shape
    _check_extents({"heads": heads, "kv_heads": kv_heads}, {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k})
    query, key = (*tensors.q.shape[:-2], heads, HEAD_DIM), (*tensors.q.shape[:-3], seqlen_k, kv_heads, HEAD_DIM)
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        tensor, shape = getattr(tensors, name), key if name in ("k", "v", "dk", "dv") else query
        _check_one(name, tensor, shape, TORCH_TYPES[plan.dtype], tensors.q.device)
        _check_vectors(name, tensor, written=name in ("dq", "dk", "dv"))
    scalars = (*tensors.q.shape[:-3], heads, seqlen_q)
    for name, shape in (("lse", scalars), ("dlse", scalars), ("sink", (heads,)), ("dsink", (heads,))):
        tensor = getattr(tensors, name)
        if tensor is not None:
            _check_one(name, tensor, shape, torch.float32, tensors.q.device)
    if (tensors.sink is None) != (tensors.dsink is None):
        raise LaunchInputError("sink and dsink: one is given and the other is None; must be both or none")
    if tensors.sequences is not None:
        _check_sequences(tensors.sequences, tensors.q.device)


def _check_extents(positive: dict[str, int], any_number: dict[str, int]) -> None:
    for name, extent in positive.items():
        if not 1 <= extent <= MAX_HEADS:
            raise LaunchInputError(f"{name}={extent}: must be in [1, {MAX_HEADS}]")
    for name, extent in any_number.items():
        if extent > MAX_SEQLEN:
            raise LaunchInputError(f"{name}={extent}: must be at most {MAX_SEQLEN}")
    heads, kv_heads = positive.values()
    if heads % kv_heads:
        raise LaunchInputError(f"k has {kv_heads} heads, q has {heads}: heads of k must divide those of q")


def _check_sequences(sequences: Sequences, device: torch.device) -> None:
    count = sequences.count
    if sequences.cu_seqlens_q.ndim != 1 or count < 0:
        raise LaunchInputError(
            f"cu_seqlens_q has shape {tuple(sequences.cu_seqlens_q.shape)}: must be (sequences + 1,)"
        )
    for field in fields(sequences):
        tensor = getattr(sequences, field.name)
        if tensor is not None:
            shape = (count + 1,) if field.name.startswith("cu_seqlens") else (count,)
            _check_one(field.name, tensor, shape, torch.int32, device)


def _check_one(name: str, tensor: torch.Tensor, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    if tuple(tensor.shape) != shape:
        raise LaunchInputError(f"{name} has shape {tuple(tensor.shape)}: must be {shape}")
    if tensor.dtype != dtype:
        raise LaunchInputError(f"{name} has dtype {tensor.dtype}: must be {dtype}")
    if tensor.device != device:
        raise LaunchInputError(f"{name} is on {tensor.device}: must be on {device}, where q is")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise LaunchInputError(f"{name} has stride {tensor.stride(-1)} in its last dimension: must be contiguous there")


def _check_vectors(name: str, tensor: torch.Tensor, written: bool) -> None:
    """Rows are accessed in 16-byte vectors and by TMA."""
    if tensor.data_ptr() % ALIGNMENT:
        raise LaunchInputError(
            f"{name} begins at an address that is {tensor.data_ptr() % ALIGNMENT} mod {ALIGNMENT}: must be 0"
        )
    for dim, extent in enumerate(tensor.shape[:-1]):
        step = tensor.stride(dim) * tensor.element_size()
        if extent > 1 and step % ALIGNMENT:
            raise LaunchInputError(
                f"{name} has a stride of {step} bytes in dimension {dim}: must be a multiple of {ALIGNMENT}"
            )
        if extent > 1 and step == 0 and written:
            raise LaunchInputError(f"{name} has stride 0 in dimension {dim}: a result must own its memory")
