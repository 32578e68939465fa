"""Cells for real: kernels compiled and executed, and what is wrong with them is seen."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections import Counter

import pytest
import torch

from tests.sweep.judgements import BY_NAME, SECONDS
from undertow import emulated, emulator, ptx
from undertow.mutate.sites import mutated, sites
from undertow.reference import Scoring
from undertow.sweep import cell as module
from undertow.sweep.cell import Kernels, Measured, batch_of, digest, judge
from undertow.sweep.instructions import Roles, inside_loops, per_tile
from undertow.sweep.matrix import CELLS, Cell, Heads, Size
from undertow.sweep.records import Record, record

COMPUTE_WARPS = 8
SPLIT = Kernels("sm100", "split")


def judged(name: str, *schedules: str, arch: str = "sm100") -> tuple[Record, list[Measured]]:
    """The record of a cell, and what was measured."""
    done = judge(BY_NAME[name], schedules, arch)
    return record(BY_NAME[name], done, SECONDS), done.measured


def test_a_batch_is_what_the_size_says():
    dense = batch_of(Size(Heads(8, 2), (150, 150), window=(90, 90)), "fp16", causal=False)
    assert dense.q.shape == (2, 150, 8, 64) and dense.k.shape == (2, 150, 2, 64) and dense.q.dtype == torch.float16
    assert dense.scoring == Scoring(window=(90, 90))
    packed = batch_of(Size(Heads(2, 1), (5, 0, 7), packed=True), "bf16", causal=True)
    assert packed.q.shape == (12, 2, 64) and packed.scoring.causal
    assert packed.scoring.sequences is not None
    assert packed.scoring.sequences.cu_seqlens_q.tolist() == [0, 5, 5, 12]


def test_a_plain_cell_is_right_clean_and_counted():
    told, _ = judged("mha-dense-512-bf16", "split")
    assert told.ok and told.ratio is not None and 0.9 < told.ratio < 1.25
    split = told.schedules["split"]
    assert split["tiles"] == 4 and split["compute_barriers"] == 0 and split["bits"] is None
    assert split["instructions"].keys() == split["in_loops"].keys() == {"reduce", "compute", "mma", "load", "idle"}
    assert split["instructions"]["compute"] > 10 * split["instructions"]["mma"] > 0
    assert split["in_loops"]["idle"] == 0 < split["in_loops"]["compute"] < split["instructions"]["compute"]


def test_a_deterministic_packed_cell_has_the_same_bits_in_all_orders_and_schedules():
    told, _ = judged("mha-varlen-512-bf16-deterministic", "aliased", "split")
    assert told.ok, told.complaints
    bits = [one for schedule in told.schedules.values() for one in schedule["bits"]]
    assert len(bits) == 10 and len(set(bits)) == 1
    assert len({one["setting"] for one in told.schedules.values()}) == 2


def test_a_cell_of_the_sm90_kernels():
    told, (measured,) = judged("gqa-causal-512-bf16-deterministic", "pingpong", arch="sm90")
    assert told.ok, told.complaints
    assert measured.instructions is not None and measured.in_loops is not None and measured.tiles
    assert measured.instructions["compute"] > measured.in_loops["compute"] > 10 * measured.in_loops["load"] > 0
    assert measured.bits is not None and len(set(measured.bits)) == 1


def test_sizes_may_choose_two_kernels_whose_counts_are_not_mixed():
    """On SM90 groups are split where a launch is small: not in what the observers watch here."""
    told, _ = judged("mqa-causal-512-bf16-deterministic", "pingpong", arch="sm90")
    assert told.ok and told.schedules["pingpong"]["instructions"] is None


def test_cells_meet_every_setting_in_turn():
    """What one schedule is observed in follows from the name of the cell; so four schedules meet all in each."""
    places = Counter(zlib.crc32(cell.name.encode()) % len(module.OBSERVED) for cell in CELLS)
    assert len(places) == len(module.OBSERVED) and min(places.values()) >= 20


def test_dq_that_is_added_in_any_order_is_seen(monkeypatch):
    """Negative control of the orders: the kernel without turns in the place of the one with them."""
    settings, workspaces = emulated.settings_of, module.allocate_workspaces
    monkeypatch.setattr(emulated, "settings_of", lambda scoring, deterministic: settings(scoring))
    monkeypatch.setattr(module, "allocate_workspaces", lambda arch, tensors, deterministic: workspaces(arch, tensors))
    bits, stopped = module._all_bits(batch_of(Size(Heads(1, 1), (300,)), "bf16", causal=False), SPLIT)
    assert len(bits) == 5 and not stopped and bits[1] != bits[0]


def without(kind: str):
    """`emulated.program`, but the first synchronisation of a kind of a main kernel is gone."""

    @functools.cache
    def program(text: str, entry: str) -> emulator.Program:
        loaded = emulator.load_program(ptx.parse_module(text), entry)
        if "tcgen05" not in text:
            return loaded
        first = next(site for site in sites(loaded) if site.kind == kind)
        return emulator.load_program(mutated(text, [first.edit]), entry)

    return program


def test_a_missing_wait_is_a_finding_though_the_numbers_are_right(monkeypatch):
    monkeypatch.setattr(emulated, "program", without("tmem-wait"))
    told, (measured,) = judged("mha-dense-512-bf16", "split")
    assert not told.ok and not told.broken and not measured.complaint
    assert {(f["schedule"], f["kernel"], f["rule"]) for f in told.findings} == {
        ("split", "main", "tmem-load-not-waited")
    }


def test_a_machine_that_stops_is_a_complaint_not_a_crash(monkeypatch):
    monkeypatch.setattr(emulated, "program", without("barrier"))
    told, _ = judged("mha-dense-512-bf16-deterministic", "split")
    assert not told.ok and not told.broken and told.errors is None
    assert told.complaints[0].startswith("split: ProtocolError: no initialised mbarrier")
    assert "race" in {finding["rule"] for finding in told.findings}, "the observers say why"


def test_an_order_that_stops_is_a_complaint(monkeypatch):
    def bits(batch, kernels, order):
        if order == 3:
            raise emulator.Deadlock("all wait")
        return "the same"

    monkeypatch.setattr(module, "_bits", bits)
    told, (measured,) = judged("mha-dense-512-bf16-deterministic", "split")
    assert measured.bits == ["the same"] * 3
    assert told.complaints == ["split: in CTA order 3: Deadlock: all wait"]


def test_wrong_numbers_are_a_complaint(monkeypatch):
    real = emulated.backward

    def off(batch, **options):
        done = real(batch, **options)
        return dataclasses.replace(done, gradients=done.gradients._replace(dk=done.gradients.dk * 1.02))

    monkeypatch.setattr(emulated, "backward", off)
    told, _ = judged("mha-dense-512-bf16", "split")
    assert not told.ok and told.complaints[0].startswith("split: dk has an error of 2.0")
    assert told.ratio is not None and told.ratio > 5


@pytest.mark.parametrize("heads", [Heads(1, 1), Heads(2, 1)])
def test_instructions_in_loops_are_those_of_a_tile(heads):
    """Without a mask all trips are alike: what a compute warp does in loops is proportional to them."""
    costs = []
    for length in (256, 512):
        batch = batch_of(Size(heads, (length,)), "bf16", causal=False)
        done = emulated.backward(batch, options=module.FAST)
        executions, roles = done.results["main"].executions, Roles()
        _, program = module._observed(batch, SPLIT, emulator.Options(), roles)
        assert program is not None
        assert ((executions > 0) == (sum(roles.seen.values()) > 0)).all()
        tiles = done.tile_iterations
        everything = per_tile(executions, roles, tiles)
        assert sum(everything.values()) * tiles == pytest.approx(executions.sum(), rel=1e-3)
        costs.append(per_tile(executions * inside_loops(program), roles, tiles)["compute"] / COMPUTE_WARPS)
        assert costs[-1] < everything["compute"] / COMPUTE_WARPS
    assert costs[0] == pytest.approx(costs[1], rel=0.02)
    assert 400 < costs[0] < 1000


def test_bits_tell_tensors_apart():
    one = torch.tensor([1.0, torch.nan])
    assert digest(one, one) == digest(one.clone(), one) != digest(one, -one)
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mha-dense-1k-bf16",
        "gqa-causal-2k-bf16-deterministic",
        "mha-local-causal-4k-fp16",
        "gqa-varlen-1k-fp16-deterministic",
    ],
)
def test_one_of_each_kind(name):
    told, _ = judged(name, "aliased", "split")
    assert told.ok, told.complaints


@pytest.mark.slow
def test_a_cell_of_every_layout_is_as_right_on_every_schedule():
    cell = Cell("mqa", "plain", True, 512, "bf16", False)
    assert cell == BY_NAME[cell.name]
    told, measured = judged(cell.name, "aliased", "slots", "signals", "split")
    assert told.ok, told.complaints
    assert len({one.errors for one in measured}) == 1, "the order of the sums is the same"
