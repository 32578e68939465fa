"""The benchmark of the host's time says what it measured; how long that takes is nobody's promise here."""

from __future__ import annotations

import json

import pytest
import torch

from tools import benchmark_host


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the numbers of a machine without a GPU")
def test_it_measures_the_parts_and_the_whole_and_says_that_nothing_was_launched(monkeypatch, capsys):
    monkeypatch.setattr(benchmark_host, "ROUNDS", 5)
    assert benchmark_host.main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["what"] == "measured without a GPU and without launches" and said["target"] == 25
    parts = said["microseconds"]
    assert list(parts) == [
        "find the plan",
        "allocate the workspace",
        "check and convert the arguments",
        "whole call",
        "undertow.attention_backward",
        "backward of flash_attn_func",
        "  of an empty autograd.Function",
        "backward of SDPA, undertow.enable()",
        "  of an empty operator in Python",
    ]
    assert all(0 < value < 1000 for value in parts.values())


def test_the_stub_is_called_once_a_call(monkeypatch):
    calls = []
    monkeypatch.setattr(benchmark_host, "ROUNDS", 3)
    monkeypatch.setattr(benchmark_host, "CALLS", 4)
    assert benchmark_host.microseconds(lambda: calls.append(1)) > 0
    assert len(calls) == 3 * (1 + 4)
