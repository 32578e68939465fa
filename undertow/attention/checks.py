"""Refusals: what describes no attention is said by name, before anything is allocated or launched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from undertow.attention.problem import DEVICES, DTYPES, AttentionInputError, Inputs, Problem, require_tensors
from undertow.kernels.sm100.tensors import Sequences


def check(call: Inputs) -> None:
    """Refuse ranks, shapes, dtypes and devices that do not fit together. Reads no contents.

    Raises: AttentionInputError naming the first tensor that is wrong.
    """
    require_tensors(q=call.q, k=call.k, v=call.v)
    axes = ("batch", "seqlen", "heads", "head_dim") if call.sequences is None else ("rows", "heads", "head_dim")
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if x.dim() != len(axes):
            raise AttentionInputError(f"{name} has shape {tuple(x.shape)}: must be ({', '.join(axes)})")
    q, k = call.q, call.k
    if q.dtype not in DTYPES:
        raise AttentionInputError(f"q has dtype {q.dtype}: must be one of {', '.join(map(str, DTYPES))}")
    if q.device.type not in DEVICES and q.device.type != "meta":
        raise AttentionInputError(f"q is on {q.device}: must be on {' or '.join(DEVICES)}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise AttentionInputError(f"k has {kv_heads} heads, q has {heads}: heads of k must divide those of q")
    if q.shape[-1] == 0:
        raise AttentionInputError(f"q has shape {tuple(q.shape)}: head_dim must be at least 1")
    key = (*q.shape[:-3], k.shape[-3], kv_heads, q.shape[-1])
    for name, x in (("k", k), ("v", call.v)):
        _check_one(name, x, key, q.dtype, q)
    if call.sink is not None:
        if not call.sink.is_floating_point():
            raise AttentionInputError(f"learnable_sink has dtype {call.sink.dtype}: must be floating point")
        _check_one("learnable_sink", call.sink, (heads,), call.sink.dtype, q)
    if isinstance(call, Problem):
        for name, x in (("out", call.out), ("dout", call.dout)):
            _check_one(name, x, tuple(q.shape), q.dtype, q)
        for name, x in (("lse", call.lse), ("dlse", call.dlse)):
            if x is not None:
                _check_one(name, x, call.lse_shape, call.lse_dtype, q)
    if call.sequences is not None:
        _check_sequences(call.sequences, q)


def _check_one(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, q: Tensor) -> None:
    require_tensors(**{name: x})
    if tuple(x.shape) != shape:
        raise AttentionInputError(f"{name} has shape {tuple(x.shape)}: must be {shape} beside q of {tuple(q.shape)}")
    if x.dtype != dtype:
        raise AttentionInputError(f"{name} has dtype {x.dtype}: must be {dtype}")
    if x.device != q.device:
        raise AttentionInputError(f"{name} is on {x.device}: must be on {q.device}, where q is")


def _check_sequences(sequences: Sequences, q: Tensor) -> None:
    offsets = sequences.cu_seqlens_q
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise AttentionInputError(f"cu_seqlens_q has shape {tuple(offsets.shape)}: must be (sequences + 1,)")
    count = offsets.shape[0] - 1
    for name, x in vars(sequences).items():
        if x is not None:
            shape = (count + 1,) if name.startswith("cu_seqlens") else (count,)
            _check_one(name, x, shape, torch.int32, q)


def check_contents(call: Inputs) -> None:
    """Refuse offsets and lengths that are none. On the CPU only: on a GPU reading them would wait for the device.

    Raises: AttentionInputError.
    """
    if call.sequences is None or call.q.device.type != "cpu":
        return
    for side, rows in (("q", call.q.shape[0]), ("k", call.k.shape[0])):
        offsets = getattr(call.sequences, f"cu_seqlens_{side}").tolist()
        if offsets[0] != 0 or any(first > end for first, end in pairwise(offsets)) or offsets[-1] > rows:
            raise AttentionInputError(
                f"cu_seqlens_{side}={_short(offsets)}: must ascend from 0 to at most {rows}, the rows of {side}"
            )
        used = getattr(call.sequences, f"seqused_{side}")
        if used is not None:
            lengths = [end - first for first, end in pairwise(offsets)]
            for index, (length, most) in enumerate(zip(used.tolist(), lengths)):
                if not 0 <= length <= most:
                    raise AttentionInputError(
                        f"seqused_{side}[{index}]={length}: must be in [0, {most}], the rows of that sequence"
                    )


def check_max_seqlen(call: Inputs, max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """Refuse a maximum below the longest sequence. No kernel of ours needs one, so that none can cut a sequence off.

    max_seqlen_q, max_seqlen_k: integers, tensors of one element, or None. Only tensors on the CPU are looked at, for
    on a GPU the longest sequence is known to the device only.
    Raises: AttentionInputError.
    """
    if call.sequences is None or call.q.device.type != "cpu":
        return
    for side, given in (("q", max_seqlen_q), ("k", max_seqlen_k)):
        if given is None:
            continue
        try:
            most = int(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise AttentionInputError(f"max_seqlen_{side}={given!r}: must be an integer or None") from error
        used = getattr(call.sequences, f"seqused_{side}")
        lengths = getattr(call.sequences, f"cu_seqlens_{side}").diff() if used is None else used
        longest = int(lengths.max()) if lengths.numel() else 0
        if most < longest:
            raise AttentionInputError(f"max_seqlen_{side}={most}: must be at least {longest}, the longest sequence")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
