"""Pieces of work get the names of sections by the hand-overs around them; other kernels keep theirs."""

from __future__ import annotations

from undertow.timeline.rows import Row
from undertow.timeline.sections import sectioned
from undertow.timing.results import Kind, Span

W, K = Kind.WAIT, Kind.WORK
TILE = [  # as a replay tells it: waits, pieces named by their instructions, arrivals
    *[("mma_compute_s.full", W), ("work", K), ("tmem_wait_load", W), ("work", K)],
    *[("mma_compute_s.empty", K), ("fence", W), ("work", K), ("softmax", K), ("compute_mma_p.empty", W)],
    *[("work", K), ("tmem_wait_store", W), ("work", K), ("compute_mma_p.full", K)],
    *[("mma_compute_dp.full", W), ("work", K), ("dS", K), ("tmem_wait_load", W), ("dS", K)],
    *[("fence", W), ("work", K), ("compute_mma_ds.full", K), ("work", K)],
]


def row_of(pieces, name: str = "compute warp 4") -> Row:
    return Row(name, tuple(Span(name, what, kind, at * 10, at * 10 + 10, 0) for at, (what, kind) in enumerate(pieces)))


def worked(row: Row) -> list[str]:
    return [span.name for span in row.spans if span.kind is K]


def test_a_tile_is_told_in_sections():
    assert worked(sectioned(row_of(TILE))) == [
        *["load S", "load S", "mma_compute_s.empty", "softmax", "softmax"],
        *["signal P", "signal P", "compute_mma_p.full"],
        *["dS", "dS", "dS", "signal dS", "compute_mma_ds.full", "work"],
    ]


def test_without_an_early_release_s_is_loaded_until_the_softmax():
    aliased = [piece for piece in TILE if not piece[0].startswith("compute_mma_p")]
    aliased.remove(("mma_compute_s.empty", K))
    aliased.insert(aliased.index(("mma_compute_dp.full", W)), ("mma_compute_s.empty", K))
    named = worked(sectioned(row_of(aliased)))
    assert named[:6] == ["load S", "load S", "load S", "softmax", "signal P", "signal P"]
    assert named[6] == "mma_compute_s.empty"


def test_a_piece_of_work_is_cut_where_the_warp_hands_s_back():
    row = row_of(TILE)
    release = next(span for span in row.spans if span.name == "mma_compute_s.empty")
    longer = [span for span in row.spans if span not in (row.spans[3], row.spans[4])]
    longer.append(Span(row.name, "work", K, row.spans[3].begin, release.end + 5, 0))  # around the arrival
    longer.append(release)
    named = sectioned(Row(row.name, tuple(sorted(longer, key=lambda span: (span.begin, -span.end)))))
    at_release = [(s.name, s.begin, s.end) for s in named.spans if row.spans[3].begin <= s.begin < release.end + 5]
    assert at_release == [
        ("load S", row.spans[3].begin, release.end),
        ("mma_compute_s.empty", release.begin, release.end),
        ("fence", release.end, release.end + 10),
        ("softmax", release.end, release.end + 5),
    ]


def test_sections_begin_anew_with_every_tile():
    once, twice = (worked(sectioned(row_of(TILE * times))) for times in (1, 2))
    assert twice == once * 2


def test_waits_and_other_rows_stay_as_they_are():
    row = row_of(TILE)
    assert [s for s in sectioned(row).spans if s.kind is W] == [s for s in row.spans if s.kind is W]
    for other in (row_of(TILE, "reduce warp 0"), row_of([("work", K), ("wait", W)])):
        assert sectioned(other) == other
