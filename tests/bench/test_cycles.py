"""ncu's table is read, falls into calls by its markers, and what does not fit is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.bench.stand_ins import H200
from undertow.bench import cycles
from undertow.bench.cycles import CountError, Launch
from undertow.bench.machine import BenchError
from undertow.commands import bench
from undertow.sweep.matrix import CELLS

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","gpc__cycles_elapsed.max"'
)
MARK = "at::cuda::<unnamed>::spin_kernel(long)"


def printed(*kernels: tuple[str, str]) -> str:
    """What ncu writes: its own words, a header, units, a line a kernel (demangled names hold commas)."""
    lines = ["==PROF== Connected to process 77 (/usr/bin/python3)", "==PROF== Disconnected from process 77", HEADER]
    lines.append('"","","","","","","","","","","","cycle"')
    for number, (name, count) in enumerate(kernels):
        lines.append(
            f'"{number}","77","python3","127.0.0.1","{name}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","{count}"'
        )
    return "\n".join(lines) + "\n"


def test_the_table_is_read():
    text = printed(("void f<int, float>(int, float)", "32,450,117"), ("g", "5150.5"))
    assert cycles.launches(text) == [Launch("void f<int, float>(int, float)", 32450117.0), Launch("g", 5150.5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", "no table: ==ERROR== ERR_NVGPUCTRPERM"),
        (HEADER.replace(cycles.METRIC, "other") + "\n", "no column"),
        (printed(("f", "n/a")), "kernel f: gpc__cycles_elapsed.max is 'n/a', no number"),
    ],
)
def test_another_table_is_refused(text, said):
    with pytest.raises(CountError, match=said):
        cycles.launches(text)


def test_calls_begin_at_markers_and_the_longest_kernel_is_the_main_one():
    names = [(MARK, 9), ("pre", 10), ("main", 100), (MARK, 9), ("pre", 14), ("main", 90), (MARK, 9), ("pre", 12)]
    found = [Launch(name, float(count)) for name, count in [*names, ("main", 95)]]
    calls = cycles.split(found, 3)
    assert [len(call) for call in calls] == [2, 2, 2]
    counted = cycles.counted(calls)
    assert counted.kernels == [Launch("pre", 12.0), Launch("main", 95.0)]
    assert counted.main == Launch("main", 95.0)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["f", MARK, "f"], "kernel f ran before the first marker"),
        ([MARK, "f"], "2 calls were made, ncu saw 1"),
        ([MARK, "f", MARK], "ncu saw 2, 1 of them without a kernel"),
    ],
)
def test_calls_that_cannot_be_told_apart_are_refused(names, said):
    with pytest.raises(CountError, match=said):
        cycles.split([Launch(name, 1.0) for name in names], 2)


def test_calls_with_different_kernels_are_refused():
    with pytest.raises(CountError, match="different kernels"):
        cycles.counted([[Launch("f", 1.0)], [Launch("g", 1.0)]])


def test_a_profiler_that_is_not_there_is_named():
    with pytest.raises(BenchError, match="/no/ncu is not found: --cycles needs Nsight Compute"):
        cycles.find_ncu("/no/ncu")


def profiler(folder: Path, body: str) -> str:
    """A program in the place of ncu."""
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_ourselves_under_the_profiler_without_touching_clocks(tmp_path):
    ncu = profiler(
        tmp_path,
        "open(sys.argv[-1], 'w').write(json.dumps([{}, {'words': sys.argv[1:]}, json.load(open(sys.argv[-2]))]))\n"
        "print('table')",
    )
    told, text = cycles.run_counted(ncu, {"cells": ["a"]})
    words: list[str] = told[1]["words"]
    request = told[2]
    assert text == "table\n" and request == {"cells": ["a"]}
    assert words[words.index("--clock-control") + 1] == "none" and words[words.index("--metrics") + 1] == cycles.METRIC
    assert words[-5:-2] == [sys.executable, "-m", "undertow.bench.counted"]


def test_the_last_words_of_a_profiler_that_fails_are_told(tmp_path):
    ncu = profiler(tmp_path, "sys.exit('==ERROR== The user does not have permission')")
    with pytest.raises(CountError, match="ncu ended with 1: ==ERROR== The user does not have permission"):
        cycles.run_counted(ncu, {})


def test_counts_become_records(tmp_path):
    # a profiler that saw two providers, three calls each, and one that was wrong and not called
    told = [told_of("undertow"), told_of("flash-attn-4"), told_of("flex", "wrong")]
    kernels = [(MARK, "9"), ("pre", "200,000"), ("main", "25,000,000")] * 3 + [(MARK, "9"), ("bwd", "32,000,000")] * 3
    ncu = profiler(tmp_path, f"open(sys.argv[-1], 'w').write({json.dumps(told)!r})\nprint({printed(*kernels)!r})")
    records = bench.count(ncu, CELLS[:1], ["undertow", "flash-attn-4", "flex"], None, H200)
    ours, peer, wrong = records
    assert (ours.main_kernel, ours.cycles, peer.cycles, wrong.cycles) == ("main", 25e6, 32e6, None)
    assert ours.share_of_rate == pytest.approx(1.1e13 / (4096 * 132 * 25e6))
    assert ours.kernels == [{"kernel": "pre", "cycles": 2e5}, {"kernel": "main", "cycles": 25e6}]


def told_of(provider: str, status: str = "measured") -> dict:
    return {
        "cell": CELLS[0].name,
        "provider": provider,
        "kind": "cycles",
        "status": status,
        "device": H200.device,
        "driver": None,
        "sources": H200.sources,
        "revision": None,
        "versions": {},
        "when": "",
        "shape": {},
        "flops": 1.1e13,
    }
