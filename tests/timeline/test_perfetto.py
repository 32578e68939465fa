"""Traces, parsed again: the tracks of the in-kernel tracer, ranges that nest, cycles or nanoseconds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.timeline.handmade import timeline
from undertow.timeline.perfetto import LIFE, TraceError, trace, write_trace
from undertow.timeline.rows import lanes
from undertow.timing.results import Kind, Span

perfetto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


def parsed(content: bytes):
    """Path of every track by its uuid, and the events of each path in the order of the file."""
    packets = perfetto.Trace.FromString(content).packet
    described = [packet.track_descriptor for packet in packets if packet.HasField("track_descriptor")]
    paths: dict[int, str] = {}
    for track in described:
        above = paths[track.parent_uuid] + "/" if track.parent_uuid else ""
        paths[track.uuid] = above + track.name
    events: dict[str, list] = {}
    for packet in packets:
        if packet.HasField("track_event"):
            events.setdefault(paths[packet.track_event.track_uuid], []).append(packet)
    return paths, events


def slices(events) -> list[tuple[str, int, int, int]]:
    """Name, depth, begin and end of the slices of a track. Fails where begins and ends do not match."""
    found, stack = [], []
    for packet in events:
        if packet.track_event.type == packet.track_event.TYPE_SLICE_BEGIN:
            stack.append((packet.track_event.name, len(stack), packet.timestamp))
        elif packet.track_event.type == packet.track_event.TYPE_SLICE_END:
            found.append((*stack.pop(), packet.timestamp))
    assert not stack
    return sorted(found, key=lambda one: (one[2], one[1]))


GRID = "Root/Grid1"
CTA = f"{GRID}/GPC(ID not available)/TPC(ID not available)|VSM(ID not available)/CTA(0, 0, 0)"


def test_tracks_are_laid_out_as_the_tracer_lays_them_out():
    paths, _ = parsed(trace([timeline(barriers=1)]))
    below = [path.removeprefix(CTA + "/") for path in paths.values() if path.startswith(CTA + "/")]
    warps = [name for name in below if name.startswith("Warp") and "/" not in name]
    assert warps == ["Warp00", "Warp04", "Warp05", "Warp13"]
    assert {"tensor pipe", "tma", "Warp04/StackedRanges", "Warp04/Marker"} <= set(below)


def test_the_kernel_and_every_warp_have_a_slice_of_their_whole_time():
    _, events = parsed(trace([timeline(), timeline("aliased")]))
    assert slices(events[GRID]) == [("kernel:split, gridId: 1", 0, 0, 3000)]
    assert slices(events["Root/Grid2"]) == [("kernel:aliased, gridId: 2", 0, 0, 3000)]
    assert slices(events[f"{CTA}/Warp05"]) == [(LIFE, 0, 0, 2920)]


def shape_of(path: str) -> str:
    """A path without the numbers of hardware, launch and warp."""
    return re.sub(r"\(ID not available\)|(?<=[a-z A-Z(])\d+", "N", path)


def test_what_the_tracer_wrote_on_a_gpu_has_its_place_here():
    """Its tracks are ours by name and rank, but for ranges by token, which no prediction has."""
    real = json.loads(Path(__file__).with_name("run_iket_tracks.json").read_text())["tracks"]
    packets = perfetto.Trace.FromString(trace([timeline(barriers=1)])).packet
    paths, events = parsed(trace([timeline(barriers=1)]))
    ranks = {}
    for packet in packets:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            ranks.setdefault(shape_of(paths[track.uuid]), set()).add(track.sibling_order_rank)
    names = {shape_of(path): {p.track_event.name for p in of_path} for path, of_path in events.items()}
    of_warps = [track for track in real if track["path"].endswith(("StackedRanges", "Marker", "Warp00", "Warp01"))]
    others = [track for track in real if track["path"].count("/") < 5]
    assert len(of_warps) == 6 and len(others) == 5
    for track in (*of_warps, *others):
        shape = shape_of(track["path"])
        assert shape in ranks, track["path"]
        if track["path"].endswith(("StackedRanges", "Marker")):
            assert ranks[shape] == {track["rank"]}
    for path, name in (("Root/Grid1", "kernel:X, gridId: 1"), (f"{CTA}/Warp00", LIFE)):
        (theirs,) = {name for t in real if shape_of(t["path"]) == shape_of(path) for name in t["events"]}
        words = r"(?<=kernel:)\w+|\d+"
        assert {re.sub(words, "X", one) for one in names[shape_of(path)] if one} == {re.sub(words, "X", theirs)}


def test_ranges_of_a_warp_nest():
    _, events = parsed(trace([timeline()]))
    of_warp = slices(events[f"{CTA}/Warp04/StackedRanges"])
    by_name = {name: (depth, begin, end) for name, depth, begin, end in reversed(of_warp)}
    assert by_name["softmax"] == (0, 100, 500)
    assert by_name["mma_compute_s.empty"] == (1, 150, 152)  # within the softmax
    assert by_name["wait mma_compute_s.full"] == (0, 0, 100)


def test_a_clock_turns_cycles_into_nanoseconds():
    _, events = parsed(trace([timeline()], clock_mhz=500))
    assert ("QK", 0, 400, 656) in slices(events[f"{CTA}/tensor pipe"])


def test_barriers_are_instants_of_every_warp_that_met():
    _, events = parsed(trace([timeline(barriers=2)]))
    for warp in ("Warp04", "Warp05"):
        met = events[f"{CTA}/{warp}/Marker"]
        assert [packet.track_event.name for packet in met] == ["compute"] * 6
        assert {packet.track_event.type for packet in met} == {perfetto.TrackEvent.TYPE_INSTANT}


def test_the_trace_says_that_it_is_predicted_and_what_is_assumed():
    packets = perfetto.Trace.FromString(trace([timeline(assumed=("tcgen05_tail",))])).packet
    told = [packet.track_descriptor.description for packet in packets]
    assert any("Predicted for made by hand" in text and "tcgen05_tail" in text for text in told)
    categories = {c for packet in packets for c in packet.track_event.categories}
    assert categories == {"predicted"}


def test_spans_that_cross_get_a_track_of_their_own():
    a, b, c, inner = (
        Span("tma", name, Kind.TRANSFER, x, y)
        for name, x, y in (("a", 0, 10), ("b", 5, 15), ("c", 10, 20), ("i", 6, 8))
    )
    assert lanes([a, b, c, inner]) == [[a, inner, c], [b]]


def test_files_are_written_or_refused_with_their_name(tmp_path):
    path = tmp_path / "split.pftrace"
    write_trace([timeline("aliased"), timeline("split")], path)
    assert path.read_bytes() == trace([timeline("aliased"), timeline("split")])
    with pytest.raises(TraceError, match="no such place"):
        write_trace(timeline(), tmp_path / "no such place" / "x")
    with pytest.raises(TraceError, match="clock_mhz=0: must be above 0"):
        write_trace(timeline(), path, clock_mhz=0)
