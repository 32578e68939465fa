"""Signals between warps: mbarriers and named barriers, from the one that arrives to the one that waits."""

from __future__ import annotations

import numpy as np

from undertow.calibrate.benchmark import Benchmark, Launch, Measured, Results, between, cycles, measured
from undertow.calibrate.probe import Probe
from undertow.calibrate.settings import Block, HandOff, Release

TRIPS = 64
COUNT = 200
WARPS = 8  # of our compute warps
SKEW = 200  # cycles from one warp to the next, more than a warp needs to arrive
FIRST_LANE = "elect.sync _|p, 0xffffffff;"
INIT = (FIRST_LANE, "@p mbarrier.init.shared::cta.b64 [ADDRESS], 1;")
INIT_MANY = (FIRST_LANE, f"@p mbarrier.init.shared::cta.b64 [ADDRESS], {2**20 - 1};")  # more than ever arrive
ARRIVE = "@p mbarrier.arrive.shared::cta.b64 _, [ADDRESS];"
HAND_OFFS = {
    "one_to_one": HandOff(1, 1),
    "without_hint": HandOff(1, 1, hinted=False),
    "eight_to_one": HandOff(WARPS, 1, skew=SKEW),
    "eight_at_once_to_one": HandOff(WARPS, 1),
    "one_to_eight": HandOff(1, WARPS),
    "varied": HandOff(1, 1, varied=7),  # no divisor of what the delay varies by
}
BLOCKS = {  # name: block, warps, instructions in it
    "ready_wait": (
        Block(("mbarrier.try_wait.parity.shared::cta.b64 p, [ADDRESS], 0;", "@!p trap;") * 16, (*INIT, ARRIVE)),
        1,
        16,
    ),
    "arrive": (Block((FIRST_LANE, *(ARRIVE,) * 32), INIT_MANY), 1, 32),
    "arrive_all": (Block((FIRST_LANE, *(ARRIVE,) * 32), INIT_MANY, warp_stride=8), 16, 32),
    "complete": (Block((FIRST_LANE, *(ARRIVE,) * 32), INIT), 1, 32),
    "complete_all": (Block((FIRST_LANE, *(ARRIVE,) * 32), INIT, warp_stride=8), 16, 32),
    "warp_sync": (Block(("bar.warp.sync 0xffffffff;",) * 256), 1, 256),
    "barrier_arrive": (Block(("barrier.cta.arrive.aligned 1, 32;",) * 32), 1, 32),
    **{
        f"barrier_{warps}": (Block((f"barrier.cta.sync.aligned 1, {32 * warps};",) * 64), warps, 64)
        for warps in (1, 2, 4, 8)
    },
}


def benchmarks(arch: str) -> tuple[Benchmark, ...]:
    """The same for all architectures."""
    del arch
    releases = (_release(True), _release(False))
    hand_offs = tuple(_hand_off(name, settings) for name, settings in HAND_OFFS.items())
    blocks = tuple(_block(name, *of) for name, of in BLOCKS.items())
    return (
        Benchmark(
            "mbarrier",
            "from an arrival to a warp that has waited for it; a wait that is over at once; arriving",
            (*hand_offs, *blocks[:5]),
            _mbarriers_of,
        ),
        Benchmark(
            "named-barrier",
            "eight skewed warps: from the last arrival to the first and the last that go on; back to back; warp sync",
            (*releases, *blocks[5:]),
            _barriers_of,
        ),
    )


def _hand_off(name: str, s: HandOff) -> Launch:
    warps = s.arriving + s.waiting
    return Launch(Probe(f"hand_off_{name}", "barriers.hand_off", 32 * warps, TRIPS * warps, 1024, s), TRIPS)


def _release(barrier: bool) -> Launch:
    name = "release" if barrier else "release_without"
    settings = Release(WARPS, SKEW, barrier)
    return Launch(Probe(name, "barriers.release", 32 * WARPS, 2 * WARPS * TRIPS, 1024, settings), TRIPS)


def _block(name: str, block: Block, warps: int, instructions: int) -> Launch:
    del instructions
    return Launch(Probe(name, "loops.loop", 32 * warps, 4 * warps, 1024, block), COUNT)


def hand_off_cycles(results: np.ndarray, s: HandOff) -> np.ndarray:
    """From the last arrival to every waiting warp: (repetitions, CTAs, trips but the first two, waiting warps)."""
    warps = s.arriving + s.waiting
    trips = results.reshape(*results.shape[:2], TRIPS, warps)[:, :, 2:]
    return trips[..., s.arriving :] - trips[..., : s.arriving].max(-1, keepdims=True)


def _mbarriers_of(results: Results) -> list[Measured]:
    each = {name: hand_off_cycles(results[f"hand_off_{name}-1"], s) for name, s in HAND_OFFS.items()}
    per = _per_instruction(results, ("ready_wait", "arrive", "arrive_all", "complete", "complete_all"))
    ways = {
        "one_to_one": "one warp to one",
        "without_hint": "one warp to one that gives no hint how long it may be suspended",
        "eight_to_one": f"eight warps, {SKEW} cycles apart, to one",
        "eight_at_once_to_one": "eight warps at once to one",
    }
    found = [
        measured(
            f"mbarrier_hand_off_{name}", each[name], "cycles", f"{how}: before the arrival to after the wait", False
        )
        for name, how in ways.items()
    ]
    to_eight = each["one_to_eight"]
    return [
        *found,
        measured("mbarrier_hand_off_one_to_eight", to_eight.mean(-1), "cycles", "one warp to eight, their mean", False),
        measured("mbarrier_hand_off_to_last", to_eight.max(-1), "cycles", "one warp to eight, the last of them", False),
        jitter(each["varied"]),
        measured("mbarrier_ready_wait", per["ready_wait"], "cycles", "try_wait and a branch, one after another"),
        _both("mbarrier_arrive_cycles", per["arrive"], per["complete"], "arrivals of one lane, one after another"),
        _both(
            "mbarrier_unit_interval",
            per["arrive_all"] / 16,
            per["complete_all"] / 16,
            "16 warps arrive, each elsewhere",
        ),
    ]


def jitter(hand_off: np.ndarray) -> Measured:
    """How much longer the longest hand-off of a repetition is, whose trips differ in nothing but the arrival's time."""
    widths = hand_off.max((1, 2, 3)) - hand_off.min((1, 2, 3))
    how = "one warp to one, arrivals at all phases of the waiting warp's tries: the longest hand-off less the shortest"
    return measured("wake_jitter", widths, "cycles", how)


def _both(name: str, pending: np.ndarray, completing: np.ndarray, how: str) -> Measured:
    """Arrivals of which none completes a phase, and those of which each does."""
    values = [float(np.median(each)) for each in (pending, completing)]
    return between(name, values, "cycles", f"{how}: {values[0]:.2f} each, {values[1]:.2f} if each completes a phase")


def _barriers_of(results: Results) -> list[Measured]:
    with_barrier, without = (
        results[f"{name}-1"].reshape(*results[f"{name}-1"].shape[:2], TRIPS, WARPS, 2)[:, :, 2:]
        for name in ("release", "release_without")
    )
    word = np.median(without[..., -1, 1] - without[..., -1, 0])  # when nobody else spins, as after a release
    after = with_barrier[..., 1] - with_barrier[..., 0].max(-1, keepdims=True) - word
    first, last = after.min(-1), after.max(-1)
    per = _per_instruction(results, tuple(name for name in BLOCKS if name.startswith(("barrier", "warp_sync"))))
    how = f"eight warps, {SKEW} cycles apart"
    back_to_back = [
        measured(f"named_barrier_back_to_back_{warps}", per[f"barrier_{warps}"], "cycles", f"{warps} warps", False)
        for warps in (1, 2, 4, 8)
    ]
    return [
        measured("named_barrier_latency", first, "cycles", f"{how}: last arrival to the first that goes on"),
        measured("named_barrier_last", last, "cycles", f"{how}: last arrival to the last that goes on", False),
        measured("named_barrier_mean", after.mean(-1), "cycles", f"{how}: last arrival, mean of the warps", False),
        measured("named_barrier_release_interval", (last - first) / (WARPS - 1), "cycles", how),
        *back_to_back,
        measured("named_barrier_arrive_cycles", per["barrier_arrive"], "cycles", "bar.arrive of one warp, in a row"),
        measured("warp_sync_cycles", per["warp_sync"], "cycles", "bar.warp.sync of a warp that is together, in a row"),
    ]


def _per_instruction(results: Results, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {name: cycles(results[f"{name}-1"]) / (COUNT * BLOCKS[name][2]) for name in names}
