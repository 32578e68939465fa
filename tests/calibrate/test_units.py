"""From clocks to constants: synthetic results of which the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from undertow.calibrate.benchmark import ALL, Benchmark, between, cycles, measured
from undertow.calibrate.probe import TARGETS
from undertow.calibrate.units import arithmetic, benchmarks, beside, copies, copy_port, matrix, shared, signals
from undertow.calibrate.units.machines import MACHINES, operand_passes

REPETITIONS = 3


def find(target: str, name: str) -> Benchmark:
    return benchmarks(target)[name]


def values(benchmark: Benchmark, results: dict[str, np.ndarray]) -> dict[str, float]:
    return {found.name: found.value for found in benchmark.evaluate(results)}


def spans(warps: int, length: float) -> np.ndarray:
    """As `loops.loop` writes them: every warp begins a cycle later, the last ends `length` after the first began."""
    out = np.zeros((REPETITIONS, 1, warps, 4), np.int64)
    out[..., 0] = 1000 + np.arange(warps)
    out[..., 2] = 1000 + length
    return out.reshape(REPETITIONS, 1, -1)


def test_a_rate_spans_the_first_begin_and_the_last_end():
    assert (cycles(spans(8, 500)) == 500).all()


def test_warps_that_did_nothing_do_not_count():
    results = spans(8, 500)
    results[..., 4:8] = 0
    assert (cycles(results) == 500).all()


def test_a_range_is_what_the_repetitions_lie_between():
    found = measured("x", np.arange(101), "cycles", "")
    assert (found.value, found.low, found.high) == (50, 5, 95)
    found = between("x", [2.0, 3.0, 1.0], "cycles", "")
    assert (found.value, found.low, found.high) == (2, 1, 3)


@pytest.mark.parametrize("target", TARGETS)
def test_names_of_constants_and_of_launches_are_unique(target):
    probes = {}
    for benchmark in benchmarks(target).values():
        for launch in benchmark.launches:
            assert probes.setdefault(launch.probe.name, launch.probe) == launch.probe


def test_the_deciding_test_comes_first():
    for target in TARGETS:
        assert next(iter(benchmarks(target))) == "shared-port"


def test_intervals_are_of_one_sub_partition():
    instructions = arithmetic.COUNT * arithmetic.LINES
    each = {"fma": 1, "alu": 2, "integer_multiply": 2, "mufu": 8, "convert": 2, "shuffle": 4, "convert_and_alu": 2}
    results = {f"rate_{name}-1": spans(16, 4 * instructions * cost) for name, cost in each.items()}
    found = values(find("sm_90a", "arithmetic-rate"), results)
    assert found["fma_interval"] == 1 and found["mufu_interval"] == 8
    assert found["convert_shares_alu"] == 1
    results["rate_convert_and_alu-1"] = spans(16, 4 * instructions)
    assert values(find("sm_90a", "arithmetic-rate"), results)["convert_shares_alu"] == 0


def test_latencies_leave_the_branch_of_the_loop_out():
    latency = {"fma": 4, "alu": 4, "mufu": 17, "shuffle": 24, "select": 5, "vote": 9, "short": 4}
    length = {"short": arithmetic.LINES // 4}
    results = {
        f"chain_{name}-1": spans(1, arithmetic.COUNT * (length.get(name, arithmetic.LINES) * each + 10))
        for name, each in latency.items()
    }
    found = values(find("sm_90a", "arithmetic-latency"), results)
    assert found["taken_branch_cycles"] == pytest.approx(10)
    assert found["arithmetic_latency"] == pytest.approx(4)
    assert found["predicate_latency"] == pytest.approx(6)
    assert found["collective_latency"] == pytest.approx(12)


def test_the_port_is_as_wide_as_loads_without_conflicts_say():
    accesses = shared.WARPS * shared.COUNT * shared.LINES
    cost = {"load_uniform": 2, "load_lanes": 4, "store_lanes": 4, "store_word": 1, "store_quarter": 1}
    results = {f"shared_{name}-1": spans(shared.WARPS, accesses * each) for name, each in cost.items()}
    found = values(find("sm_90a", "shared-rate"), results)
    assert found["shared_port_bytes_per_cycle"] == 128
    assert found["shared_load_registers_per_cycle"] == 2
    assert found["lsu_pass_interval"] == 4


def test_a_hand_off_counts_from_the_last_arrival():
    settings = signals.HandOff(2, 3)
    trips = np.tile([100, 130, 190, 200, 210], (1, 1, signals.TRIPS))
    found = signals.hand_off_cycles(trips, settings)
    assert (found == [60, 70, 80]).all() and found.shape[2] == signals.TRIPS - 2


def test_a_barrier_is_what_the_word_after_it_comes_later():
    trip = np.stack([np.arange(8) * 200, np.arange(8) * 200 + 44], -1)
    late = trip.copy()
    late[:, 1] = 1400 + 44 + 20 + np.arange(8)
    results = {
        f"{name}-1": np.tile(each.ravel(), (REPETITIONS, 1, signals.TRIPS))
        for name, each in (("release_without", trip), ("release", late))
    }
    results |= {
        f"{name}-1": spans(warps, signals.COUNT * count * 28)
        for name, (_, warps, count) in signals.BLOCKS.items()
        if name.startswith(("barrier", "warp"))
    }
    found = values(find("sm_90a", "named-barrier"), results)
    assert found["named_barrier_latency"] == 20 and found["named_barrier_last"] == 27
    assert found["named_barrier_release_interval"] == 1
    assert found["named_barrier_back_to_back_8"] == 28


def meeting(target: str, interval: float, per_window: float) -> np.ndarray:
    """As `beside` writes it. interval: cycles per instruction of an SM. per_window: runs of the block by each warp."""
    m = MACHINES[target]
    groups = np.arange(beside.COUNT + 1) * (beside.GROUP * interval * m.issuers) + 1000
    others = np.tile([1000, 1000 + beside.WINDOW * beside.COUNT, per_window], beside.WARPS)
    row = np.concatenate([*[groups] * m.issuers, others]).astype(np.int64)
    return np.tile(row, (REPETITIONS, 1, 1))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_one_port_or_two_is_read_off_the_sum(target, share):
    """The others get a quarter of the port beside operands that fill three quarters or more of it, or all of theirs."""
    m, results = MACHINES[target], {}
    for a in ("shared", m.elsewhere):
        for n in beside.COLUMNS:
            passes = operand_passes(m, n, a)
            alone = max(n / 2, passes)
            results[f"beside_none_{a}_n{n}-1"] = meeting(target, alone, 0)
            slowed = alone if share == 1 else max(alone, passes / (1 - share))
            for name, cost in beside.PASSES.items():
                lines = beside.STORES if name == "store" else beside.LOADS
                runs = beside.WINDOW * beside.COUNT * share / (cost * lines * beside.WARPS)
                results[f"beside_{name}_{a}_n{n}-1"] = meeting(target, slowed, runs)
    found = values(find(target, "shared-port"), results)
    assert found["mma_shares_port"] == (share < 1)
    if share < 1:
        assert found["mma_grants_per_other"] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("target", TARGETS)
def test_what_copies_take_of_the_port_is_read_off_both_sides(target):
    """Half a pass of a store for one that a copy writes; bulk reads get two fifths of what operands leave."""
    m, results, written = MACHINES[target], {}, 0.6
    for kind in copy_port.KINDS:
        for n, block in copy_port.BESIDE:
            interval = 1.25 * max((n or 64) / 2, operand_passes(m, n or 64, "shared"))
            stores = (1 - 0.5 * written) / (4 * beside.STORES * beside.WARPS) if block == "store" else 0
            both = meeting(target, interval, stores * beside.WINDOW * beside.COUNT)
            copies = written if kind == "load" else 0.4 * (1 - operand_passes(m, n, "shared") / interval) if n else 0.2
            window = beside.WINDOW * beside.COUNT
            done = np.array([1000, 1000 + window, copies * window * 128 / copy_port.TILE])
            rows = np.tile(done, (*both.shape[:2], 1))
            results[f"copies_{kind}_n{n}_{block}-1"] = np.concatenate([both, rows], -1)
    found = values(find(target, "copy-port"), results)
    assert found["store_passes_per_copied_pass"] == pytest.approx(0.5, rel=0.05)
    assert found["bulk_read_share_beside_mma"] == pytest.approx(0.4, rel=0.05)


def test_waits_that_take_as_long_whenever_the_arrival_comes_have_no_jitter():
    trips = np.tile([100, 185], (REPETITIONS, 1, signals.TRIPS))
    each = signals.hand_off_cycles(trips, signals.HAND_OFFS["varied"])
    assert signals.jitter(each).value == 0
    each[:, :, ::2] += 12
    assert signals.jitter(each).value == 12


def test_fill_and_tail_are_what_one_instruction_takes_beyond_its_interval():
    m = MACHINES["sm_90a"]
    results = {}
    for a, beyond in (("shared", 63), (m.elsewhere, 48)):
        for n in matrix.COLUMNS:
            for group in matrix.GROUPS:
                trip = np.array([100, 100 + beyond + n // 2 * group])
                results[f"mma_latency_{a}_n{n}_x{group}-1"] = np.tile(trip, (REPETITIONS, 1, matrix.TRIPS))
            gaps = np.where(np.arange(matrix.ISSUED) < 5, 13, n // 2)
            results[f"mma_issue_{a}_n{n}-1"] = np.tile(np.cumsum([0, *gaps]), (REPETITIONS, 1, 1))
    found = values(find("sm_90a", "mma-latency"), results)
    assert found["mma_fill_and_tail_shared"] == 63 and found["mma_fill_and_tail_registers"] == 48
    assert found["wgmma_issue_interval"] == 13 and found["wgmma_in_flight"] == 5


def test_the_latency_of_a_copy_is_what_remains_of_no_bytes():
    results = {}
    for name, settings in copies.SINGLES.items():
        for ctas in ("1", "all"):
            done = 300 + settings.size // 64
            results[f"copy_{name}-{ctas}"] = np.tile([0, 16, done], (REPETITIONS, 1, copies.TRIPS))
    found = values(find("sm_90a", "copy-latency"), results)
    assert found["tma_load_latency"] == pytest.approx(300)
    assert found["tma_load_burst_bytes_per_cycle"] == pytest.approx(64)
    assert found["tma_issue_cycles"] == 16


def test_rates_of_all_sms_are_per_sm():
    results = {
        f"stream_{name}-{'all' if ctas == ALL else ctas}": np.tile(
            spans(1, copies.COUNT * settings.size / 16), (1, 5 if ctas == ALL else 1, 1)
        )
        for name, (settings, ctas) in copies.STREAMS.items()
    }
    assert values(find("sm_90a", "reduce-rate"), results)["bulk_reduce_bytes_per_cycle"] == 16
