"""A tracer's JSON becomes a timeline in the plan's terms."""

from __future__ import annotations

import json

import pytest

from undertow.calibrate.recorded import RecordError, Source, read_timeline, timeline_of
from undertow.kernels.backward import plan_named
from undertow.timing.results import Kind

SOURCE = Source(plan_named("sm90", "pingpong"), 2.0, "some GPU")
NAMES = ["softmax", "turn", "load_compute_q.empty"]
ORIGIN = 1796027092855079040


def span(location: int, name: str, begin: int, end: int) -> dict:
    number = NAMES.index(name)
    return {
        "startTs": ORIGIN + begin,
        "endTs": ORIGIN + end,
        "rangeNameIdx": number,
        "warpLocIdxs": [location, location],
    }


def trace() -> dict:
    """Two CTAs; in the first, warp 0 has two tiles and warp 8 loads."""
    places = [(0, 0), (0, 8), (7, 0)]
    ranges = [span(0, "softmax", 100, 150), span(0, "turn", 60, 96), span(0, "softmax", 300, 350)]
    ranges += [span(1, "load_compute_q.empty", 10, 90), span(2, "turn", 64, 128)]
    life = [{"locIdx": index, "startTs": ORIGIN + 64 * (index == 2), "endTs": ORIGIN + 400} for index in range(3)]
    return {
        "launches": [
            {"kernelName": "preprocess", "ranges": [], "warpLifetimes": life[:1]},
            {"kernelName": "undertow_backward_sm90_dense", "ranges": ranges, "warpLifetimes": life},
        ],
        "locationTable": [{"ctaId": [cta, 0, 0], "warpId": warp} for cta, warp in places],
        "stringTable": NAMES,
    }


def test_rows_are_warps_of_roles_and_times_are_cycles():
    timeline = timeline_of(trace(), SOURCE)
    assert [(s.row, s.name, s.begin, s.end, s.tile) for s in timeline.spans] == [
        ("load warp 8", "load_compute_q.empty", 20, 180, -1),
        ("compute warp 0", "turn", 120, 192, -1),
        ("compute warp 0", "softmax", 200, 300, 0),
        ("compute warp 0", "softmax", 600, 700, 1),
    ]
    assert [s.kind for s in timeline.spans] == [Kind.WAIT, Kind.WAIT, Kind.WORK, Kind.WORK]
    assert timeline.tile_begins == (200, 600) and timeline.cycles_per_tile == 400 and timeline.cycles == 700
    assert timeline.stalls["compute"] == {"turn": 72 / (2 * 8)}
    assert timeline.stalls["load"] == {"load_compute_q.empty": 160 / 2}


def test_a_cta_is_chosen_by_its_number():
    (only,) = timeline_of(trace(), SOURCE, cta=7).spans
    assert (only.begin, only.end) == (0, 128)
    with pytest.raises(RecordError, match=r"CTA 5 was not recorded; the trace has \[0, 7\]"):
        timeline_of(trace(), SOURCE, cta=5)


def test_a_trace_without_spans_is_refused(tmp_path):
    content = trace()
    content["launches"].pop()
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=r"trace\.json: no kernel in it has spans; launches: preprocess"):
        read_timeline(path, SOURCE)
    path.write_text("{}")
    with pytest.raises(RecordError, match="launches"):
        read_timeline(path, SOURCE)
