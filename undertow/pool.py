"""Independent pieces of work over the cores of the machine, where that is worth the start of the processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

WORTH_SECONDS = 5.0  # of expected work; a process takes about one to start

_work: Callable[[Any], Any] | None = None  # of a worker process


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(work: Callable[[Any], Any], tasks: Sequence[Any], jobs: int) -> Iterator[tuple[int, Any]]:
    """Yield (position, work(task)) for every task, in the order in which they get done.

    The first tasks run in this process, until it is known that the rest would take WORTH_SECONDS; then `jobs`
    processes take over. `work` and what it holds are sent to each process once, so they must pickle.
    """
    begin = time.perf_counter()
    for position, task in enumerate(tasks):
        left = len(tasks) - position
        if position and jobs > 1 and left > 1 and (time.perf_counter() - begin) / position * left > WORTH_SECONDS:
            yield from _in_processes(work, tasks, position, min(jobs, left))
            return
        yield position, work(task)


def in_processes(work: Callable[[Any], Any], tasks: Sequence[Any], jobs: int) -> Iterator[tuple[int, Any]]:
    """As `each`, but all tasks run in `jobs` processes, whatever they take, and these are killed in the end.

    For work that leaves behind what takes seconds to end: contexts of a GPU, compilers with processes of their own.
    Raises: BrokenProcessPool if a process dies.
    """
    others = set(multiprocessing.active_children())
    pool = _pool(work, jobs)
    try:
        yield from _done(pool, tasks, 0)
    finally:
        for child in multiprocessing.active_children():
            if child not in others:
                child.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def apart(work: Callable[[Any], Any], task: Any) -> Any:
    """work(task) in a process of its own.

    Raises: BrokenProcessPool if that process dies.
    """
    ((_, result),) = _in_processes(work, [task], 0, 1)
    return result


def _in_processes(work: Callable, tasks: Sequence[Any], first: int, jobs: int) -> Iterator[tuple[int, Any]]:
    pool = _pool(work, jobs)
    try:
        yield from _done(pool, tasks, first)
    finally:
        pool.shutdown(cancel_futures=True)


def _pool(work: Callable, jobs: int) -> ProcessPoolExecutor:
    # spawn: a fork would copy the locks of threads that run here (progress, torch)
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=(work,))


def _done(pool: ProcessPoolExecutor, tasks: Sequence[Any], first: int) -> Iterator[tuple[int, Any]]:
    positions = {pool.submit(_run, task): first + i for i, task in enumerate(tasks[first:])}
    for done in as_completed(positions):
        yield positions[done], done.result()


def _start(work: Callable) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is told by the parent, once
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a process that _in_processes has started"
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: Any) -> None:
    """A process whose parent has been killed would wait for tasks for ever."""
    parent.join()
    os._exit(1)


def _run(task: Any) -> Any:
    assert _work is not None, "the process has been started by _start"
    return _work(task)
