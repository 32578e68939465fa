"""Observers over the machine's events, one file each; `all_observers` makes the set that `check` runs."""

from collections.abc import Sequence
from typing import Any

from .async_registers import AsyncRegisters
from .base import Access, Finding, Observer
from .coverage import Coverage
from .deadlock import WaitFor
from .early_use import EarlyUse
from .mbarrier import MbarrierProtocol
from .ownership import Ownership
from .race import Race
from .register_pool import RegisterPool
from .tmem import TmemLifetime
from .uninitialised import UninitialisedRead

__all__ = [
    "Access", "AsyncRegisters", "Coverage", "EarlyUse", "Finding", "MbarrierProtocol", "Observer", "Ownership", "Race",
    "RegisterPool", "TmemLifetime", "UninitialisedRead", "WaitFor", "all_observers",
]  # fmt: skip


def all_observers(
    strict: bool = False, plan: Any = None, labels: Any = None, workspaces: Sequence[Any] = ()
) -> list[Observer]:
    """The standard set, fresh: observers serve one launch.

    strict: take the ISA by its letter where kernels rely on more (see `race`), and report registers used before
    wait::ld. plan, labels: names for findings. workspaces: global arrays that hold nothing before the launch.
    """
    race = Race(strict, plan, labels)
    observers: list[Observer] = [
        race,
        MbarrierProtocol(plan, labels),
        UninitialisedRead(plan, labels, workspaces, race),
        TmemLifetime(),
        RegisterPool(),
        AsyncRegisters(plan, labels),
        WaitFor(plan, labels),
    ]
    if strict:
        observers.append(EarlyUse())
    return observers
