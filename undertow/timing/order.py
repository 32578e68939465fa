"""The order in which an assembler puts the instructions of a straight piece: a list schedule, longest path first.

Of the instructions whose operands are there and whose unit is free, the one with the longest way to the end goes next;
among equals, the first of the text. Instructions that do more than write registers keep their order. A register of an
asynchronous MMA is touched after the wait for its group, and before the next MMA that has it. Registers are taken to be
plenty: this knows no spills, and no stalls for want of a register.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from .lower import Node
from .uops import Kind, Unit

_HOLDS = {
    Kind.WGMMA: "wgmma_issue_interval", Kind.MMA: "tcgen05_issue_interval", Kind.COMMIT: "tcgen05_issue_interval",
    Kind.ARRIVE: "mbarrier_arrive_cycles", Kind.COPY: "tma_issue_cycles",
    Kind.BARRIER_ARRIVE: "named_barrier_arrive_cycles", Kind.BARRIER_SYNC: "named_barrier_latency",
}  # fmt: skip
_LOADS = {
    Kind.ASK: "mbarrier_ready_wait",
    Kind.LOAD: "shared_load_latency",
    Kind.GLOBAL: "global_load_latency",
    Kind.TMEM_LOAD: "tmem_load_latency",
}
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


def _pipe(node: Node) -> Unit:
    """What a node occupies: its unit; loads, stores and shuffles the path to shared memory."""
    return Unit.SHUFFLE if node.form.kind in (Kind.LOAD, Kind.STORE) else node.form.unit


def _interval(node: Node, point: Mapping[str, float]) -> float:
    """How long a node occupies it, as far as the assembler can know: that a load has no conflicts."""
    if node.form.kind is Kind.LOAD:
        return node.words / point["shared_load_registers_per_cycle"] * point["lsu_pass_interval"]
    if node.form.kind is Kind.STORE:
        return node.words * point["lsu_pass_interval"]
    return point[INTERVALS[node.form.unit]] * node.form.issues if node.form.unit in INTERVALS else 0.0


def scheduled(nodes: Sequence[Node], point: Mapping[str, float]) -> list[Node]:
    """The nodes of a straight piece in the order in which they issue."""
    before, after = _dependences(nodes)
    missing = [len(edges) for edges in before]
    rank = _ranks(nodes, after, point)
    ready: list[tuple[int, int]] = []
    coming = [(0.0, i) for i, count in enumerate(missing) if not count]
    heapq.heapify(coming)
    free: dict[Unit, float] = {}
    earliest = [0.0] * len(nodes)
    result: list[Node] = []
    now = 0.0
    while len(result) < len(nodes):
        while coming and coming[0][0] <= now:
            i = heapq.heappop(coming)[1]
            heapq.heappush(ready, (rank[i], i))
        i = _take(ready, nodes, free, now)
        if i is None:
            now = now + 1.0 if ready else coming[0][0]
            continue
        node = nodes[i]
        result.append(node)
        free[_pipe(node)] = now + _interval(node, point)
        value, order = latency(node, point), hold(node, point)
        for j, is_data in after[i].items():
            earliest[j] = max(earliest[j], now + (value if is_data else order))
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(coming, (earliest[j], j))
        now += node.form.issues
    return result


def _ranks(nodes: Sequence[Node], after: Sequence[Mapping[int, bool]], point: Mapping[str, float]) -> list[int]:
    """Place of each node in the order of urgency: the longest way to the end first, then the order of the text."""
    way = [0.0] * len(nodes)
    for i in reversed(_topological(after)):
        value, order = latency(nodes[i], point), hold(nodes[i], point)
        way[i] = max((way[j] + (value if is_data else order) for j, is_data in after[i].items()), default=value)
    ranks = [0] * len(nodes)
    for rank, i in enumerate(sorted(range(len(nodes)), key=lambda i: (-way[i], i))):
        ranks[i] = rank
    return ranks


def _topological(after: Sequence[Mapping[int, bool]]) -> list[int]:
    """The nodes, each after those before it."""
    missing = Counter(j for edges in after for j in edges)
    found = [i for i in range(len(after)) if not missing[i]]
    for i in found:
        for j in after[i]:
            missing[j] -= 1
            if not missing[j]:
                found.append(j)
    assert len(found) == len(after)
    return found


def _take(ready: list[tuple[int, int]], nodes: Sequence[Node], free: Mapping[Unit, float], now: float) -> int | None:
    """The most urgent node whose unit is free; the others stay."""
    left, found = [], None
    while ready and found is None:
        entry = heapq.heappop(ready)
        if free.get(_pipe(nodes[entry[1]]), 0.0) <= now:
            found = entry[1]
        else:
            left.append(entry)
    for entry in left:
        heapq.heappush(ready, entry)
    return found


class _Held:
    """Which wait lets registers of asynchronous MMAs go, and who has touched them before the next MMA.

    readers: wait -> nodes that read what it let go.
    """

    def __init__(self):
        self.readers: dict[int, list[int]] = {}
        self._groups: list[set[str]] = [set()]
        self._free_since: dict[str, int] = {}
        self._touched: dict[str, list[int]] = {}
        self._last_wait = -1

    def before(self, j: int, node: Node, writer: Mapping[str, int]) -> list[int]:
        """The nodes that must come before node j on account of such registers. writer: of each, the last so far."""
        found = [self._free_since.get(name, self._last_wait) for name in node.touches]
        for name in node.touches:
            self._touched.setdefault(name, []).append(j)
            wait = self._free_since.get(name, self._last_wait)
            if name in node.reads and writer.get(name, -1) < wait:
                self.readers.setdefault(wait, []).append(j)
        for name in node.holds:
            found += self._touched.pop(name, [])
        self._groups[-1] |= node.holds
        if node.commits:
            self._groups.append(set())
        if node.limit >= 0:
            done = max(0, len(self._groups) - 1 - node.limit)
            for name in set().union(*self._groups[:done]):
                self._free_since[name] = j
            self._groups = self._groups[done:]
            self._last_wait = j
        return [i for i in found if i >= 0]


def _dependences(nodes: Sequence[Node]) -> tuple[list[set[int]], list[dict[int, bool]]]:
    """Per node: those before it, and those after it with whether the edge carries a value."""
    before: list[set[int]] = [set() for _ in nodes]
    after: list[dict[int, bool]] = [{} for _ in nodes]
    writer: dict[str, int] = {}
    loading: dict[str, int] = {}
    last, held = -1, _Held()

    def edge(i: int, j: int, is_data: bool) -> None:
        if 0 <= i != j:
            before[j].add(i)
            after[i][j] = after[i].get(j, False) or is_data

    for j, node in enumerate(nodes):
        for name in node.reads:
            edge(loading.get(name, -1), j, False)
            edge(writer.get(name, -1), j, True)
        for i in held.before(j, node, writer):
            edge(i, j, False)
        kind = node.form.kind
        if node.is_ordered:
            edge(last, j, False)
            last = j
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
    _read_before_the_next(nodes, held.readers, after, edge)
    return before, after


def _read_before_the_next(
    nodes: Sequence[Node], readers: Mapping[int, list[int]], after: Sequence[Mapping[int, bool]],
    edge: Callable[[int, int, bool], None],
) -> None:  # fmt: skip
    """What a wait let go is read before the next MMA or wait for one, where nothing stands against it.

    Seen in ptxas's output: first come the 64 instructions that read S, then the wait for dP, even where the text has
    half of them behind it.
    """
    for wait, touching in readers.items():
        following = (j for j in range(wait + 1, len(nodes)) if nodes[j].form.kind in (Kind.WGMMA, Kind.WGMMA_WAIT))
        barrier = next(following, None)
        if barrier is None:
            continue
        behind, left = {barrier}, [barrier]
        while left:
            for j in after[left.pop()]:
                if j not in behind:
                    behind.add(j)
                    left.append(j)
        for j in touching:
            if j not in behind:
                edge(j, barrier, False)
