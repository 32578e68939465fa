"""The order in which an assembler puts the instructions of a straight piece: that of the text, unless it would stall.

A list schedule for one warp: of the instructions whose operands are there and whose unit is free, the first of the text
goes next. Instructions that do more than write registers keep their order. Registers of asynchronous MMAs are not
touched across a wait, fence or MMA of a warpgroup. Registers are taken to be plenty, which is where this departs most
from ptxas.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from .lower import Node
from .uops import Kind, Unit

_HOLDS = {
    Kind.WGMMA: "wgmma_issue_interval", Kind.MMA: "tcgen05_issue_interval", Kind.COMMIT: "tcgen05_issue_interval",
    Kind.ARRIVE: "mbarrier_arrive_cycles", Kind.WAIT: "mbarrier_ready_wait", Kind.COPY: "tma_issue_cycles",
    Kind.BARRIER_ARRIVE: "named_barrier_arrive_cycles", Kind.BARRIER_SYNC: "named_barrier_latency",
}  # fmt: skip
_ASYNC = (Kind.WGMMA, Kind.WGMMA_WAIT, Kind.SKIP)
_LOADS = {Kind.LOAD: "shared_load_latency", Kind.GLOBAL: "global_load_latency", Kind.TMEM_LOAD: "tmem_load_latency"}
LATENCIES = {
    Unit.NONE: "arithmetic_latency", Unit.FMA: "arithmetic_latency", Unit.PACKED_FMA: "arithmetic_latency",
    Unit.ALU: "arithmetic_latency", Unit.MULTIPLY: "arithmetic_latency", Unit.CONVERT: "arithmetic_latency",
    Unit.MUFU: "mufu_latency", Unit.SPECIAL: "special_register_latency", Unit.COLLECTIVE: "collective_latency",
    Unit.UNIFORM: "uniform_latency", Unit.PREDICATE: "predicate_latency", Unit.SHUFFLE: "shuffle_latency",
}  # fmt: skip
INTERVALS = {
    Unit.FMA: "fma_interval", Unit.PACKED_FMA: "packed_fma_interval", Unit.ALU: "alu_interval",
    Unit.PREDICATE: "alu_interval", Unit.MULTIPLY: "integer_multiply_interval", Unit.MUFU: "mufu_interval",
    Unit.CONVERT: "convert_interval",
}  # fmt: skip


def latency(node: Node, point: Mapping[str, float]) -> float:
    """From a node's issue to one that uses its result, as the assembler reckons."""
    if node.form.kind is Kind.ARITHMETIC:
        return point[LATENCIES[node.form.unit]]
    return point[_LOADS[node.form.kind]] if node.form.kind in _LOADS else hold(node, point)


def hold(node: Node, point: Mapping[str, float]) -> float:
    """How long the warp issues nothing else that keeps its order after a node."""
    return max(1.0, point[_HOLDS[node.form.kind]]) if node.form.kind in _HOLDS else 1.0


def scheduled(nodes: Sequence[Node], point: Mapping[str, float]) -> list[Node]:
    """The nodes of a straight piece in the order in which they issue."""
    before, after = _dependences(nodes)
    missing = [len(edges) for edges in before]
    ready: list[int] = []
    coming = [(0.0, i) for i, count in enumerate(missing) if not count]
    heapq.heapify(coming)
    free: dict[Unit, float] = {}
    earliest = [0.0] * len(nodes)
    result: list[Node] = []
    now = 0.0
    while len(result) < len(nodes):
        while coming and coming[0][0] <= now:
            heapq.heappush(ready, heapq.heappop(coming)[1])
        i = _take(ready, nodes, free, now)
        if i is None:
            now = now + 1.0 if ready else coming[0][0]
            continue
        node = nodes[i]
        result.append(node)
        unit = node.form.unit
        if unit in INTERVALS:
            free[unit] = now + point[INTERVALS[unit]] * node.form.issues
        value, order = latency(node, point), hold(node, point)
        for j, is_data in after[i].items():
            earliest[j] = max(earliest[j], now + (value if is_data else order))
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(coming, (earliest[j], j))
        now += node.form.issues
    return result


def _take(ready: list[int], nodes: Sequence[Node], free: Mapping[Unit, float], now: float) -> int | None:
    """The first node of the text whose unit is free; the others stay."""
    left, found = [], None
    while ready and found is None:
        i = heapq.heappop(ready)
        if free.get(nodes[i].form.unit, 0.0) <= now:
            found = i
        else:
            left.append(i)
    for i in left:
        heapq.heappush(ready, i)
    return found


def _dependences(nodes: Sequence[Node]) -> tuple[list[set[int]], list[dict[int, bool]]]:
    """Per node: those before it, and those after it with whether the edge carries a value."""
    before: list[set[int]] = [set() for _ in nodes]
    after: list[dict[int, bool]] = [{} for _ in nodes]
    writer: dict[str, int] = {}
    loading: dict[str, int] = {}
    last, last_async = -1, -1
    touching: list[int] = []

    def edge(i: int, j: int, is_data: bool) -> None:
        if 0 <= i != j:
            before[j].add(i)
            after[i][j] = after[i].get(j, False) or is_data

    for j, node in enumerate(nodes):
        for name in node.reads:
            edge(loading.get(name, -1), j, False)
            edge(writer.get(name, -1), j, True)
        if node.touches:
            edge(last_async, j, False)
            touching.append(j)
        kind = node.form.kind
        if node.is_ordered:
            edge(last, j, False)
            last = j
        if kind in _ASYNC:
            for i in touching:
                edge(i, j, False)
            last_async, touching = j, []
        if kind is Kind.BRANCH and j == len(nodes) - 1:
            for i in range(j):
                edge(i, j, False)
        if kind is Kind.TMEM_WAIT_LOAD:
            for name, i in writer.items():
                if nodes[i].form.kind is Kind.TMEM_LOAD:
                    edge(i, j, True)
                    loading[name] = j
        for name in node.writes:
            writer[name] = j
            loading.pop(name, None)
    return before, after
