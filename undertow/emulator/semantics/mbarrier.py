"""mbarriers: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".

The phase is an integer; its bit 0 is the parity of the hardware. A waiting try_wait is a state of the warp, not a
spin: the instruction runs again when the phase has completed, and comes back false only when nothing else can happen.
A state token is phase << 32 | pending arrivals.
"""

from typing import Any

import numpy as np

from ..cluster import locate
from ..events import MbarrierOperation
from ..observers.base import Finding
from ..state import Wait
from . import data_movement
from .lane_values import active_positions, common_value, full
from .table import Effect, machine

CHAPTER = "parallel-synchronization-and-communication-instructions-mbarrier"
SPACE = "shared shared::cta shared::cluster"
_TAIL = "{.<order>}{.<scope>}{.<space>}.b64 "
_CLASSES: dict[str, Any] = {"space": SPACE, "order": "release relaxed acquire", "scope": "cta cluster"}
SPLIT = object()
"""Returned by a blocking handler when the warps of a gang must be asked one by one."""


def shared_address(value: int) -> int:
    """Turn a generic address of shared memory into a shared address; shared addresses stay as they are."""
    if data_movement.SHARED_WINDOW <= value < data_movement.SHARED_WINDOW + data_movement.WINDOW_BYTES:
        return value - data_movement.SHARED_WINDOW
    return value


class Signals:
    """Changes mbarriers on behalf of warps and engines, and tells observers."""

    def __init__(self, decoded, bus):
        self.decoded = decoded
        self.sink = bus.sink(MbarrierOperation)
        mods = decoded.mods
        self.order = mods.get("order") or "release"
        self.scope = mods.get("scope") or "cta"

    def __call__(self, lanes, op: str, place: tuple[Any, int], count: int, operation=None, which=None) -> None:
        """Do `op` (arrive, arrive_drop, expect_tx or complete_tx) on a barrier, by lanes `which`.

        place: the CTA whose barrier it is, and its address there.
        """
        cta, address = place
        cell = cta.shared.mbarrier(address)
        phase, completed = cell.phase, False
        if op == "expect_tx":
            cell.expect(count)
        elif op == "complete_tx":
            completed = cell.complete(count)
        else:
            completed = cell.arrive(count, drop=op == "arrive_drop")
        cta.progress += 1
        if self.sink:
            self.sink(
                MbarrierOperation(
                    lanes,
                    self.decoded,
                    op,
                    address,
                    phase,
                    completed,
                    count,
                    self.order,
                    self.scope,
                    operation,
                    which=which,
                    home=None if cta is lanes.cta else cta,
                )
            )


def active_addresses(lanes, mask, address) -> list[tuple[int, int]]:
    """Pairs (address, number of active lanes that name it), in lane order."""
    values = full(address, lanes.n)
    if mask is not None:
        values = values[mask]
    if len(values) == 0:
        return []
    common = common_value(values)
    if common is not None:
        return [(shared_address(common), len(values))]
    counts: dict[int, int] = {}
    for value in values.tolist():
        key = shared_address(value)
        counts[key] = counts.get(key, 0) + 1
    return list(counts.items())


@machine(
    "mbarrier.init{.<space>}.b64 [a], count:u32", chapter=CHAPTER, effects=(Effect("write", "mbarrier"),), space=SPACE
)
def _init(decoded, bus):
    sink = bus.sink(MbarrierOperation)

    def handler(lanes, mask, address, count):
        for where, _ in active_addresses(lanes, mask, address):
            value = int(np.asarray(count).flat[0])
            lanes.cta.shared.init_mbarrier(where, value)
            lanes.cta.progress += 1
            if sink:
                sink(MbarrierOperation(lanes, decoded, "init", where, 0, False, value))

    return handler


@machine("mbarrier.inval{.<space>}.b64 [a]", chapter=CHAPTER, effects=(Effect("write", "mbarrier"),), space=SPACE)
def _inval(decoded, bus):
    sink = bus.sink(MbarrierOperation)

    def handler(lanes, mask, address):
        for where, _ in active_addresses(lanes, mask, address):
            phase = lanes.cta.shared.mbarrier(where).phase
            lanes.cta.shared.inval_mbarrier(where)
            if sink:
                sink(MbarrierOperation(lanes, decoded, "inval", where, phase, False))

    return handler


def _make_tx(op: str):
    def make(decoded, bus):
        signal = Signals(decoded, bus)

        def handler(lanes, mask, address, count):
            for position in range(lanes.n) if mask is None else np.flatnonzero(mask).tolist():
                home, where = locate(lanes.cta, shared_address(int(full(address, lanes.n)[position])))
                signal(lanes, op, (home, where), int(full(count, lanes.n)[position]), None, np.array([position]))

        return handler

    return make


for _op, _effect in (("expect_tx", "write"), ("complete_tx", "release")):
    machine(
        f"mbarrier.{_op}{_TAIL}[a], count:u32", chapter=CHAPTER, effects=(Effect(_effect, "mbarrier"),), **_CLASSES
    )(_make_tx(_op))


def _make_arrive(drop: bool, expects: bool):
    def make(decoded, bus):
        signal = Signals(decoded, bus)
        op = "arrive_drop" if drop else "arrive"

        def handler(lanes, mask, address, count=None):
            tokens = np.zeros(lanes.n, np.uint64)
            simple = active_addresses(lanes, mask, address) if count is None else None
            if simple is not None and len(simple) == 1:
                where, arrivals = simple[0]
                home, where = locate(lanes.cta, where)
                cell = home.shared.mbarrier(where)
                tokens[:] = cell.phase << 32 | cell.pending
                signal(lanes, op, (home, where), arrivals, None, active_positions(lanes, mask))
                return tokens
            addresses, counts = full(address, lanes.n), None if count is None else full(count, lanes.n)
            for position in range(lanes.n) if mask is None else np.flatnonzero(mask).tolist():
                home, where = locate(lanes.cta, shared_address(int(addresses[position])))
                cell = home.shared.mbarrier(where)
                tokens[position] = cell.phase << 32 | cell.pending
                amount = 1 if counts is None else int(counts[position])
                which = np.array([position])
                if expects:
                    signal(lanes, "expect_tx", (home, where), amount, None, which)
                    amount = 1
                signal(lanes, op, (home, where), amount, None, which)
            return tokens

        return handler

    return make


for _opcode, _drop in (("arrive", False), ("arrive_drop", True)):
    for _dst in ("d:b64, ", ""):
        machine(
            f"mbarrier.{_opcode}{_TAIL}{_dst}[a]{{, count:u32}}", chapter=CHAPTER,
            effects=(Effect("release", "mbarrier"),), **_CLASSES,
        )(_make_arrive(_drop, False))  # fmt: skip
        machine(
            f"mbarrier.{_opcode}.expect_tx{_TAIL}{_dst}[a], count:u32", chapter=CHAPTER,
            effects=(Effect("release", "mbarrier"),), **_CLASSES,
        )(_make_arrive(_drop, True))  # fmt: skip
    machine(
        f"mbarrier.{_opcode}.noComplete{_TAIL}d:b64, [a], count:u32", chapter=CHAPTER,
        effects=(Effect("release", "mbarrier"),), **_CLASSES,
    )(_make_arrive(_drop, False))  # fmt: skip


def _make_wait(by_parity: bool, can_block: bool):
    def make(decoded, bus):
        sink = bus.sink(MbarrierOperation)
        order, scope = decoded.mods.get("order") or "acquire", decoded.mods.get("scope") or "cta"
        index = decoded.index

        def publish(lanes, which, question: tuple[int, int], success: bool) -> None:
            address, key = question
            phase = awaited(lanes.cta.shared.mbarrier(address), key)
            parity = key if by_parity else None
            sink(
                MbarrierOperation(lanes, decoded, "wait", address, phase, success, 1, order, scope, None, parity, which)
            )

        def awaited(cell, key: int) -> int:
            """Index of the phase that is waited for: the latest complete or current one of that parity."""
            if not by_parity:
                return key >> 32
            current = cell.phase & 1
            return cell.phase if current == (key & 1) else cell.phase - 1

        def is_complete(cell, key: int) -> bool:
            return cell.has_completed(key & 1) if by_parity else cell.phase > key >> 32

        def one(lanes, mask, address: int, key: int):
            """All lanes ask the same question: True, False, or one Wait per warp."""
            cell = lanes.cta.shared.mbarrier(address)
            if by_parity and key > 1:
                lanes.cta.machine.note(parity_finding(key), decoded.index)
            success = is_complete(cell, key)
            waits = lanes.cta.warps[lanes.warps[0]].waits if can_block and not success else {}
            if not success and can_block and not (index in waits and waits[index].expired):
                return [_mbarrier_wait(lanes, cell, key, by_parity, is_complete) for _ in lanes.warps]
            if not success:
                lanes.cta.polls += 1
            if sink:
                publish(lanes, active_positions(lanes, mask), (address, key), success)
            return np.bool_(success)

        def handler(lanes, mask, address, key, hint=None):
            if mask is not None and not mask.any():
                return np.bool_(False)
            addresses, keys = address, key
            if mask is not None:
                addresses, keys = full(address, lanes.n)[mask], full(key, lanes.n)[mask]
            where, what = common_value(addresses), common_value(keys)
            if where is not None and what is not None:
                return one(lanes, mask, shared_address(where), what)
            if lanes.num_warps > 1:
                return SPLIT
            results = np.zeros(lanes.n, bool)
            asked = np.arange(lanes.n) if mask is None else np.flatnonzero(mask)
            questions = [
                (shared_address(int(a)), int(k))
                for a, k in zip(full(address, lanes.n)[asked], full(key, lanes.n)[asked], strict=True)
            ]
            for position, (place, value) in zip(asked.tolist(), questions, strict=True):
                results[position] = is_complete(lanes.cta.shared.mbarrier(place), value)
            waits = lanes.cta.warps[lanes.warps[0]].waits
            if can_block and not results.any() and not (index in waits and waits[index].expired):
                cell = lanes.cta.shared.mbarrier(questions[0][0])
                wait = _mbarrier_wait(lanes, cell, questions[0][1], by_parity, is_complete)
                wait.ready = lambda: any(is_complete(lanes.cta.shared.mbarrier(p), v) for p, v in questions)
                return [wait]
            if sink:
                for question in dict.fromkeys(questions):
                    which = np.array([p for p, q in zip(asked.tolist(), questions, strict=True) if q == question])
                    publish(lanes, which, question, bool(results[which[0]]))
            return results

        return handler

    return make


def _mbarrier_wait(lanes, cell, key: int, by_parity: bool, is_complete) -> Wait:
    what = f"parity {key & 1}" if by_parity else f"phase {key >> 32}"
    detail = (
        f"{what}; now in phase {cell.phase}, {cell.pending} of {cell.count} arrivals pending, {cell.tx} bytes missing"
    )
    return Wait("mbarrier", cell.address, detail, lambda: is_complete(cell, key), can_expire=True)


def parity_finding(parity: int) -> Finding:
    return Finding(
        "mbarrier-parity-range",
        f"mbarrier wait with parity {parity}; the ISA allows 0 and 1, bit 0 is used",
        hint="reduce the phase counter modulo 2",
    )


for _opcode, _can_block in (("test_wait", False), ("try_wait", True)):
    for _parity, _type in (("", "u64"), (".parity", "u32")):
        machine(
            f"mbarrier.{_opcode}{_parity}{_TAIL}d:pred, [a], key:{_type}" + ("{, hint:u32}" if _can_block else ""),
            chapter=CHAPTER, effects=(Effect("acquire", "mbarrier"),), blocking=_can_block, **_CLASSES,
        )(_make_wait(bool(_parity), _can_block))  # fmt: skip


@machine("mbarrier.pending_count.b64 d:b32, state:b64", chapter=CHAPTER, effects=(Effect("read", "mbarrier"),))
def _pending_count(decoded, bus):
    return lambda lanes, mask, state: (full(state, lanes.n) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
