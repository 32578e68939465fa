"""How a span is drawn and what is written in it: a name of the mathematics has one colour everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.plan.drawing import OTHER_FILL, fill_of
from undertow.timeline.sections import DS, LOAD_S, S_RELEASE, SIGNAL_DS, SIGNAL_P, SOFTMAX
from undertow.timing.results import Kind, Span

WAIT_FILL, TRANSFER_FILL = "#eceef2", "#d5dbe3"
RELEASE = "#15803d"  # a warp hands S back: the tensor pipe may write the next one
GEMMS = ("QK", "PdO", "dP", "dK", "dQ")
FILLS = {LOAD_S: "#dfe9f7", SOFTMAX: fill_of("S"), SIGNAL_P: fill_of("P"), DS: fill_of("dP"), SIGNAL_DS: fill_of("dS")}
NEIGHBOUR = 2  # tiles; GEMMs that take turns on the tensor cores are counted in pieces, whose numbers are no tiles
ISSUED = {"S": "S", "dV": "dV", "stage": "dQ", "add": "dQ"}  # what a tracer of the SM90 kernel calls its spans
CARRIED = {"q": "Q", "do": "dO", "lse": "LSE", "d": "D"}  # last word of a load pipeline's name: what is copied
PORT = ("mma_shares_port", "load_share_", "shared_", "lsu_")  # whoever uses shared memory waits for whoever else does
RESTS_ON = {  # what gives a box its length: beginnings of the names of constants
    "gemm": ("tcgen05_", "wgmma_", "mma_", *PORT),
    "section": ("tmem_", "mufu_", "fma_", "packed_fma_", "convert_", "alu_", "arithmetic_", "uniform_", *PORT),
    "copy": ("tma_",),
    "reduction": ("bulk_",),
}


@dataclass(frozen=True)
class Look:
    """Fill and text of a box."""

    fill: str
    text: str


def look_of(span: Span, first: int) -> Look:
    """The look of a span in a window that begins with tile `first`."""
    if span.kind is Kind.WAIT:
        return Look(WAIT_FILL, "")
    if span.name in GEMMS:
        return Look(fill_of(span.name), f"{span.name}{_tile(span.tile, first)}")
    if span.name in ISSUED:
        return Look(fill_of(ISSUED[span.name]), span.name)
    if span.name in FILLS:
        return Look(FILLS[span.name], span.name)
    if span.kind is Kind.TRANSFER:
        if _reduces(span):
            return Look(fill_of("dQ"), span.name)
        pipeline = span.name.partition(".")[0]
        return Look(TRANSFER_FILL, CARRIED.get(pipeline.rpartition("_")[2], pipeline))
    return Look(fill_of("dQ") if span.row.startswith("reduce") else OTHER_FILL, span.name)


def _reduces(span: Span) -> bool:
    return span.row == "bulk reduce"


def releases_s(span: Span) -> bool:
    """Whether a warp says here that it has read S."""
    return span.kind is Kind.WORK and span.name == S_RELEASE


def guessed(span: Span, assumed: Sequence[str]) -> bool:
    """Whether the length of a box rests on constants that are assumed. What waits has no length of its own."""
    if span.kind is Kind.WAIT:
        return False
    if span.name in GEMMS:
        of = "gemm"
    elif span.kind is Kind.TRANSFER:
        of = "reduction" if _reduces(span) else "copy"
    else:
        of = "section"
    return any(name.startswith(RESTS_ON[of]) for name in assumed)


def hint(span: Span) -> str:
    """What is told of a span under the pointer."""
    tile = f", tile {span.tile}" if span.tile >= 0 else ""
    waits = "waits for " if span.kind is Kind.WAIT else ""
    times = f"{span.begin:.0f} to {span.end:.0f}, {span.end - span.begin:.0f} cycles"
    return f"{span.row}: {waits}{span.name}{tile}: {times}"


def _tile(tile: int, first: int) -> str:
    """` t` of a window's first tile, ` t+1` of the next; nothing where that is not known, or no neighbour."""
    offset = tile - first
    if tile < 0 or abs(offset) > NEIGHBOUR:
        return ""
    return f" t{offset:+d}" if offset else " t"
