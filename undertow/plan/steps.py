"""The steps of a role's program for one tile, as data.

`tile` counts from the trip's own tile t: 0 is t, 1 is the next one. The MMA warp's program is not written down: it is
derived from its issue order by `schedule.py`, because its waits and commits follow from who reads and writes what.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """Wait for one side of a pipeline: `full` before using what it carries, `empty` before overwriting it."""

    pipeline: str
    side: str
    tile: int = 0


@dataclass(frozen=True)
class Signal:
    """Arrive on one side of a pipeline (by commit, by elected lanes, or by the bytes of a copy)."""

    pipeline: str
    side: str
    tile: int = 0


@dataclass(frozen=True)
class Load:
    """Read the named region's stages: from TMEM into registers by compute and reduce warps, or from SMEM."""

    region: str
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Store:
    """Write the named region's stages from registers, to TMEM or SMEM."""

    region: str
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Copy:
    """Start an asynchronous copy into the region's slot of the pipeline that carries it."""

    region: str
    pipeline: str


@dataclass(frozen=True)
class Issue:
    """Issue one GEMM of tile t + `tile`."""

    mma: str
    tile: int = 0

    def __str__(self) -> str:
        return f"{self.mma}_{{t+{self.tile}}}" if self.tile else f"{self.mma}_t"


@dataclass(frozen=True)
class TakeTurn:
    """Wait until every CTA that comes before this one has added to what the region's tile is a part of."""

    region: str


@dataclass(frozen=True)
class PassTurn:
    """Let the next CTA add, once all that this one has added is complete in global memory."""

    region: str


@dataclass(frozen=True)
class Guard:
    """Compute-wide barrier: every warp has loaded the columns that the next store of `region` covers."""

    region: str


@dataclass(frozen=True)
class Join:
    """Complete a role's stores and bring its lanes together before a signal.

    `barrier`: the named barrier of all its warps, or None where each warp joins on its own. `tmem`, `smem`: whether
    stores since the last join went there, so that they have to complete, or to become visible to the async proxy.
    """

    barrier: str | None
    tmem: bool = False
    smem: bool = False


@dataclass(frozen=True)
class Touch:
    """What a step of a warpgroup's program reads or writes in shared memory.

    tile: whose value, counted from the trip's own; it says which stage, unless `stage` does. parts: bytes of the stage,
    all of it if None. value: what is there, if it is not what the region is named for.
    """

    region: str
    tile: int = 0
    parts: tuple[range, ...] | None = None
    stage: int | None = None
    value: str = ""


@dataclass(frozen=True)
class Group:
    """GEMMs that a warpgroup issues together, and waits for together; what they read is in shared memory."""

    what: str
    reads: tuple[Touch, ...]


@dataclass(frozen=True)
class Finish:
    """Wait until at most `pending` of the groups that the warpgroup has issued are not complete."""

    pending: int


@dataclass(frozen=True)
class Put:
    """Store to shared memory, and make it visible to whoever reads next."""

    touch: Touch


@dataclass(frozen=True)
class Take:
    """Read from shared memory, to the end."""

    touch: Touch


@dataclass(frozen=True)
class Sync:
    """Arrive at a named barrier and wait until all that take part have arrived."""

    barrier: str


@dataclass(frozen=True)
class Arrive:
    """Arrive at a named barrier without waiting."""

    barrier: str


@dataclass(frozen=True)
class IfFirst:
    """Steps of the trip of tile t if that is the first of its key/value tile, which is not the first of the CTA."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class IfLast:
    """Steps of the trip of tile t if t + `tile` is the last query tile of its key/value tile."""

    steps: tuple[Step, ...]
    tile: int = 0


WarpgroupStep = Group | Finish | Put | Take | Sync | Arrive | IfFirst | IfLast
Step = Wait | Signal | Load | Store | Copy | Issue | TakeTurn | PassTurn | WarpgroupStep
SynchronisedStep = Step | Guard | Join
