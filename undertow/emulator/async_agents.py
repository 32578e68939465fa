"""Engines that work behind the warps' backs: the tensor pipe and the copy engines, as queues of operations.

An operation has its whole effect (reads and writes) at one moment, its completion. When that is, is a choice:
eager (at issue), late (only when no warp can run), or seeded (at random points). A correct kernel gives the same
result under all of them; a missing wait reads poison or stale data under `late`.

ASSUMPTION: one first-in-first-out tensor pipe per CTA. The ISA orders MMAs only for the same accumulator, shape and
kind, so this is stronger than promised. MMAs of a warpgroup come after each other (see `warpgroup`), those of several
warpgroups and copies complete in any order.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .events import AsyncCompleted, AsyncIssued


@dataclass(eq=False)
class AsyncOperation:
    """One operation in flight.

    engine: tensor, wgmma, tensor_load, bulk_load, bulk_store, bulk_reduce or cp_async. `thread` is the CTA lane number
    of the issuing thread. `run` has the effect. `after` must complete first. `number` counts issues in the CTA.
    """

    engine: str
    decoded: Any
    lanes: Any
    thread: int
    run: Callable[["AsyncOperation"], None]
    after: tuple["AsyncOperation", ...] = ()
    details: dict = field(default_factory=dict)
    number: int = 0
    done: bool = False

    @property
    def warp(self) -> int:
        """Warp of the issuing thread."""
        return self.thread // 32


class AsyncEngines:
    """The engines of one CTA."""

    def __init__(self, completion: str | tuple[str, int], bus):
        self.mode = completion if isinstance(completion, str) else completion[0]
        self._seed = 0 if isinstance(completion, str) else completion[1]
        self._issued = bus.sink(AsyncIssued)
        self._completed = bus.sink(AsyncCompleted)
        self.reset(0)

    def reset(self, cta_number: int) -> None:
        """Empty all queues for a new CTA."""
        self.tensor_pipe: deque[AsyncOperation] = deque()
        self.copies: list[AsyncOperation] = []
        self.num_issued = 0
        self.current: AsyncOperation | None = None
        self.groups: dict[tuple[str, int], list[list[AsyncOperation]]] = {}
        self.open_groups: dict[tuple[str, int], list[AsyncOperation]] = {}
        self._random = random.Random(self._seed * 1_000_003 + cta_number)

    @property
    def pending(self) -> bool:
        """Whether anything is in flight."""
        return bool(self.tensor_pipe or self.copies)

    def issue(self, operation: AsyncOperation) -> None:
        """Take an operation; under eager completion it happens now."""
        operation.number = self.num_issued
        self.num_issued += 1
        if self._issued:
            self._issued(AsyncIssued(operation.lanes, operation))
        if self.mode == "eager":
            self._complete(operation)
        elif operation.engine == "tensor":
            self.tensor_pipe.append(operation)
        else:
            self.copies.append(operation)

    def _complete(self, operation: AsyncOperation) -> None:
        self.current = operation
        operation.run(operation)
        operation.done = True
        operation.after = ()
        operation.lanes.cta.progress += 1
        if self._completed:
            self._completed(AsyncCompleted(operation))

    def step(self) -> AsyncOperation:
        """Complete one operation: the oldest (late), or a random one that may go next (seeded)."""
        may_go = (o for o in self.copies if all(a.done for a in o.after))
        if self.mode == "seeded":
            operation = self._random.choice([*may_go, *list(self.tensor_pipe)[:1]])
        else:  # both queues are in the order of issue
            oldest = [o for o in (next(may_go, None), next(iter(self.tensor_pipe), None)) if o is not None]
            operation = min(oldest, key=lambda o: o.number)
        if operation.engine == "tensor":
            self.tensor_pipe.popleft()
        else:
            self.copies.remove(operation)
        self._complete(operation)
        return operation

    def maybe_step(self) -> None:
        """At a random point of a seeded run: complete nothing or one operation."""
        if self.mode == "seeded" and self.pending and self._random.random() < 0.3:
            self.step()

    def join_group(self, kind: str, operation: AsyncOperation) -> None:
        """Add an operation to its thread's open group; kind is bulk or cp_async."""
        self.open_groups.setdefault((kind, operation.thread), []).append(operation)

    def commit_group(self, kind: str, thread: int) -> list[AsyncOperation]:
        """Close the thread's open group and return its operations."""
        group = self.open_groups.pop((kind, thread), [])
        self.groups.setdefault((kind, thread), []).append(group)
        return group

    def open_count(self, kind: str, thread: int) -> int:
        """Groups of the thread that are not complete, forgetting leading complete ones."""
        groups = self.groups.get((kind, thread))
        if not groups:
            return 0
        while groups and all(o.done for o in groups[0]):
            groups.pop(0)
        return len(groups)
