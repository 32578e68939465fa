"""What is compiled before anybody is timed: each thing once, ours first, and whatever goes wrong is told."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool

import pytest

from tests.bench.stand_ins import Ideal, Unable, cell_named
from undertow.bench import warm
from undertow.bench.peers import PROVIDERS
from undertow.bench.providers import UNDERTOW, Participant
from undertow.sweep.matrix import CELLS

NAMES = (UNDERTOW, "flash-attn-4", "torch-flash", "torch-cudnn", "flash-attn-3", "flex")
MANY = [warm.Task(UNDERTOW, cell) for cell in CELLS[: warm.WORTH_TASKS]]


def test_every_cell_finds_what_it_needs_and_nothing_is_compiled_twice():
    providers = [PROVIDERS[name] for name in NAMES]
    todo = warm.tasks(CELLS, providers)
    for provider in providers:
        made = [provider.compiles(task.cell) for task in todo if task.provider == provider.name]
        assert len(set(made)) == len(made)
        assert set(made) == {provider.compiles(cell) for cell in CELLS} - {None}
    assert {task.provider for task in todo} == {UNDERTOW, "flash-attn-4", "flex"}
    assert [task.provider for task in todo] == sorted((task.provider for task in todo), key=NAMES.index)
    flex = [task.cell for task in todo if task.provider == "flex"]
    assert len(flex) == 62 and not any(cell.deterministic for cell in flex)
    lengths = [cell_named(f"mha-dense-{length}-bf16") for length in ("512", "32k")]
    assert [len(warm.tasks(lengths, [provider])) for provider in providers] == [1, 1, 0, 0, 0, 2]


@pytest.mark.parametrize(("todo", "jobs"), [(MANY[1:], 8), (MANY, 1), ([], 8)])
def test_few_calls_are_not_worth_processes(monkeypatch, todo, jobs):
    monkeypatch.setattr(warm, "in_processes", lambda *_: pytest.fail("there must be no process"))
    assert warm.warm(todo, jobs) == []


def test_complaints_name_who_and_where(monkeypatch):
    asked = []

    def in_processes(work, todo, jobs):
        asked.append((work, jobs))
        yield 2, None
        yield 1, "RuntimeError: no memory"

    monkeypatch.setattr(warm, "in_processes", in_processes)
    assert warm.warm(MANY, 99) == [f"undertow, {CELLS[1].name}: RuntimeError: no memory"]
    assert asked == [(warm.compile_one, len(MANY))]


def test_a_process_that_dies_takes_nobody_along(monkeypatch):
    def in_processes(*_):
        yield 0, None
        raise BrokenProcessPool

    monkeypatch.setattr(warm, "in_processes", in_processes)
    (complaint,) = warm.warm(MANY, 2)
    assert complaint == f"a process that compiled died; {len(MANY) - 1} kinds of call are compiled when they come"


class Dead(Ideal):
    def prepare(self, workload) -> Participant:
        raise RuntimeError("no memory")


def test_one_call_is_made_and_a_refusal_is_no_complaint(monkeypatch):
    right = Ideal("right")
    monkeypatch.setattr(warm, "PROVIDERS", {one.name: one for one in (right, Unable("unable"), Dead("dead"))})
    real = warm.workload
    monkeypatch.setattr(warm, "workload", lambda cell, size, device: real(cell, cell.scaled, device))
    monkeypatch.setattr(warm.torch.cuda, "synchronize", lambda: None)
    cell = cell_named("mha-causal-512-bf16")
    said = [warm.compile_one(warm.Task(name, cell), "cpu") for name in ("right", "unable", "dead")]
    assert said == [None, None, "RuntimeError: no memory"] and right.calls == 1
