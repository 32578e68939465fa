"""Warps, lane sets and CTAs: what the machine moves from block to block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .memory import SharedMemory, TensorMemory
from .warpgroup import Warpgroup

FULL_MASK = 0xFFFFFFFF
UNSIGNED = {"16": np.uint16, "32": np.uint32, "64": np.uint64}


@dataclass(eq=False)
class Wait:
    """Why lanes cannot go on. `ready` is asked again and again; the instruction then runs once more.

    kind: mbarrier, barrier, bulk_group, cp_async_group, wgmma_group, tmem_alloc. subject: address, id or count, for the
    label.
    can_expire: try_wait may come back false when nothing else can happen; `expired` tells it to.
    """

    kind: str
    subject: int
    detail: str
    ready: Callable[[], bool]
    can_expire: bool = False
    expired: bool = False

    @property
    def may_go(self) -> bool:
        """Whether the waiting instruction should run again."""
        return self.expired or self.ready()


class Warp:
    """A warp: `groups` maps each program counter to the mask of lanes that sit there; lanes that exited are gone.

    idle_at: the CTA's progress count at which the warp was last seen to wait in vain; while that count stands still
    there is no need to ask again.
    """

    __slots__ = ("barrier_tokens", "groups", "idle_at", "members", "number", "waits")

    def __init__(self, number: int, members: int):
        self.number = number
        self.members = members
        self.reset()

    def reset(self) -> None:
        """Back to the first instruction."""
        self.groups: dict[int, int] = {0: self.members}
        self.waits: dict[int, Wait] = {}
        self.idle_at = -1
        self.barrier_tokens: dict[int, tuple[int, int]] = {}

    @property
    def live_mask(self) -> int:
        """Lanes that have not exited."""
        mask = 0
        for lanes in self.groups.values():
            mask |= lanes
        return mask

    def converged_at(self) -> int:
        """The common program counter of a warp with all its 32 lanes together, or -1."""
        if len(self.groups) == 1:
            ((pc, mask),) = self.groups.items()
            if mask == FULL_MASK:
                return pc
        return -1


class RegisterFile:
    """All virtual registers of a CTA: one row per register, one column per thread."""

    def __init__(self, num_slots: dict[str, int], num_threads: int):
        self.num_threads = num_threads
        self.p = np.zeros((max(num_slots["p"], 1), num_threads), bool)
        self.words: dict[str, np.ndarray] = {
            name: np.empty((max(num_slots[name], 1), num_threads), dtype) for name, dtype in UNSIGNED.items()
        }
        self.words["128"] = np.empty((max(num_slots["128"], 1), num_threads * 2), np.uint64)
        self.poison()

    def poison(self) -> None:
        """Fill with 0xCD; predicates become false."""
        self.p[:] = False
        for array in self.words.values():
            array.view(np.uint8).fill(0xCD)


class LaneSet:
    """Lanes that execute together: a run of whole warps, or some lanes of one warp.

    warps: warp numbers; index: CTA lane numbers, ascending; n: how many; masks: lane mask per warp;
    full: every lane of every warp. `registers` belongs to the CTA, or is a compact copy for scattered lanes
    (`is_scattered`), in which case columns [0, n) stand for the lanes.
    """

    def __init__(self, cta: "Cta", warps: list[int], masks: list[int]):
        self.cta = cta
        self.warps = warps
        self.masks = masks
        self.full = all(mask == FULL_MASK for mask in masks)
        self.index = np.concatenate(
            [w * 32 + np.flatnonzero([mask >> i & 1 for i in range(32)]) for w, mask in zip(warps, masks, strict=True)]
        )
        self.n = len(self.index)
        self.first = int(self.index[0])
        self.is_scattered = self.first + self.n - 1 != int(self.index[-1])
        if self.is_scattered:
            self.registers = RegisterFile(cta.num_slots, self.n)
            self.columns = slice(0, self.n)
        else:
            self.registers = cta.registers
            self.columns = slice(self.first, self.first + self.n)
        self.namespace: dict = {"L": self}
        self.bound: dict = {}

    @property
    def num_warps(self) -> int:
        """How many warps take part."""
        return len(self.warps)

    def copy_in(self, used: Mapping[str, Sequence[int]]) -> None:
        """Bring the registers that a block uses into the compact copy; `used` maps files to register numbers."""
        self._copy(used, self.cta.registers, self.registers, inward=True)

    def copy_out(self, used: Mapping[str, Sequence[int]]) -> None:
        """Bring the registers back."""
        self._copy(used, self.registers, self.cta.registers, inward=False)

    def _copy(self, used, source: RegisterFile, target: RegisterFile, inward: bool) -> None:
        for name, numbers in used.items():
            index, here = self.index, np.arange(self.n)
            if name == "128":
                index = (index[:, None] * 2 + np.arange(2)).ravel()
                here = np.arange(2 * self.n)
            read, write = (index, here) if inward else (here, index)
            from_array = source.p if name == "p" else source.words[name]
            to_array = target.p if name == "p" else target.words[name]
            to_array[np.ix_(numbers, write)] = from_array[np.ix_(numbers, read)]


@dataclass
class NamedBarrier:
    """State of one named barrier: threads that arrived, completions so far, and the expected count of this round."""

    arrived: int = 0
    generation: int = 0
    expected: int = 0
    reduction: int = 0
    result: int = 0


class Cta:
    """A thread block: registers, memories, barriers, engines. Reused for one CTA of the grid after another."""

    def __init__(self, machine, num_threads: int, num_slots: dict[str, int]):
        self.machine = machine
        self.num_threads = num_threads
        self.num_slots = num_slots
        num_warps = -(-num_threads // 32)
        self.registers = RegisterFile(num_slots, num_warps * 32)
        self.warps = [
            Warp(w, FULL_MASK if (w + 1) * 32 <= num_threads else (1 << num_threads % 32) - 1) for w in range(num_warps)
        ]
        self.shared = SharedMemory(machine.shared_base, machine.shared_size)
        self.shared.owner = self
        self.local = np.full((num_warps * 32, max(machine.program.local_bytes, 16)), 0xCD, np.uint8)
        self.tmem = TensorMemory()
        self.engines = machine.new_engines()
        self.barriers: dict[int, NamedBarrier] = {}
        self.warpgroups: dict[int, Warpgroup] = {}
        self.position = (0, 0, 0)
        self.number = self.rank = 0
        self.cluster: Any = None
        self.specials: dict[tuple[str, str], np.ndarray] = {}
        self.progress = 0
        self.polls = 0
        self._lane_sets: dict[tuple, LaneSet] = {}

    def reset(self, position: tuple[int, int, int], number: int) -> None:
        """Become another CTA of the grid, with poisoned memory."""
        self.position, self.number = position, number
        self.registers.poison()
        for warp in self.warps:
            warp.reset()
        self.shared.reset()
        self.local.fill(0xCD)
        self.tmem.reset()
        self.engines.reset(number)
        self.barriers = {}
        self.warpgroups = {}
        self.progress = self.polls = 0
        for (name, _), cell in self.specials.items():
            cell[...] = self.machine.cta_value(self, name)

    @property
    def finished(self) -> bool:
        """Whether every lane has exited."""
        return not any(w.groups for w in self.warps)

    def warpgroup(self, warp: int) -> Warpgroup:
        """The warpgroup of a warp."""
        number = warp // 4
        if number not in self.warpgroups:
            self.warpgroups[number] = Warpgroup(number)
        return self.warpgroups[number]

    def gang(self, first: int, count: int) -> LaneSet:
        """Whole warps first .. first + count - 1."""
        key = (first, count)
        lanes = self._lane_sets.get(key)
        if lanes is None:
            lanes = self._lane_sets[key] = LaneSet(self, list(range(first, first + count)), [FULL_MASK] * count)
        return lanes

    def part(self, warp: int, mask: int) -> LaneSet:
        """Some lanes of one warp."""
        if mask == FULL_MASK:
            return self.gang(warp, 1)
        key = (warp, 0, mask)
        lanes = self._lane_sets.get(key)
        if lanes is None:
            lanes = self._lane_sets[key] = LaneSet(self, [warp], [mask])
        return lanes
