"""The whole programs of the compute warpgroups and the reduce warps as data: what the proof of the plan is about.

The trip of tile t is a burst: what is left of the tiles before, then S and dP of t, and its softmax. The first trip is
t = 0; the last one, with t the number of tiles, has no tile of its own. Warpgroup 0 computes dQ a tile late. Tiles are
counted through all key/value tiles of a CTA; what the schedule warp says of these is taken as known.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.plan.schema import Plan
from undertow.plan.steps import Arrive, Finish, Group, IfFirst, IfLast, Put, Signal, Step, Sync, Take, Touch, Wait

Q, DO, K, V = "load_compute_q", "load_compute_do", "load_compute_k", "load_compute_v"
ROW_BYTES = 128  # of sdS, which has a panel of 64 query columns of all keys after another; also of a row of dV or dK


def programs(plan: Plan) -> tuple[tuple[str, tuple[Step, ...]], ...]:
    """By `<role>[<warpgroup>].<part>`, in the order in which the parts run. plan: all but its programs count."""
    found = []
    for owner in range(plan.role("compute").warpgroups):
        of = Warpgroup(plan, owner)
        found += [
            (f"compute[{owner}].first", of.first),
            (f"compute[{owner}].next", of.burst),
            (f"compute[{owner}].last", of.last),
            (f"compute[{owner}].epilogue", of.epilogue),
            (f"reduce[{owner}].first", of.reduce_first),
            (f"reduce[{owner}].next", of.reduce_next),
        ]
    return tuple(found)


@dataclass(frozen=True)
class Warpgroup:
    """The programs of one of the two warpgroups and of its reduce warp. owner: its number."""

    plan: Plan
    owner: int

    @property
    def first(self) -> tuple[Step, ...]:
        """What leads up to the first burst; warpgroup 0 has the first turn, and zeros for the dQ of no tile."""
        begin = Put(Touch("sdS", -1, parts=(self._panel,))) if self.owner == 0 else Arrive(self._turn_of_the_other)
        keys, values = (Wait(name, "full") for name in (K, V))
        return (begin, keys, Wait(Q, "full"), self._s, values, Wait(DO, "full"), self._dp, *self._softmax)

    @property
    def burst(self) -> tuple[Step, ...]:
        """The dQ that is due, dV and dK of the tile before, S and dP of this one; then its softmax.

        Where another key/value tile begins, dV and dK of the one before pass through the stage of sdS that this tile's
        dS goes to; those of a part of a group go from registers to global memory.
        """
        return (
            Sync(f"turn{self.owner}"),
            self._dq(),
            self._dv,
            Finish(1),
            self._k_is_read,
            *self._staged(),
            self._dk,
            IfFirst((Wait(K, "full"),)),
            Wait(Q, "full"),
            Finish(1),
            self._s,
            Signal(DO, "empty", -1),
            Finish(1),
            Signal(Q, "empty", -1),
            IfFirst((Wait(V, "full"),)),
            Wait(DO, "full"),
            self._dp,
            Arrive(self._turn_of_the_other),
            Arrive(f"dq_full{self.owner}"),
            *((IfFirst(self._passes_through),) if self._passes_through else ()),
            *self._softmax,
        )

    @property
    def last(self) -> tuple[Step, ...]:
        """The burst after the last tile; then warpgroup 0 has one more dQ."""
        full = Arrive(f"dq_full{self.owner}")
        steps = (Sync(f"turn{self.owner}"), self._dq(), self._dv, self._dk, Finish(2))
        steps += () if self.owner else (self._k_is_read,)
        steps += (Arrive(self._turn_of_the_other), *self._staged(), full, Finish(0))
        if self.owner == 0:
            steps += (Sync(f"turn{self.owner}"), self._dq(tile=-1), Finish(0), *self._staged(tile=-1), full)
        return steps

    @property
    def epilogue(self) -> tuple[Step, ...]:
        """The last dV and dK pass through the stage of sdS that the last tile does not use; no barrier is left open."""
        return *self._passes_through, Sync(f"dq_empty{self.owner}")

    @property
    def _passes_through(self) -> tuple[Step, ...]:
        if self.plan.attention.split:
            return ()
        staging = Touch("sdS", parts=self._shares, value="dV and dK")
        return Put(staging), Take(staging)

    @property
    def _k_is_read(self) -> Step:
        """K goes back when the last dQ of its tile is complete, of which the next one shows."""
        due = self._due(None)
        return IfLast((Signal(K, "empty", due),), due)

    @property
    def reduce_first(self) -> tuple[Step, ...]:
        """What warpgroup 0 stages in its first burst is no tile's: it is dropped."""
        empty = Arrive(f"dq_empty{self.owner}")
        return (empty, Sync(f"dq_full{self.owner}"), empty) if self.owner == 0 else (empty,)

    @property
    def reduce_next(self) -> tuple[Step, ...]:
        """A staged share is added to the accumulator by an engine that reads the buffer."""
        return Sync(f"dq_full{self.owner}"), Take(Touch("sdQ", stage=self.owner)), Arrive(f"dq_empty{self.owner}")

    @property
    def _softmax(self) -> tuple[Step, ...]:
        """P and dS. Only a softcap reads LSE from shared memory, before dP is complete and after."""
        lse = (Take(Touch("sLSE")),) if self.plan.attention.softcap else ()
        return (
            Finish(1),
            *lse,
            Finish(0),
            IfLast((Signal(V, "empty"),)),
            *lse,
            Put(Touch("sdS", parts=self._shares)),
        )

    def _staged(self, tile: int | None = None) -> tuple[Step, ...]:
        """A share of dQ stored for the reduce warp, once the one before has been read."""
        return Sync(f"dq_empty{self.owner}"), Put(Touch("sdQ", self._due(tile), stage=self.owner))

    # GEMMs, and what they read.

    @property
    def _s(self) -> Group:
        return Group("S", (Touch("sK"), Touch("sQ"), Touch("sRow")))

    @property
    def _dp(self) -> Group:
        return Group("dP", (Touch("sV"), Touch("sdO"), Touch("sRow")))

    @property
    def _dv(self) -> Group:
        return Group("dV", (Touch("sdO", -1),))

    @property
    def _dk(self) -> Group:
        return Group("dK", (Touch("sQ", -1),))

    def _dq(self, tile: int | None = None) -> Group:
        """dQ of the 64 query rows that are the warpgroup's share: it reads the dS of all keys."""
        return Group("dQ", (Touch("sdS", self._due(tile), parts=(self._panel,)), Touch("sK", self._due(tile))))

    def _due(self, tile: int | None) -> int:
        """The tile whose dQ is due in a burst, unless another is said."""
        return self.owner - 2 if tile is None else tile

    @property
    def _panel(self) -> range:
        """Bytes of a stage of sdS: the query columns of the warpgroup's share of dQ, all keys."""
        size = self.plan.tile_n * ROW_BYTES
        return range(self.owner * size, (self.owner + 1) * size)

    @property
    def _shares(self) -> tuple[range, ...]:
        """Bytes of a stage of sdS: the warpgroup's keys, in every panel."""
        warpgroups = self.plan.role("compute").warpgroups
        size = self.plan.tile_n * ROW_BYTES // warpgroups
        panels = self.plan.smem_region("sdS").stage_bytes // (self.plan.tile_n * ROW_BYTES)
        starts = [(panel * warpgroups + self.owner) * size for panel in range(panels)]
        return tuple(range(start, start + size) for start in starts)

    @property
    def _turn_of_the_other(self) -> str:
        return f"turn{1 - self.owner}"
