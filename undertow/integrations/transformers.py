"""Hugging Face models on our attention: `register()`, then `model.set_attn_implementation("undertow")`.

Models of head dim 64 that train with a causal mask, a sliding window, a softcap, attention sinks (gpt-oss), grouped
key/value heads, padding or packed sequences. Key/value heads are not repeated, padding is left out of the computation,
and masks are never materialised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undertow.attention.problem import AttentionInputError
from undertow.attention.signatures import flash_attn_func, flash_attn_varlen_func

NAME = "undertow"

# Functions of transformers.masking_utils whose masks are said again by what the attention function is passed:
# is_causal, sliding_window, the padding and the positions. Any other would be lost, so it is refused.
EXPRESSED = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "and_masks",
}


PACKED_WHILE_COMPILED = (
    "position_ids start again within a row, which a compiled graph cannot follow: pass cu_seq_lens_q, cu_seq_lens_k, "
    "max_length_q and max_length_k too, as collators without padding do"
)


def register(backend: str = "auto", strict: bool | None = None) -> str:
    """Make the attention implementation "undertow" known to transformers, and return its name.

    backend, strict: who computes the gradients, as for `undertow.flash_attn_func`. Registering again changes them.
    Raises: ImportError without transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        rows = Rows(*(x.transpose(1, 2) for x in (query, key, value)))
        return attend(module, rows, attention_mask, options, {"backend": backend, "strict": strict}), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    return NAME


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Which keys are no padding, (batch, at most kv_length) bool; None if all are.

    Raises: AttentionInputError for a mask that is not made of a causal or bidirectional one, a sliding window, padding
    and packed sequences.
    """
    if torch.compiler.is_compiling():
        _check_while_tracing(mask_function)
    else:
        _check(mask_function)
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]  # a cache with a sliding window holds the last keys only
    if torch.compiler.is_compiling() or attention_mask.shape[1] < kv_length or not attention_mask.all():
        return attention_mask
    return None


def _check(mask_function: Callable[..., Any]) -> None:
    foreign = sorted(set(_makers(mask_function)) - EXPRESSED)
    if foreign:
        raise AttentionInputError(
            f"mask_function is made by {', '.join(foreign)}: must be a causal or bidirectional mask, perhaps with a "
            f'sliding window; use attn_implementation="eager" or "flex_attention" for other masks'
        )


def _check_while_tracing(mask_function: Callable[..., Any]) -> None:
    """Refuse whatever cannot be looked into while a graph is traced. Without fullgraph=True it is then run eagerly."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is not causal_mask_function and mask_function is not bidirectional_mask_function:
        raise AttentionInputError(
            "mask_function is made of several: must be a causal or bidirectional one under torch.compile with "
            "fullgraph=True; without fullgraph others are looked into at run time"
        )


def _makers(mask_function: Any) -> Iterator[str]:
    """Names of the functions that made a mask function, those that it is composed of included."""
    yield mask_function.__qualname__.partition(".")[0]
    for cell in mask_function.__closure__ or ():
        parts = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        for part in parts:
            if hasattr(part, "__qualname__"):
                yield from _makers(part)


class Rows(NamedTuple):
    """query: (batch, seqlen_q, heads, head_dim); key, value: (batch, seqlen_k, kv_heads, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor


def attend(
    module: torch.nn.Module,
    rows: Rows,
    attention_mask: Tensor | None,
    options: dict[str, Any],
    who: dict[str, Any],
) -> Tensor:
    """What a call of the attention function by a model means: (batch, seqlen_q, heads, head_dim).

    attention_mask: None, or (batch, seqlen_k) with 0 for padding. who: backend and strict.
    options: what models pass by name; dropout, scaling, sliding_window (keys that a row sees, itself included),
    softcap, is_causal, s_aux (the sinks, one per head), position_ids, cu_seq_lens_q and so on are read.
    Raises: AttentionInputError for dropout, attention weights, a bias, or a mask that is not a padding mask.
    """
    _refuse(attention_mask, options)
    is_causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = options.get("sliding_window")
    arguments = {
        "softmax_scale": options.get("scaling"),
        "causal": causal,
        "window_size": (None, None) if window is None else (window - 1, None if causal else window - 1),
        "softcap": options.get("softcap") or 0.0,
        "learnable_sink": options.get("s_aux"),
        **who,
    }
    if attention_mask is not None:
        return _padded(rows, attention_mask, arguments)
    packing = _packing(rows, options)
    if packing is not None:
        flat = (x.reshape(-1, *x.shape[2:]) for x in rows)
        out = flash_attn_varlen_func(*flat, **packing, **arguments)
        return out.view(rows.query.shape)
    return flash_attn_func(*rows, **arguments)


def _refuse(attention_mask: Tensor | None, options: dict[str, Any]) -> None:
    dropout = options.get("dropout") or 0.0
    if dropout != 0.0:
        raise AttentionInputError(
            f"dropout={dropout}: must be 0; set attention_dropout to 0 in the model's configuration"
        )
    for name in ("position_bias", "block_table"):
        if options.get(name) is not None:
            raise AttentionInputError(f"{name} is given: must be None")
    if options.get("output_attentions"):
        raise AttentionInputError('output_attentions=True: must be False; attn_implementation="eager" has the weights')
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.is_floating_point()):
        raise AttentionInputError(
            f"attention_mask is {attention_mask.dtype} of shape {tuple(attention_mask.shape)}: must be (batch, "
            "seqlen_k) of bool or integers that say which keys are no padding"
        )


def _padded(rows: Rows, attention_mask: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Attention without the keys that are padding.

    A mask or a window lines queries up with keys, as the last of them: then query rows that are padding are left out
    too, and have zeros. Without one nothing says that queries are of the same sequence, so all of them are kept.
    """
    lined_up = arguments["causal"] or arguments["window_size"] != (None, None)
    seen = attention_mask.shape[1]  # a cache of fixed size is longer than what was written to it
    query, key, value = rows.query, rows.key[:, :seen], rows.value[:, :seen]
    packing, at_q, at_k = _once(_unpadding if lined_up else _unpadding_keys, attention_mask, query.shape[1])
    q = query.flatten(0, 1).index_select(0, at_q)
    k, v = (x.flatten(0, 1).index_select(0, at_k) for x in (key, value))
    out = flash_attn_varlen_func(q, k, v, **packing, **arguments)
    return out.new_zeros(query.flatten(0, 1).shape).index_copy(0, at_q, out).view(query.shape)


Unpadding = tuple[dict[str, Any], Tensor, Tensor]  # packing of what is no padding, where its query rows and keys are


def _unpadding(attention_mask: Tensor, queries: int) -> Unpadding:
    return _without(attention_mask[:, -queries:], attention_mask)


def _unpadding_keys(attention_mask: Tensor, queries: int) -> Unpadding:
    return _without(attention_mask.new_ones(len(attention_mask), queries), attention_mask)


def _without(of_queries: Tensor, of_keys: Tensor) -> Unpadding:
    packing: dict[str, Any] = {}
    places = []
    for side, mask in (("q", of_queries.bool()), ("k", of_keys.bool())):
        lengths = mask.sum(dim=1, dtype=torch.int32)
        packing[f"cu_seqlens_{side}"] = _offsets(lengths)
        packing[f"max_seqlen_{side}"] = int(lengths.max())
        places.append(mask.flatten().nonzero().flatten())
    at_q, at_k = places
    return packing, at_q, at_k


def _packing(rows: Rows, options: dict[str, Any]) -> dict[str, Any] | None:
    """The packing of sequences that follow one another in a row: as it is given, or where positions do not go on."""
    offsets = [x for x in (options.get(f"cu_seq_lens_{side}") for side in ("q", "k")) if x is not None]
    if len(offsets) == 2:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        longest = [options.get(f"max_length_{side}") for side in ("q", "k")]
        return dict(zip(names, [*(x.to(torch.int32) for x in offsets), *longest]))
    positions = options.get("position_ids")
    batch, seqlen = rows.query.shape[:2]
    if positions is None or positions.dim() != 2 or seqlen == 1 or seqlen != rows.key.shape[1]:
        return None  # new rows behind a cache are one sequence each
    if positions.shape[1] != seqlen:
        return None
    if torch.compiler.is_compiling():  # nothing can be looked at, but a graph can stop
        torch.ops.aten._assert_async.msg((positions.diff(dim=1) == 1).all(), PACKED_WHILE_COMPILED)
        return None
    return _once(_packing_by_position, positions, batch)


def _packing_by_position(positions: Tensor, batch: int) -> dict[str, Any] | None:
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    if not bool(starts[:, 1:].any()):
        return None
    rows = starts.expand(batch, -1).flatten()
    first = torch.nn.functional.pad(rows.nonzero().flatten(), (0, 1), value=rows.numel())
    lengths = first.diff()
    offsets, longest = _offsets(lengths), int(lengths.max())
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


_made: dict[Callable[..., Any], tuple[weakref.ref[Tensor], tuple[int, int], Any]] = {}


@torch.compiler.disable(reason="how much padding there is decides about shapes")
def _once(make: Callable[[Tensor, int], Any], tensor: Tensor, number: int) -> Any:
    """`make(tensor, number)`, once for all layers of a forward pass: they share the tensor; it waits for the GPU."""
    if tensor.is_inference():  # which counts no versions
        return make(tensor, number)
    state = (tensor._version, number)
    last = _made.get(make)
    if last is None or last[0]() is not tensor or last[1] != state:
        last = (weakref.ref(tensor), state, make(tensor, number))
        _made[make] = last
    return last[2]
