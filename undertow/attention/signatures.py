"""The functions that a user calls, with the argument names of flash-attn; longer lists of parameters than elsewhere.

Options are keywords only: the positions differ between the releases of flash-attn, and a number in the wrong place
would be taken for another.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from undertow.attention.autograd import Request, attend, differentiate
from undertow.attention.explanation import Explanation, explanation_of
from undertow.attention.prepared import again
from undertow.attention.problem import Problem, require_tensors

Window = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
    strict: bool | None = None,
) -> Any:
    """Attention, differentiable by q, k, v and the sink.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, kv_heads, head_dim), kv_heads divides heads; of any
    strides, all bf16, fp16, fp32 or fp64. Our kernels take head dim 64 in bf16 and fp16; the rest falls back, logged.
    softmax_scale: any finite number, None is 1 / sqrt(head_dim). causal: row i sees keys j <= i + seqlen_k - seqlen_q.
    window_size: (left, right), inclusive bounds around that j; None and -1 are no bound. softcap: 0 is none.
    learnable_sink: (heads), a score of every row without a key. deterministic: the same bits in every run; so asks
    `torch.use_deterministic_algorithms` too. backend, strict: who computes the gradients, see `explain`.
    Returns out like q, contiguous; with return_lse (out, lse), lse (batch, heads, seqlen_q) in natural logarithm, -inf
    where a row sees nothing, and differentiable. Gradients have the dtypes and the (made dense) strides of the inputs.
    Error: gradients of our kernels stay within 1.25 times the error of an ideal 16-bit pipeline, plus float32 noise.
    Raises: AttentionInputError, BackendError, both ValueError, before anything is launched.
    """
    request = Request(
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        learnable_sink,
        backend=backend,
        strict=strict,
    )
    out, lse = attend(q, k, v, request)
    return (out, lse) if return_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
    strict: bool | None = None,
) -> Any:
    """Attention over packed sequences, differentiable by q, k, v and the sink.

    q: (rows, heads, head_dim); k, v: (keys, kv_heads, head_dim). cu_seqlens_q, cu_seqlens_k: (sequences + 1) int32,
    ascending from 0: sequence b has the rows [cu[b], cu[b + 1]). seqused_q, seqused_k: (sequences) int32, only the
    first rows of a sequence hold data. Rows without data, those behind the last sequence included, may hold anything:
    their out is 0, their LSE -inf, their gradients 0.
    max_seqlen_q, max_seqlen_k: not needed, integers or tensors of one element. On the CPU one below the longest
    sequence is refused; on a GPU they are ignored, for nothing there waits to learn the lengths. No sequence is cut.
    The rest, Returns (lse: (heads, rows)), Error and Raises: as `flash_attn_func`.
    """
    request = Request(
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        learnable_sink,
        _packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        (max_seqlen_q, max_seqlen_k),
        backend,
        strict,
    )
    out, lse = attend(q, k, v, request)
    return (out, lse) if return_lse else out


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    strict: bool | None = None,
) -> tuple[Tensor, ...]:
    """The backward pass alone: (dq, dk, dv), and with a sink dsink as the fourth.

    dout, out: like q. lse: (batch, heads, seqlen_q), packed (heads, rows), float32 (float64 beside float64 rows), in
    natural logarithm. out and lse are trusted, so they may be those of more keys than k holds: dq, dk, dv of the parts
    of k and v, each with the whole out and lse, add up to those of the whole. dlse: gradient of lse, like it.
    cu_seqlens_q given: packed sequences, as in `flash_attn_varlen_func`. The rest: as `flash_attn_func`.
    Raises: AttentionInputError, BackendError.
    """
    options = _options(softmax_scale, causal, window_size, softcap, deterministic, backend)
    more = None
    if not (dlse is learnable_sink is cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None):
        more = (dlse, learnable_sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    made = again(options, (q, k, v, out, dout, lse), more)
    if made is not None:
        return made
    packing = _packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    request = Request(
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        learnable_sink,
        packing if any(x is not None for x in packing.values()) else None,
        (max_seqlen_q, max_seqlen_k),
        backend,
        strict,
    )
    require_tensors(q=q, k=k, v=v)
    problem = Problem(q, k, v, out=out, lse=lse, dout=dout, dlse=dlse, **request.parts(q))
    gradients = differentiate(problem, request, options)
    return tuple(grad for grad in gradients if grad is not None)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Explanation:
    """Who would compute this call of `flash_attn_func` or `flash_attn_varlen_func`, forward and backward, and why.

    return_lse: whether LSE is differentiated too. Launches nothing; print the answer.
    Raises: AttentionInputError, BackendError as the call would.
    """
    packing = _packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    request = Request(
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        learnable_sink,
        packing if any(x is not None for x in packing.values()) else None,
        backend=backend,
    )
    require_tensors(q=q, k=k, v=v)
    return explanation_of(request.inputs(q, k, v), backend, return_lse)


def _options(
    softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, deterministic: Any, backend: Any
) -> Hashable | None:
    """What tells calls apart besides tensors; None if it cannot. A type is said where True, 1 and 1.0 are not one."""
    if window_size.__class__ is not tuple and window_size.__class__ is not list:
        return None
    return (
        "given",
        backend,
        softmax_scale,
        softmax_scale.__class__,
        causal,
        causal.__class__,
        *window_size,
        *map(type, window_size),
        softcap,
        softcap.__class__,
        deterministic,
        deterministic.__class__,
    )


def _packing(*given: Tensor | None) -> dict[str, Tensor | None]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), given))
