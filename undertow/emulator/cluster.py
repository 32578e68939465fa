"""CTAs that run side by side and reach each other's shared memory.

ADDRESSES. A CTA's own shared memory begins at address 0 of its shared window. `mapa` gives the address of another
CTA's memory as (rank + 1) << 24 | address, an encoding of this emulator; of the CTA's own memory it gives the plain
address. A CTA whose warps have all exited is out of reach.
"""

from __future__ import annotations

from typing import Any

from .errors import ProtocolError

RANK_SHIFT = 24
ADDRESS_MASK = (1 << RANK_SHIFT) - 1
EXITED = "cluster-exit"
"""Rule of errors about the shared memory of a CTA that has exited."""


class Cluster:
    """One cluster of a launch, CTAs by rank, with the scheduler of each. barrier: that of barrier.cluster."""

    def __init__(self, ctas: list[Any], schedulers: list[Any], barrier: Any):
        self.ctas = ctas
        self.schedulers = schedulers
        self.barrier = barrier
        for rank, cta in enumerate(ctas):
            cta.cluster, cta.rank = self, rank

    @property
    def progress(self) -> int:
        """What has changed so far in any CTA."""
        return sum(cta.progress for cta in self.ctas)

    @property
    def polls(self) -> int:
        """Fruitless polls so far."""
        return sum(cta.polls for cta in self.ctas)

    @property
    def finished(self) -> bool:
        """Whether every lane of every CTA has exited."""
        return all(cta.finished for cta in self.ctas)

    @property
    def live_warps(self) -> int:
        """Warps that have not exited."""
        return sum(1 for cta in self.ctas for warp in cta.warps if warp.groups)

    def pending(self) -> list[Any]:
        """CTAs with asynchronous operations in flight."""
        return [cta for cta in self.ctas if cta.engines.pending]

    def stir(self) -> None:
        """Something happened that any warp of any CTA may wait for."""
        for cta in self.ctas:
            cta.progress += 1

    def member(self, rank: int) -> Any:
        """The CTA of a rank, for access to its shared memory.

        Raises: ProtocolError if there is none, or if it has exited.
        """
        if not 0 <= rank < len(self.ctas):
            raise ProtocolError(f"CTA rank {rank} in a cluster of {len(self.ctas)}")
        cta = self.ctas[rank]
        if cta.finished:
            raise ProtocolError(f"access to the shared memory of CTA rank {rank}, which has exited", EXITED)
        return cta


def locate(cta: Any, address: int) -> tuple[Any, int]:
    """The CTA that a shared::cluster address of `cta` belongs to, and the address there."""
    rank = (address >> RANK_SHIFT) - 1
    if rank < 0 or rank == cta.rank:
        return cta, address & ADDRESS_MASK
    return cta.cluster.member(rank), address & ADDRESS_MASK


def map_address(cta: Any, address: int, rank: int) -> int:
    """What `mapa` computes."""
    if not 0 <= rank < len(cta.cluster.ctas):
        raise ProtocolError(f"mapa to CTA rank {rank} in a cluster of {len(cta.cluster.ctas)}")
    offset = address & ADDRESS_MASK
    return offset if rank == cta.rank else (rank + 1) << RANK_SHIFT | offset


def cta_rank(position: tuple[int, int, int], cluster: tuple[int, int, int]) -> int:
    """Rank in its cluster of the CTA at a position of the grid, x fastest."""
    x, y, z = (p % c for p, c in zip(position, cluster, strict=True))
    return (z * cluster[1] + y) * cluster[0] + x


def rank_of(cta: Any, address: int) -> int:
    """What `getctarank` computes."""
    rank = (address >> RANK_SHIFT) - 1
    return cta.rank if rank < 0 else rank
