"""Named barriers and fences: PTX ISA, "bar, barrier", "barrier.cluster", "membar, fence".

Barriers count whole warps, as the hardware does: a warp that arrives adds 32 threads (its live ones if some exited).
Fences order nothing here, because the machine executes memory accesses in program order; observers use them.
"""

import numpy as np

from ..errors import ProtocolError
from ..events import BarrierOperation, FenceExecuted
from ..state import NamedBarrier, Wait
from .lane_values import common_value, full
from .table import Effect, machine

CHAPTER = "parallel-synchronization-and-communication-instructions"
_ARRIVE = (Effect("release", "barrier"),)
_SYNC = (Effect("release", "barrier"), Effect("acquire", "barrier"))
COUNT_RULE = "named-barrier-count"
CLUSTER_BARRIER = 16
"""Key of the hardware's cluster barrier in `Cta.barriers`, after the sixteen named ones."""


def _live_warps(cta, barrier_id: int) -> int:
    """Warps that a barrier of everybody waits for: those of the CTA, or of the cluster, that have not exited."""
    if barrier_id == CLUSTER_BARRIER:
        return cta.cluster.live_warps
    return len([w for w in cta.warps if w.groups])


def _arrive(lanes, warp: int, barrier_id: int, threads: int, publish) -> None:
    """Count one warp's arrival and complete the barrier if it was the last; `publish` reports the arrival."""
    cta = lanes.cta
    if threads % 32:
        raise ProtocolError(f"barrier {barrier_id} for {threads} threads; allowed are multiples of 32")
    barrier = cta.barriers.setdefault(barrier_id, NamedBarrier())
    if barrier.arrived and barrier.expected != threads:
        raise ProtocolError(
            f"barrier {barrier_id}: warp {warp} expects {threads or 'all'} threads, warps already there expect"
            f" {barrier.expected or 'all'}",
            COUNT_RULE,
        )
    barrier.expected = threads
    barrier.arrived += 32
    needed = threads or _live_warps(cta, barrier_id) * 32
    if barrier.arrived > needed:
        raise ProtocolError(f"barrier {barrier_id}: {barrier.arrived} threads arrived, {needed} expected", COUNT_RULE)
    completed = barrier.arrived == needed
    if publish:
        publish(warp, barrier_id, barrier.generation, threads, completed)
    if completed:
        complete_barrier(cta, barrier)


def _publisher(lanes, decoded, op: str, sink):
    """A function that reports arrivals, or None if nobody listens."""
    if sink is None:
        return None
    return lambda *facts: sink(BarrierOperation(lanes, decoded, op, *facts))


def complete_barrier(cta, barrier: NamedBarrier) -> None:
    """End a round: waiting warps may leave."""
    barrier.generation += 1
    barrier.arrived = 0
    barrier.result, barrier.reduction = barrier.reduction, 0
    cta.cluster.stir()


def _check_whole_warps(lanes, mask) -> None:
    for warp, present in zip(lanes.warps, lanes.masks, strict=True):
        if lanes.cta.warps[warp].live_mask & ~present:
            raise ProtocolError(f"barrier reached by lanes {present:#010x} of warp {warp} only", "partial-warp")
    if mask is not None and mask.any() and not mask.all():
        raise ProtocolError("barrier guarded by a predicate that is false in some lanes of a warp", "partial-warp")


def _operand(lanes, values, warp: int) -> int:
    value = common_value(values)
    return int(full(values, lanes.n)[lanes.index // 32 == warp][0]) if value is None else value


def _make_sync(decoded, bus, reduce=None):
    """Arrive once, then wait for the round to end. `reduce(barrier, lanes, warp, predicate)` adds to its result."""
    sink = bus.sink(BarrierOperation)
    index = decoded.index

    def handler(lanes, mask, barrier_id, threads=None, predicate=None):
        _check_whole_warps(lanes, mask)
        if mask is not None and not mask.any():
            return None if reduce is None else np.zeros(lanes.n, np.uint32)
        waiting = None
        for warp_number in lanes.warps:
            warp = lanes.cta.warps[warp_number]
            number = _barrier_number(lanes, barrier_id, warp_number)
            if index not in warp.barrier_tokens:
                count = 0 if threads is None else _operand(lanes, threads, warp_number)
                if threads is not None and count == 0:
                    raise ProtocolError(f"barrier {number} for 0 threads")
                if reduce:
                    reduce(lanes.cta.barriers.setdefault(number, NamedBarrier()), lanes, warp_number, predicate)
                before = lanes.cta.barriers.get(number, NamedBarrier()).generation
                warp.barrier_tokens[index] = (number, before)
                _arrive(lanes, warp_number, number, count, _publisher(lanes, decoded, "sync", sink))
            number, generation = warp.barrier_tokens[index]
            if lanes.cta.barriers[number].generation == generation:
                waiting = waiting or number
        if waiting is not None:
            return _barrier_wait(lanes, index, waiting)
        values = []
        for warp_number in lanes.warps:
            number, generation = lanes.cta.warps[warp_number].barrier_tokens.pop(index)
            barrier = lanes.cta.barriers[number]
            values.append(barrier.result)
            if sink:
                sink(BarrierOperation(lanes, decoded, "leave", warp_number, number, generation, barrier.expected, True))
        return np.repeat(np.array(values, np.uint32), 32)[: lanes.n] if reduce else None

    return handler


def _barrier_wait(lanes, index: int, number: int) -> list[Wait]:
    """One Wait per warp: those whose round is over run again at once."""
    cta = lanes.cta

    def wait_of(warp) -> Wait:
        key, generation = warp.barrier_tokens[index]
        barrier = cta.barriers[key]

        def ready() -> bool:
            if barrier.generation == generation and not barrier.expected:
                alive = _live_warps(cta, key) * 32
                if barrier.arrived >= alive:
                    complete_barrier(cta, barrier)
            return barrier.generation != generation

        return Wait("barrier", key, f"{barrier.arrived} of {barrier.expected or 'all'} threads arrived", ready)

    return [wait_of(cta.warps[w]) for w in lanes.warps]


def _barrier_number(lanes, values, warp: int) -> int:
    number = _operand(lanes, values, warp)
    if not 0 <= number < CLUSTER_BARRIER:
        raise ProtocolError(f"barrier {number}; allowed are 0 to 15")
    return number


for _spelling in ("bar{.cta}.sync", "barrier{.cta}.sync{.aligned}"):
    machine(
        f"{_spelling} barrier:u32{{, threads:u32}}", chapter=CHAPTER, effects=_SYNC, blocking=True
    )(_make_sync)  # fmt: skip


def _make_arrive(decoded, bus):
    sink = bus.sink(BarrierOperation)

    def handler(lanes, mask, barrier_id, threads):
        _check_whole_warps(lanes, mask)
        if mask is not None and not mask.any():
            return
        for warp in lanes.warps:
            count = _operand(lanes, threads, warp)
            _arrive(
                lanes, warp, _barrier_number(lanes, barrier_id, warp), count, _publisher(lanes, decoded, "arrive", sink)
            )

    return handler


for _spelling in ("bar{.cta}.arrive", "barrier{.cta}.arrive{.aligned}"):
    machine(f"{_spelling} barrier:u32, threads:u32", chapter=CHAPTER, effects=_ARRIVE)(_make_arrive)


def _make_reduction(decoded, bus):
    op = decoded.mods["op"]

    def reduce(barrier: NamedBarrier, lanes, warp: int, predicate) -> None:
        chosen = full(predicate, lanes.n)[lanes.index // 32 == warp]
        first = barrier.arrived == 0
        if op == "popc":
            barrier.reduction = (0 if first else barrier.reduction) + int(chosen.sum())
        elif op == "and":
            barrier.reduction = int((first or barrier.reduction) and chosen.all())
        else:
            barrier.reduction = int((not first and barrier.reduction) or chosen.any())

    sync = _make_sync(decoded, bus, reduce)

    def handler(lanes, mask, barrier_id, *rest):
        threads, predicate = rest if len(rest) == 2 else (None, rest[0])
        result = sync(lanes, mask, barrier_id, threads, predicate)
        return result.astype(bool) if op != "popc" and isinstance(result, np.ndarray) else result

    return handler


for _spelling in ("bar{.cta}.red", "barrier{.cta}.red{{.aligned}}"):
    _spelling = _spelling.replace("{{", "{").replace("}}", "}")
    for _op, _type in (("popc", "u32"), ("<op>", "pred")):
        for _threads in (", threads:u32", ""):
            _row = machine(
                f"{_spelling}.{_op}.{_type} d:{_type}, barrier:u32{_threads}, c:pred", chapter=CHAPTER, effects=_SYNC,
                blocking=True, op="and or",
            )  # fmt: skip
            if _op == "popc":

                def _popc(decoded, bus):
                    from dataclasses import replace

                    return _make_reduction(replace(decoded, mods={**decoded.mods, "op": "popc"}), bus)

                _row(_popc)
            else:
                _row(_make_reduction)


@machine(
    "barrier.cluster.arrive{.<order>}{.aligned}", chapter=CHAPTER, effects=(Effect("release", "cluster"),),
    order="release relaxed",
)  # fmt: skip
def _cluster_arrive(decoded, bus):
    """A split barrier over all threads of the cluster."""
    sink = bus.sink(BarrierOperation)

    def handler(lanes, mask):
        _check_whole_warps(lanes, mask)
        for warp in lanes.warps:
            barrier = lanes.cta.barriers.setdefault(CLUSTER_BARRIER, NamedBarrier())
            lanes.cta.warps[warp].barrier_tokens[-1] = (CLUSTER_BARRIER, barrier.generation)
            _arrive(lanes, warp, CLUSTER_BARRIER, 0, _publisher(lanes, decoded, "arrive", sink))

    return handler


@machine(
    "barrier.cluster.wait{.<order>}{.aligned}", chapter=CHAPTER, effects=(Effect("acquire", "cluster"),), blocking=True,
    order="acquire",
)  # fmt: skip
def _cluster_wait(decoded, bus):
    sink = bus.sink(BarrierOperation)

    def handler(lanes, mask):
        warps = [lanes.cta.warps[w] for w in lanes.warps]
        if any(-1 not in w.barrier_tokens for w in warps):
            raise ProtocolError("barrier.cluster.wait without barrier.cluster.arrive")
        barrier = lanes.cta.barriers[CLUSTER_BARRIER]
        if any(barrier.generation == w.barrier_tokens[-1][1] for w in warps):
            return _barrier_wait(lanes, -1, CLUSTER_BARRIER)
        for warp in warps:
            _, generation = warp.barrier_tokens.pop(-1)
            if sink:
                facts = (warp.number, CLUSTER_BARRIER, generation, 0, True)
                sink(BarrierOperation(lanes, decoded, "leave", *facts))
        return None

    return handler


def _make_fence(decoded, bus):
    sink = bus.sink(FenceExecuted)

    def handler(lanes, mask, *sources):
        if sink:
            sink(FenceExecuted(lanes, decoded, mask))

    return handler


_SCOPES = "cta cluster gpu sys"
for _syntax, _proxy in (
    ("membar.<level>", "generic"),
    ("fence{.<order>}.<scope>", "generic"),
    ("fence.mbarrier_init.release.cluster", "generic"),
    ("fence.proxy.<proxy>{.<space>}", "async"),
    ("fence.proxy.async::generic.<order>.<restrict>.cluster", "async"),
    ("fence.<order>.<restrict>.cluster", "generic"),
    ("fence.proxy.tensormap::generic.release.<scope>", "tensormap"),
    ("fence.proxy.tensormap::generic.acquire.<scope> [a], size:u32", "tensormap"),
):
    machine(
        _syntax, chapter=CHAPTER, effects=(Effect("fence", "any", _proxy),), level="cta gl sys", scope=_SCOPES,
        order="sc acq_rel acquire release", proxy="alias async async.global async.shared::cta async.shared::cluster",
        space="global shared::cta shared::cluster",
        restrict="sync_restrict::shared::cta sync_restrict::shared::cluster",
    )(_make_fence)  # fmt: skip
