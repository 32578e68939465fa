"""The order in which an assembler puts the instructions of a straight piece: a list schedule, longest path first.

Instructions that do more than write registers keep their order. Registers of asynchronous MMAs are not touched across
a wait, fence or MMA of a warpgroup. Registers are taken to be plenty, which is where this departs most from ptxas.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from .lower import Node
from .uops import Kind, Unit

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
    return point[_LOADS[node.form.kind]] if node.form.kind in _LOADS else 1.0


def scheduled(nodes: Sequence[Node], point: Mapping[str, float]) -> list[Node]:
    """The nodes of a straight piece in the order in which they issue."""
    before, after = _dependences(nodes)
    urgency = [0.0] * len(nodes)
    for i in reversed(range(len(nodes))):
        own = latency(nodes[i], point)
        urgency[i] = max((urgency[j] + (own if is_data else 1.0) for j, is_data in after[i].items()), default=own)
    missing = [len(edges) for edges in before]
    ready: list[tuple[float, int]] = []
    coming = [(0.0, i) for i, count in enumerate(missing) if not count]
    heapq.heapify(coming)
    free: dict[Unit, float] = {}
    earliest = [0.0] * len(nodes)
    result: list[Node] = []
    now = 0.0
    while len(result) < len(nodes):
        while coming and coming[0][0] <= now:
            _, i = heapq.heappop(coming)
            heapq.heappush(ready, (-urgency[i], i))
        i = _take(ready, nodes, free, now)
        if i is None:
            now = min([coming[0][0]] if coming else [now + 1.0]) if not ready else now + 1.0
            continue
        node = nodes[i]
        result.append(node)
        unit = node.form.unit
        if unit in INTERVALS:
            free[unit] = now + point[INTERVALS[unit]] * node.form.issues
        own = latency(node, point)
        for j, is_data in after[i].items():
            earliest[j] = max(earliest[j], now + (own if is_data else 1.0))
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(coming, (earliest[j], j))
        now += node.form.issues
    return result


def _take(ready: list, nodes: Sequence[Node], free: Mapping[Unit, float], now: float) -> int | None:
    """The most urgent node whose unit is free; the others stay."""
    left, found = [], None
    while ready and found is None:
        entry = heapq.heappop(ready)
        if free.get(nodes[entry[1]].form.unit, 0.0) <= now:
            found = entry[1]
        else:
            left.append(entry)
    for entry in left:
        heapq.heappush(ready, entry)
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
        if kind is Kind.BRANCH:
            for i in range(j):
                edge(i, j, False)
        if kind is Kind.TMEM_WAIT_LOAD:
            for name, i in writer.items():
                if nodes[i].form.kind is Kind.TMEM_LOAD:
                    loading[name] = j
        for name in node.writes:
            writer[name] = j
            loading.pop(name, None)
    return before, after
