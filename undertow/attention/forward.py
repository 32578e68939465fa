"""Forward passes of kept libraries, and of the float64 reference: this package has no forward kernel.

On a GPU the first of flash-attn-4, torch's flash kernel and the reference that can compute a call does; on the CPU the
reference. The reference computes every option in float64, one head and 1024 rows at a time: slow, said once in the log.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undertow import reference
from undertow.attention import libraries
from undertow.attention.backends import scoring_of, stored
from undertow.attention.checks import check, check_contents
from undertow.attention.dispatch import MOST_PLANS, NOTHING, Choice
from undertow.attention.problem import Inputs, LibraryRefusal

_LOG = logging.getLogger("undertow.attention")


class Forward(NamedTuple):
    """out: like q, contiguous, zero in rows that see nothing or are not used. lse: `Inputs.lse_shape`, contiguous."""

    out: Tensor
    lse: Tensor


class _Maker(NamedTuple):
    unable: Callable[[Inputs], str | None]
    run: Callable[[Inputs], Forward]


_plans: dict[Any, Choice] = {}
_counts: Counter[str] = Counter()
_told: set[tuple[str, ...]] = set()
_lock = threading.Lock()


def choose_forward(call: Inputs) -> Choice:
    """Who computes the forward pass of `call`, and why.

    Raises: AttentionInputError for tensors that are no attention.
    """
    choice = _plans.get(call.signature())
    return _decide(call, {}) if choice is None else choice


def run_forward(call: Inputs) -> Forward:
    """Compute out and LSE. Nothing is recorded for autograd.

    Raises: AttentionInputError.
    """
    choice = choose_forward(call)
    check_contents(call)
    while True:
        if choice.backend == "reference" and choice.rejected:
            _tell(choice)
        try:
            result = _run(call, choice)
            break
        except LibraryRefusal as refusal:
            choice = _decide(call, {**choice.rejected, choice.backend: str(refusal)})
    with _lock:
        _counts[choice.backend] += 1
    return result


def _run(call: Inputs, choice: Choice) -> Forward:
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _run(call, choice)
    return _nothing_to_see(call) if choice.backend == NOTHING else MAKERS[choice.backend].run(call)


def _decide(call: Inputs, refused: dict[str, str]) -> Choice:
    """Choose, and remember it. refused: makers that are not asked (again) -> why."""
    check(call)
    choice = _choose(call, refused)
    with _lock:
        while len(_plans) >= MOST_PLANS:
            del _plans[next(iter(_plans))]
        _plans[call.signature()] = choice
    return choice


def forward_counts() -> dict[str, int]:
    """How many forward passes each backend has computed in this process since `reset_forward_counts`."""
    with _lock:
        return dict(_counts)


def reset_forward_counts() -> None:
    """Let `forward_counts` begin at zero."""
    with _lock:
        _counts.clear()


def _choose(call: Inputs, refused: dict[str, str]) -> Choice:
    if call.is_empty:
        return Choice(NOTHING, "there is no query row or no key")
    if call.q.device.type == "cpu":
        return Choice("reference", "tensors on the CPU are for the float64 reference")
    rejected: dict[str, str] = {}
    for name, maker in MAKERS.items():
        reason = refused.get(name) or maker.unable(call)
        if reason is None:
            return Choice(name, "the first of those able", rejected)
        rejected[name] = reason
    raise AssertionError("the reference computes everything that `check` lets pass")


def _tell(choice: Choice) -> None:
    told = tuple(choice.rejected.values())
    with _lock:
        news = told not in _told
        _told.add(told)
    if news:
        _LOG.warning("the forward pass is computed slowly, in float64, by the %s", choice)


def _by_flash_attn_4(call: Inputs) -> Forward:
    module = libraries.flash_attn_4_module()
    assert isinstance(module, ModuleType)
    q, k, v = (libraries.readable(x) for x in (call.q, call.k, call.v))
    given: dict[str, Any] = {"return_lse": True}
    clears_itself = call.sequences is not None and libraries.flash_attn_4_writes_into_given()
    if clears_itself:  # rows that no sequence uses are not written
        given["out"] = q.new_zeros(q.shape)
        given["lse"] = q.new_full(call.lse_shape, -math.inf, dtype=torch.float32)
    with libraries.asked("flash-attn-4", q):
        # its arity grew over the releases: (out, lse), and later three more
        out, lse = module._flash_attn_fwd(q, k, v, **libraries.options_of(call), **given)[:2]
    return Forward(out, lse) if clears_itself or call.sequences is None else _cleared(call, out, lse)


def _by_torch(call: Inputs) -> Forward:
    sequences = call.sequences
    q, k, v = (libraries.readable(x) for x in (call.q, call.k, call.v))
    left, right = libraries.window_of_torch(call)
    with libraries.asked("torch", q):
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            None if sequences is None else sequences.cu_seqlens_q,
            None if sequences is None else sequences.cu_seqlens_k,
            q.shape[-3],
            k.shape[-3],
            0.0,
            (left, right) == (-1, 0),
            False,
            scale=call.settings.scale,
            window_size_left=left,
            window_size_right=right,
        )
    out, lse = out.contiguous(), lse.contiguous()
    lse.masked_fill_(lse == math.inf, -math.inf)  # what torch says of rows that see nothing
    return Forward(out, lse) if sequences is None else _cleared(call, out, lse)


def _cleared(call: Inputs, out: Tensor, lse: Tensor) -> Forward:
    """Rows behind the last sequence, and those that a sequence does not use, see nothing."""
    assert call.sequences is not None
    unused = libraries.unused_rows(call.sequences.cu_seqlens_q, call.sequences.seqused_q, out.shape[0])
    return Forward(out.masked_fill_(unused[:, None, None], 0.0), lse.masked_fill_(unused[None, :], -math.inf))


def _by_reference(call: Inputs) -> Forward:
    out, lse = reference.attention_forward(call.q, call.k, call.v, scoring_of(call))
    return Forward(stored(out, call.q.new_empty(call.q.shape)), lse.to(call.lse_dtype))


def _nothing_to_see(call: Inputs) -> Forward:
    lse = call.q.new_full(call.lse_shape, -math.inf, dtype=call.lse_dtype)
    if call.sink is not None:
        lse.copy_(call.sink[:, None])
        if call.sequences is not None:
            lse.masked_fill_(
                libraries.unused_rows(call.sequences.cu_seqlens_q, call.sequences.seqused_q, lse.shape[-1])[None, :],
                -math.inf,
            )
    return Forward(call.q.new_zeros(call.q.shape), lse)


MAKERS = {  # in the order in which they are tried on a GPU
    "flash-attn-4": _Maker(libraries.outside_flash_attn_4, _by_flash_attn_4),
    "torch": _Maker(libraries.outside_torch, _by_torch),
    "reference": _Maker(lambda call: None, _by_reference),
}
