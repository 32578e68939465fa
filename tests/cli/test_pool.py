"""Work is done once per task wherever it runs, and other processes are started only where that pays."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from undertow import pool

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Slow:
    """Takes a moment, and says in which process."""

    seconds: float

    def __call__(self, task: int) -> tuple[int, int]:
        time.sleep(self.seconds)
        if task < 0:
            raise ValueError(f"task {task}")
        return task * task, os.getpid()


def test_short_work_stays_in_this_process():
    done = list(pool.each(Slow(0.0), range(20), jobs=2))
    assert done == [(i, (i * i, os.getpid())) for i in range(20)]


def test_long_work_is_spread_over_processes(monkeypatch):
    monkeypatch.setattr(pool, "WORTH_SECONDS", 0.5)
    done = dict(pool.each(Slow(0.1), range(24), jobs=2))
    assert {i: square for i, (square, _) in done.items()} == {i: i * i for i in range(24)}
    processes = {process for _, process in done.values()}
    assert os.getpid() in processes and 2 <= len(processes) <= 3


def test_one_job_is_this_process(monkeypatch):
    monkeypatch.setattr(pool, "WORTH_SECONDS", 0.0)
    assert {process for _, (_, process) in pool.each(Slow(0.01), range(5), jobs=1)} == {os.getpid()}


def test_an_error_of_another_process_arrives(monkeypatch):
    monkeypatch.setattr(pool, "WORTH_SECONDS", 0.0)
    with pytest.raises(ValueError, match="task -1"):
        list(pool.each(Slow(0.01), [1, 2, -1], jobs=2))


PARENT = """
import sys
from tests.cli.test_pool import Slow
from undertow import pool
if __name__ == "__main__":
    pool.WORTH_SECONDS = 0.0
    for _, (_, process) in pool.each(Slow(0.1), range(10_000), 2):
        print(process, flush=True)
"""


def test_processes_leave_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    assert any(int(line) != parent.pid for line in parent.stdout)
    parent.kill()
    parent.communicate(timeout=30)  # the pipe ends only when everybody who has inherited it is gone


def test_this_machine_has_a_core():
    assert pool.cores() >= 1


def test_processes_that_are_killed_in_the_end_have_done_everything():
    before = set(multiprocessing.active_children())
    assert sorted(pool.in_processes(math.sqrt, [1, 4, 9], 2)) == [(0, 1.0), (1, 2.0), (2, 3.0)]
    deadline = time.monotonic() + 10
    while set(multiprocessing.active_children()) - before:
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.01)
