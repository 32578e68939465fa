"""What has to be compiled for a benchmark, compiled before anybody is timed, over the cores of the machine.

A library compiles at the first call of a kind, one after another in one process: minutes for all cells. Processes that
make these calls beforehand leave what they compile where the measuring process finds it: in the cache of this package,
in that of flash-attn-4 (which is switched on for that), in those of torch.compile and triton.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from undertow.bench.peers import PROVIDERS
from undertow.bench.providers import Provider, UnableError
from undertow.bench.workload import workload
from undertow.pool import in_processes
from undertow.sweep.matrix import Cell

WORTH_TASKS = 6  # a process takes ten seconds and more to import everything; so few are done where they are needed
MOST_JOBS = 16  # each holds a context and the tensors of one cell, about 4 GiB of the GPU's memory


@dataclass(frozen=True)
class Task:
    """A call by which a provider compiles something. provider: its name."""

    provider: str
    cell: Cell


def tasks(cells: Iterable[Cell], providers: Iterable[Provider]) -> list[Task]:
    """One for each thing that has to be compiled, in the order of the providers; ours come first.

    That is no matter of taste: who has imported flash-attn-4 cannot compile our kernels in the same process.
    """
    cells = list(cells)
    found: dict[object, Task] = {}
    for provider in providers:
        for cell in cells:
            compiled = provider.compiles(cell)
            if compiled is not None:
                found.setdefault((provider.name, compiled), Task(provider.name, cell))
    return list(found.values())


def warm(todo: Sequence[Task], jobs: int, say: Callable[[str], None] = lambda text: None) -> list[str]:
    """Run the tasks in processes; what went wrong, which the cells of the task will tell again when they are measured.

    Fewer than WORTH_TASKS, or one job: nothing is done.
    """
    if len(todo) < WORTH_TASKS or jobs < 2:
        return []
    complaints, done = [], 0
    say(f"compiling for {len(todo)} kinds of call in {min(jobs, len(todo))} processes")
    try:
        for position, complaint in in_processes(compile_one, todo, min(jobs, len(todo))):
            done += 1
            if complaint:
                complaints.append(f"{todo[position].provider}, {todo[position].cell.name}: {complaint}")
            say(f"compiled {done} of {len(todo)}")
    except BrokenProcessPool:
        complaints.append(f"a process that compiled died; {len(todo) - done} kinds of call are compiled when they come")
    return complaints


def compile_one(task: Task, device: str = "cuda") -> str | None:
    """Make the call of one task; what went wrong, or None. What a compiler warns of is told by nobody here."""
    warnings.simplefilter("ignore")
    try:
        participant = PROVIDERS[task.provider].prepare(workload(task.cell, task.cell.full, device))
        with participant.around():
            participant.call()
        torch.cuda.synchronize()
    except (UnableError, NotImplementedError):
        return None
    except Exception as error:  # of a library, a compiler or a driver: told, and the others go on
        return f"{type(error).__name__}: {error}"
    finally:
        torch.cuda.empty_cache()
    return None
