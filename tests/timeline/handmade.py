"""Timelines made by hand: three equal tiles of a kernel with two compute warps, so that every place can be told."""

from __future__ import annotations

from undertow.timing.results import Kind, Meeting, Span, Timeline

TILE = 1000.0  # cycles
COMPUTE = tuple(f"compute warp {warp}" for warp in (4, 5))
SECTIONS = (  # name, kind, begin and end within the tile, of compute warp 4; warp 5 is 20 cycles later
    ("mma_compute_s.full", Kind.WAIT, 0, 100),
    ("mma_compute_s.empty", Kind.WORK, 150, 152),
    ("softmax", Kind.WORK, 100, 500),
    ("signal P", Kind.WORK, 500, 540),
    ("dS", Kind.WORK, 600, 900),
)
GEMMS = (("QK", 200, 328), ("PdO", 560, 688), ("dK", 700, 760), ("dQ", 760, 820), ("dP", 820, 948))


def timeline(
    kernel: str = "split", *, tile: float = TILE, barriers: int = 0, assumed: tuple[str, ...] = ()
) -> Timeline:
    """A run of three tiles of `tile` cycles, with `barriers` barriers of all compute warps in each."""
    stretch = tile / TILE
    spans: list[Span] = []
    meetings: list[Meeting] = []
    for number in range(3):
        start = number * tile
        for name, begin, end in GEMMS:
            spans.append(Span("tensor", name, Kind.WORK, start + begin * stretch, start + end * stretch, number))
        for late, row in enumerate(COMPUTE):
            for name, kind, begin, end in SECTIONS:
                spans.append(
                    Span(
                        row,
                        name,
                        kind,
                        start + (begin + 20 * late) * stretch,
                        start + (end + 20 * late) * stretch,
                        number,
                    )
                )
        spans.append(Span("load warp 13", "load_mma_q.empty", Kind.WAIT, start, start + 300 * stretch, number))
        spans.append(Span("tma", "sQ", Kind.TRANSFER, start + 300 * stretch, start + 700 * stretch, number))
        spans.append(Span("reduce warp 0", "drain dQ", Kind.WORK, start + 830 * stretch, start + 950 * stretch, number))
        for index in range(barriers):
            meetings.append(Meeting("compute", start + (510 + 100 * index) * stretch, COMPUTE))
        meetings.append(Meeting("reduce", start + 900 * stretch, ("reduce warp 0",)))
    return Timeline(
        kernel=kernel,
        chip="made by hand",
        cycles=3 * tile,
        cycles_per_tile=tile,
        tile_begins=(0.0, tile, 2 * tile, 3 * tile),
        spans=tuple(spans),
        meetings=tuple(meetings),
        utilisation={"tensor": 0.5, "mufu": 0.3},
        stalls={"compute": {"mma_compute_s.full": 100.0 * stretch}},
        critical_path=(),
        assumed=assumed,
    )
