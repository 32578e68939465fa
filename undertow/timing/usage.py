"""How busy each unit is in the steady state of a run, and what the warps of each role wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from .order import INTERVALS
from .run import Reason, Run
from .steady import Steady
from .trace import ENGINES, Trace
from .uops import Kind, Unit

PARTITIONS = 4
_MMAS = (ENGINES.index("wgmma"), ENGINES.index("tensor"))
_LOADS = (ENGINES.index("tensor_load"), ENGINES.index("bulk_load"))
_READS = (ENGINES.index("bulk_reduce"), ENGINES.index("bulk_store"))
_WORDS = {
    Reason.SLOT: "issue slot", Reason.QUEUE: "load/store queue", Reason.MMA_QUEUE: "MMA queue", Reason.MMA: "MMA",
    Reason.COPY: "copy", Reason.TMEM: "tensor memory", Reason.FENCE: "fence", Reason.BRANCH: "branch",
    Reason.HOLD: "cost of the instruction", Reason.STALL: "random stall",
}  # fmt: skip


def utilisation(trace: Trace, run: Run, steady: Steady, constants: Mapping[str, float]) -> dict[str, float]:
    """Share of the steady state in which each unit was busy; of units in each sub-partition, the mean."""
    begin, end = steady.window
    inside = (run.issued >= begin) & (run.issued < end)
    rows = trace.uops[trace.uop[inside]]
    kind, unit, issues = rows[:, 0], np.where(rows[:, 0] == Kind.ARITHMETIC, rows[:, 1], 0), rows[:, 2]
    busy: dict[str, float] = {"issue": issues.sum() / PARTITIONS}
    for which, name in INTERVALS.items():
        if name in constants:
            place = _place(which, constants)
            share = issues[unit == which].sum() * constants[name] / PARTITIONS
            busy[place] = busy.get(place, 0.0) + share
    argument = trace.argument[inside]
    passes = np.maximum(argument, 1) * np.isin(kind, (Kind.LOAD, Kind.STORE))
    returned = rows[:, 3] / constants["shared_load_registers_per_cycle"] * (kind == Kind.LOAD)
    lsu = float(np.maximum(passes, returned).sum())
    busy["lsu"] = lsu * constants["lsu_pass_interval"] / PARTITIONS
    busy |= _engines(trace, run, (begin, end), constants, lsu)
    for name, on in (("load", Kind.TMEM_LOAD), ("store", Kind.TMEM_STORE)):
        if f"tmem_{name}_registers_per_cycle" in constants:
            share = rows[kind == on, 3].sum() / constants[f"tmem_{name}_registers_per_cycle"] / PARTITIONS
            busy["tmem"] = busy.get("tmem", 0.0) + float(share)
    return {name: float(cycles) / (end - begin) for name, cycles in busy.items()}


def _place(unit: Unit, constants: Mapping[str, float]) -> str:
    """The pipe that a unit's instructions occupy."""
    if unit is Unit.PREDICATE or (unit is Unit.CONVERT and constants["convert_shares_alu"] > 0.5):
        return "alu"
    return {Unit.PACKED_FMA: "fma", Unit.MULTIPLY: "integer_multiply"}.get(unit, unit.name.lower())


def _engines(
    trace: Trace, run: Run, window: tuple[float, float], constants: Mapping[str, float], lsu: float
) -> dict[str, float]:
    """Busy cycles of the tensor cores, the copies and the shared-memory port."""
    begin, end = window
    engine, size = trace.operations[:, 0], trace.operations[:, 3]
    began, ended = run.operations[:, 1], run.operations[:, 2]
    overlap = np.clip(np.minimum(ended, end) - np.maximum(began, begin), 0.0, None)
    inside = (began >= begin) & (began < end)
    is_mma, is_load, is_read = (np.isin(engine, group) for group in (_MMAS, _LOADS, _READS))
    width = constants["shared_port_bytes_per_cycle"]
    operands = np.ceil(size[is_mma & inside] / width).sum()
    reads = size[is_read & inside].sum() / width
    shared = constants["mma_shares_port"] > 0.5
    return {
        "tensor": overlap[is_mma].sum(),
        "shared_port": reads + lsu + (operands if shared else 0.0),
        "tma_load": size[is_load & inside].sum() / constants["tma_load_bytes_per_cycle"],
        "bulk_reduce": overlap[is_read].sum(),
    } | ({} if shared else {"mma_operand_port": operands})


def stalls(trace: Trace, run: Run, steady: Steady) -> dict[str, dict[str, float]]:
    """role -> reason -> cycles per tile and warp, mean over the warps of the role; `issue` is what it issued."""
    begin, end = steady.window
    tiles = steady.last - steady.first
    code, words = _why_codes(trace, run)
    issues = trace.uops[trace.uop, 2]
    result: dict[str, np.ndarray] = {}
    warps: dict[str, int] = defaultdict(int)
    for warp, row in enumerate(trace.roles):
        part = trace.stream(warp)
        issued = run.issued[part]
        if len(issued) < 2:
            continue
        inside = np.flatnonzero((issued[1:] >= begin) & (issued[1:] < end)) + 1
        delay = np.clip(issued[inside] - issued[inside - 1] - issues[part][inside - 1], 0.0, None)
        sums = np.bincount(code[part][inside], delay, len(words))
        sums[0] += issues[part][inside].sum()
        role = row.partition(" warp ")[0]
        warps[role] += 1
        result[role] = result.get(role, 0.0) + sums
    return {
        role: {words[i]: float(sums[i]) / tiles / warps[role] for i in np.argsort(-sums).tolist() if sums[i] > 0.0}
        for role, sums in result.items()
    }


def _why_codes(trace: Trace, run: Run) -> tuple[np.ndarray, list[str]]:
    """`why` of every instruction as a number, and the words; the first one is `issue`, of what did not wait."""
    work = [work_name(trace, int(entry)) for entry in _first_entries(trace)]
    reason, cause = run.reason.astype(int), run.cause
    follows = np.isin(reason, (Reason.MBARRIER, Reason.BARRIER)) & (trace.argument >= 0)
    detail = np.zeros(len(reason), int)
    detail[follows] = trace.argument[follows]
    is_data, is_pipe = (reason == Reason.DATA) & (cause >= 0), reason == Reason.PIPE
    detail[is_data] = trace.uop[cause[is_data]]
    detail[is_pipe] = trace.uop[is_pipe]
    pairs, inverse = np.unique(np.stack([reason, detail]), axis=1, return_inverse=True)
    words = ["issue"]
    number = []
    for kind, which in pairs.T.tolist():
        text = _WORDS.get(Reason(kind), "issue" if kind == Reason.NONE else "unknown")
        if kind in (Reason.MBARRIER, Reason.BARRIER):
            text = trace.token_names[which]
        elif kind in (Reason.DATA, Reason.PIPE):
            text = f"result of {work[which]}" if kind == Reason.DATA else f"{work[which]} pipe"
        if text not in words:
            words.append(text)
        number.append(words.index(text))
    return np.array(number)[inverse.ravel()], words


def _first_entries(trace: Trace) -> np.ndarray:
    """An instruction of the trace for every row of `uops`; the first one for rows that nothing executes."""
    entries = np.zeros(len(trace.uops), int)
    present, first = np.unique(trace.uop, return_index=True)
    entries[present] = first
    return entries


def why(trace: Trace, run: Run, entry: int) -> str:
    """In words: why an instruction did not issue before it did."""
    reason = Reason(int(run.reason[entry]))
    if reason in (Reason.MBARRIER, Reason.BARRIER):
        return waited_for(trace, entry)
    if reason is Reason.DATA and run.cause[entry] >= 0:
        return f"result of {work_name(trace, int(run.cause[entry]))}"
    if reason is Reason.PIPE:
        return f"{work_name(trace, entry)} pipe"
    return _WORDS.get(reason, "unknown")


def waited_for(trace: Trace, entry: int) -> str:
    """Name of the pipeline side or barrier that an instruction waits on, or of the GEMM."""
    argument = int(trace.argument[entry])
    kind = Kind(int(trace.uops[trace.uop[entry], 0]))
    if kind in (Kind.WAIT, Kind.BARRIER_SYNC) and argument >= 0:
        return trace.token_names[argument]
    if kind is Kind.WGMMA_WAIT and argument >= 0:
        return trace.gemms[trace.operations[argument, 6]]
    return {Kind.COPY_WAIT: "copy", Kind.FENCE: "fence"}.get(kind, kind.name.lower())


def work_name(trace: Trace, entry: int) -> str:
    """The unit of an arithmetic instruction, the kind of any other."""
    kind, unit, *_ = trace.uops[trace.uop[entry]].tolist()
    return (Unit(unit).name if kind == Kind.ARITHMETIC else Kind(kind).name).lower().replace("_", " ")
