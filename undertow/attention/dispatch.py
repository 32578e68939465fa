"""Who computes a backward pass, and why: chosen once per call signature, counted, told.

A backend that was asked for by name computes the call or refuses; `auto` takes the first that is able, and what it had
to pass over is logged once per reason. Strict mode refuses to pass over the kernels of this package on a GPU.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from undertow.attention import backends, libraries
from undertow.attention.checks import check, check_contents
from undertow.attention.memory import Layout, layout_of
from undertow.attention.problem import BackendError, Gradients, LibraryRefusal, Problem

_LOG = logging.getLogger("undertow.attention")
MOST_PLANS = 4096  # call signatures that are remembered; the oldest is forgotten


class Backend(NamedTuple):
    """unable: why it cannot compute a problem, or None. run: computes it, with its layout for our kernels."""

    unable: Callable[[Problem], str | None]
    run: Callable[[Problem, Layout], Gradients]


BACKENDS: dict[str, Backend] = {
    arch: Backend(functools.partial(backends.outside_device, arch), functools.partial(backends.on_device, arch))
    for arch in backends.OURS
} | {
    "flash-attn-4": Backend(libraries.outside_flash_attn_4, lambda problem, _: libraries.flash_attn_4(problem)),
    "torch": Backend(libraries.outside_torch, lambda problem, _: libraries.torch_flash(problem)),
    "emulator": Backend(backends.outside_emulator, backends.on_emulator),
    "reference": Backend(lambda problem: None, lambda problem, _: backends.by_reference(problem)),
}
ORDER = {"cpu": ("reference",), "cuda": ("sm100", "sm90", "flash-attn-4", "torch", "reference")}
NOTHING = "nothing"  # counted where there is no query row or no key


@dataclass(frozen=True)
class Choice:
    """backend: who computes. reason: why it. rejected: backend that was tried before it -> why it cannot."""

    backend: str
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)

    @property
    def is_fallback(self) -> bool:
        """Whether kernels of this package were passed over on a GPU."""
        return any(name in self.rejected for name in backends.OURS) and self.backend not in backends.OURS

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.rejected.items()])


class Plan(NamedTuple):
    """What is known of a call signature: who computes it, and what lies as our kernels can use it."""

    choice: Choice
    layout: Layout


_plans: dict[Any, Plan] = {}
_counts: Counter[str] = Counter()
_told: set[tuple[str, ...]] = set()
_lock = threading.Lock()


def choose(problem: Problem, backend: str = "auto", strict: bool | None = False) -> Choice:
    """Who computes `problem`. Nothing is launched and no contents are read. strict: as in `run_backward`.

    Raises: AttentionInputError for tensors that are no problem; BackendError for a backend that is unknown or unable,
    and for a fallback in strict mode.
    """
    choice = _plan(problem.honouring_torch(), backend).choice
    if choice.is_fallback and is_strict(strict):
        _refuse(choice)
    return choice


def run_backward(problem: Problem, backend: str = "auto", strict: bool | None = None) -> Gradients:
    """Compute the gradients of `problem`, in the shapes, dtypes and strides of its inputs.

    strict: refuse, instead of falling back, what the kernels of this package do not compute on a GPU; None is what the
    environment variable UNDERTOW_STRICT says (1 or 0, which is the default).
    Raises: AttentionInputError; BackendError.
    """
    return compute(problem, backend, strict)[0]


def compute(problem: Problem, backend: str, strict: bool | None) -> tuple[Gradients, Plan]:
    """`run_backward`, and how.

    Raises: as `run_backward`.
    """
    problem = problem.honouring_torch()
    plan = _plan(problem, backend)
    check_contents(problem)
    while True:
        if plan.choice.rejected and plan.choice.is_fallback:
            if is_strict(strict):
                _refuse(plan.choice)
            _tell(plan.choice)
        try:
            gradients = _run(problem, plan)
            break
        except LibraryRefusal as refusal:
            if backend != "auto":
                raise
            plan = _decide(problem, backend, {**plan.choice.rejected, plan.choice.backend: str(refusal)})
    count(plan.choice.backend)
    return gradients, plan


def _run(problem: Problem, plan: Plan) -> Gradients:
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _run(problem, plan)
    if plan.choice.backend == NOTHING:
        return backends.nothing_to_see(problem)
    return BACKENDS[plan.choice.backend].run(problem, plan.layout)


def count(backend: str) -> None:
    """One more backward pass that a backend has computed."""
    with _lock:
        _counts[backend] += 1


def counts() -> dict[str, int]:
    """How many backward passes each backend has computed in this process since `reset_counts`."""
    with _lock:
        return dict(_counts)


def reset_counts() -> None:
    """Let `counts` begin at zero."""
    with _lock:
        _counts.clear()


def is_strict(strict: bool | None) -> bool:
    """Whether falling back is refused: the argument, or else the environment.

    Raises: BackendError if the environment says neither 0 nor 1.
    """
    if strict is not None:
        return strict
    said = os.environ.get("UNDERTOW_STRICT", "0")
    if said not in ("", "0", "1"):
        raise BackendError(f"UNDERTOW_STRICT={said!r}: must be 0 or 1")
    return said == "1"


def _plan(problem: Problem, backend: str) -> Plan:
    plan = _plans.get((backend, problem.signature()))
    return _decide(problem, backend, {}) if plan is None else plan


def _decide(problem: Problem, backend: str, refused: dict[str, str]) -> Plan:
    """Choose, and remember it. refused: backends that are not asked (again) -> why."""
    check(problem)
    plan = Plan(_choose(problem, backend, refused), layout_of(problem))
    with _lock:
        while len(_plans) >= MOST_PLANS:
            del _plans[next(iter(_plans))]
        _plans[backend, problem.signature()] = plan
    return plan


def _choose(problem: Problem, backend: str, refused: dict[str, str]) -> Choice:
    if backend != "auto" and backend not in BACKENDS:
        raise BackendError(f"backend={backend!r}: must be one of auto, {', '.join(BACKENDS)}")
    if problem.is_empty:
        return Choice(NOTHING, "there is no query row or no key, so that every gradient of rows is zero")
    if backend != "auto":
        reason = BACKENDS[backend].unable(problem)
        if reason:
            raise BackendError(f"backend={backend!r} cannot compute this call: {reason}")
        return Choice(backend, "asked for by name")
    rejected: dict[str, str] = {}
    for name in ORDER[problem.q.device.type]:
        reason = refused.get(name) or BACKENDS[name].unable(problem)
        if reason is None:
            return Choice(name, _why(name, problem), rejected)
        rejected[name] = reason
    raise AssertionError("the reference computes everything that `check` lets pass")


def _why(name: str, problem: Problem) -> str:
    if name in backends.OURS:
        return f"the {name} kernels compute this call on {problem.q.device}"
    if problem.q.device.type == "cpu":
        return "tensors on the CPU are for the float64 reference; the emulator runs if asked for by name"
    return "the first of those able"


def _refuse(choice: Choice) -> NoReturn:
    raise BackendError(f"strict: none of our kernels computes this call, it would fall back to {choice}")


def _tell(choice: Choice) -> None:
    """Log a fallback, once per reason."""
    told = (choice.backend, *choice.rejected.values())
    with _lock:
        news = told not in _told
        _told.add(told)
    if news:
        _LOG.warning("the backward pass falls back to %s", choice)
