"""The child under the profiler: only calls are profiled, each behind its marker, and who is wrong is not called."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tests.bench.stand_ins import H200, Ideal, Unable, cell_named
from undertow.bench import counted
from undertow.bench.workload import workload

NAMES = ["mha-dense-512-bf16", "gqa-causal-512-bf16"]


class Loud(Ideal):
    """Says when it is called."""

    def __init__(self, name: str, said: list[str], spoil=None):
        super().__init__(name, lambda gradients, calls: (said.append(name), spoil and spoil(gradients)))


def test_what_is_profiled(tmp_path, monkeypatch):
    said: list[str] = []
    cuda = SimpleNamespace(
        synchronize=lambda: None,
        empty_cache=lambda: None,
        _sleep=lambda cycles: said.append("marker"),
        profiler=SimpleNamespace(start=lambda: said.append("start"), stop=lambda: said.append("stop")),
    )
    providers = {
        "a": Loud("a", said),
        "wrong": Loud("wrong", said, lambda gradients: gradients.dq.zero_()),
        "unable": Unable("unable"),
        "b": Loud("b", said),
    }
    monkeypatch.setattr(counted, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(counted, "PROVIDERS", providers)
    monkeypatch.setattr(counted, "examine", lambda revision, monitor: H200)
    monkeypatch.setattr(counted, "NvmlMonitor", lambda uuid: None)
    monkeypatch.setattr(counted, "uuid_of_current", lambda: "GPU-0")
    monkeypatch.setattr(counted, "workload", lambda cell, size, device: workload(cell, cell.scaled, "cpu"))
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps({"cells": NAMES, "providers": list(providers), "calls": 2, "revision": None}))
    assert counted.main(request, answer) == 0

    profiled = ["start", "marker", "{}", "marker", "{}", "stop"]
    of_cell = ["a", "wrong", "b", *(word.format("a") for word in profiled), *(word.format("b") for word in profiled)]
    assert said == of_cell * 2
    told = json.loads(answer.read_text())
    assert [(one["cell"], one["provider"], one["status"]) for one in told] == [
        (name, provider, status)
        for name in NAMES
        for provider, status in zip(providers, ("measured", "wrong", "unable", "measured"))
    ]
    assert {one["kind"] for one in told} == {"cycles"}
    assert told[0]["flops"] > 0 and told[0]["shape"]["lengths"] == list(cell_named(NAMES[0]).scaled.lengths)
