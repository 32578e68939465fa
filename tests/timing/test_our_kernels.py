"""The backward kernels, recorded and replayed: counts are the assembler's, parts add up, the seed decides."""

from __future__ import annotations

import pytest

from tests.timing.kernels import ROUND, SM90, SM100, values
from undertow.backward_case import main_case
from undertow.inputs import Shape
from undertow.kernels.backward import compile_backward, plan_named
from undertow.timing.listing import compare, disassembled
from undertow.timing.replay import replay
from undertow.timing.results import Kind
from undertow.timing.trace import record

TILES = 12
COMPUTES = (
    "fma",
    "packed fma",
    "mufu",
    "convert",
    "shuffle",
    "load",
    "store",
    "wgmma",
    "mma",
    "tmem load",
    "tmem store",
)
ARCHS = {"sm90": (SM90, "pingpong"), "sm100": (SM100, "split")}


@pytest.fixture(scope="module", params=ARCHS)
def recorded(request):
    arch, schedule = ARCHS[request.param]
    plan = plan_named(request.param, schedule)
    case = main_case(plan, Shape(1, 128 * TILES, 128, 1), 0, request.param)
    changes = {} if arch == SM90 else {"mma_multiply_adds_per_cycle": 4096}
    return request.param, record(case, values(arch, **changes)), values(arch, **changes), plan


def test_parts_add_up_to_the_run(recorded):
    _, trace, constants, _ = recorded
    line = replay(trace, constants)
    assert line.phases is not None
    assert line.phases.prologue + TILES * line.phases.per_tile["unmasked"] + line.phases.epilogue == pytest.approx(
        line.cycles, rel=0.05
    )
    assert len(line.tile_begins) == TILES
    assert all(0.0 <= share <= 1.02 for share in line.utilisation.values())
    links = sum(link.cycles for link in line.critical_path)
    assert links == pytest.approx(line.cycles_per_tile, rel=0.1)
    for role, reasons in line.stalls.items():
        assert sum(reasons.values()) <= line.cycles_per_tile * 1.1, role


def test_a_tile_takes_at_least_its_multiply_adds(recorded):
    """Five GEMMs of 128 x 128 x 64, on sm90 with the row terms 2560 + 256 cycles, on sm100 1280; there, with a port of
    their own, the operands of dQ take 48 passes where its multiply-adds take 32 cycles, eight times.
    """
    name, trace, constants, _ = recorded
    own = constants if name == "sm90" else constants | {"mma_shares_port": 0.0}
    line = replay(trace, own, with_spans=False)
    least = {"sm90": 2816, "sm100": 1280 + 8 * 16}[name]
    assert least < line.cycles_per_tile < 3.0 * least
    assert line.utilisation["tensor"] * line.cycles_per_tile == pytest.approx(least, rel=0.02)


def test_the_seed_decides(recorded):
    _, trace, constants, _ = recorded
    jittery = constants | {"wake_jitter": 12.0}
    lines = [replay(trace, jittery, seed, with_spans=False).cycles for seed in (1, 1, 2)]
    assert lines[0] == lines[1] != lines[2]


def test_waits_and_rows_have_the_names_of_the_plan(recorded):
    _, trace, constants, plan = recorded
    line = replay(trace, constants)
    sides = {f"{p.name}.{side}" for p in plan.pipelines for side in ("full", "empty")}
    barriers = {barrier.name for barrier in plan.barriers}
    waits = {span.name for span in line.spans if span.kind is Kind.WAIT}
    assert waits & sides
    assert {meeting.name for meeting in line.meetings} & barriers
    assert {"QK", "dP", "PdO", "dK", "dQ"} <= {span.name for span in line.spans if span.row == "tensor"}
    assert {span.row for span in line.spans if span.row.startswith("compute")} == {
        row for row in trace.roles if row.startswith("compute")
    }


def test_counts_are_those_of_the_listing(recorded):
    """What the assembler has little choice in is counted exactly, per tile and warp of the compute role."""
    pytest.importorskip("triton", reason="its nvdisasm reads the listing")
    name, trace, _, plan = recorded
    listing = disassembled(compile_backward(name, plan).main.cubin)
    found = [d for d in compare(trace, listing) if d.role == "compute" and d.name in COMPUTES]
    assert {d.name: d.modelled for d in found} == {d.name: d.listed for d in found}
    assert len(found) >= 5


def test_every_constant_is_read():
    """A name that no architecture reads would be drawn, printed and mean nothing."""
    assert set(ROUND) == set(values(SM90)) | set(values(SM100))
