"""From the plan to the machine: the only place where names become addresses, parities, barrier ids and registers.

A role asks for `channels["load_mma_q"]` and says which tile it means. The slot and the phase parity follow from the
tile's number, so no phase bit travels through a loop, and a wait for a tile before the first passes on a fresh barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import tcgen05

from undertow.kernels.events import span
from undertow.kernels.sm100.arguments import ELEMENT_TYPES
from undertow.plan.schema import MBARRIER_BYTES, REGISTERS_PER_SM, Arrival, DType, Pipeline, Plan

SMEM_ALIGNMENT = 1024  # bytes; of the whole map, so that the offsets of the plan keep their regions' alignment


def multiple(index: int | Int32, of: int) -> int | Int32:
    """index * of, whose divisibility by `of` the compiler may use for the alignment of vector accesses."""
    return index * of if isinstance(index, int) else cute.assume(index * of, divby=of)


@dataclass(frozen=True)
class SharedMemory:
    """The CTA's dynamic shared memory under the plan's map."""

    base: cute.Pointer
    plan: cutlass.Constexpr

    def pointer(self, region: str, stage: int | Int32 = 0) -> cute.Pointer:
        """Where a stage of a region begins, typed and aligned as the plan says."""
        smem = self.plan.smem_region(region)
        start = cute.recast_ptr(self.base + self.plan.smem_offsets[region], dtype=ELEMENT_TYPES[smem.dtype])
        return start + multiple(stage, smem.rows * smem.columns)

    def address(self, region: str, stage: int | Int32 = 0) -> Int32:
        """The same as a 32-bit address."""
        offset = self.plan.smem_offsets[region]
        return self.base.toint() + (offset + stage * self.plan.smem_region(region).stage_bytes)

    def tmem_pointer(self) -> cute.Pointer:
        """The word that receives the address of the TMEM allocation."""
        return cute.recast_ptr(self.base + self.plan.tmem_pointer_offset, dtype=Int32)


def allocate_shared_memory(plan: Plan) -> SharedMemory:
    """Take the dynamic shared memory from its first byte on."""
    return SharedMemory(cute.arch.get_dyn_smem(cutlass.Int8, alignment=SMEM_ALIGNMENT), plan)


@dataclass(frozen=True)
class Channel:
    """One pipeline as one role sees it. `tile` is the number of the tile within the CTA; sides are `full`, `empty`.

    A role waits for full as the consumer and for empty as the producer, and completes the other side.
    """

    barriers: Any
    plan: Plan
    pipeline: Pipeline
    role: str

    def wait(self, side: str, tile: int | Int32) -> None:
        """Block the thread until this side of the tile's slot is complete; a slot without an earlier tile is free."""
        assert self.role == self._owner("empty" if side == "full" else "full"), f"{self.role} may not wait: {self}"
        if not isinstance(tile, int) or tile >= 0:
            with span(self.plan, f"{self.pipeline.name}.{side}"):
                cute.arch.mbarrier_wait(self._barrier(side, tile), (tile >> self._log2_stages) & 1)

    def arrive(self, side: str, tile: int | Int32) -> None:
        """Arrive by one elected lane; the caller has joined the warp's lanes."""
        assert self._arrival(side) is Arrival.WARPS, f"{self.pipeline.name}.{side} is not completed by warps"
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self._barrier(side, tile))

    def arrive_if(self, side: str, tile: int | Int32, lane: Boolean) -> None:
        """Arrive by the lane for which it holds, if there is one; no branch, which would part what lies around it."""
        assert self._arrival(side) is Arrival.WARPS, f"{self.pipeline.name}.{side} is not completed by warps"
        barrier = self._barrier(side, tile).toint()
        cute.arch.inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier], predicate=lane)

    def commit(self, side: str, tile: int | Int32) -> None:
        """Arrive when the MMAs that this thread has issued are done."""
        assert self._arrival(side) is Arrival.COMMIT, f"{self.pipeline.name}.{side} is not completed by commits"
        tcgen05.commit(self._barrier(side, tile))

    def expect(self, tile: int | Int32, first: bool) -> cute.Pointer:
        """Arrive by one elected lane and expect the bytes of a tile; returns the barrier that its copies complete."""
        assert self._arrival("full") is Arrival.TMA, f"{self.pipeline.name}.full is not completed by copies"
        barrier = self._barrier("full", tile)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.plan.tx_bytes(self.pipeline, first))
        return barrier

    @property
    def _log2_stages(self) -> int:
        return self.pipeline.stages.bit_length() - 1

    def _owner(self, side: str) -> str:
        return self.pipeline.producer if side == "full" else self.pipeline.consumer

    def _arrival(self, side: str) -> Arrival:
        assert self.role == self._owner(side), f"{self.role} may not complete {self.pipeline.name}.{side}"
        return self.plan.full_arrival(self.pipeline) if side == "full" else self.plan.empty_arrival(self.pipeline)

    def _barrier(self, side: str, tile: int | Int32) -> cute.Pointer:
        first = self.plan.mbarriers[f"{self.pipeline.name}.{side}[0]"] // MBARRIER_BYTES
        return self.barriers + (first + self.slot(tile))

    def slot(self, tile: int | Int32) -> int | Int32:
        """The stage that a tile uses."""
        return tile & (self.pipeline.stages - 1) if self.pipeline.stages > 1 else 0


@dataclass(frozen=True)
class Channels:
    """The pipelines that a role takes part in, by name."""

    barriers: cute.Pointer
    plan: cutlass.Constexpr
    role: cutlass.Constexpr

    def __getitem__(self, name: str) -> Channel:
        pipeline = self.plan.pipeline(name)
        assert self.role in (pipeline.producer, pipeline.consumer), f"{self.role} takes no part in {name}"
        return Channel(self.barriers, self.plan, pipeline, self.role)


def rows_layout(plan: Plan, region: str) -> cute.ComposedLayout:
    """A stage of a region as (columns, rows): rows of 128 bytes under the swizzle that TMA writes and the MMAs read."""
    smem = plan.smem_region(region)
    return swizzled_rows(smem.dtype, (smem.columns, smem.rows))


def swizzled_rows(dtype: DType, shape: tuple[int, int]) -> cute.ComposedLayout:
    """The same of any columns and rows."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.MN_SW128, ELEMENT_TYPES[dtype])
    return cute.tile_to_shape(atom, shape, order=(0, 1))


def channels(smem: SharedMemory, role: str) -> Channels:
    """The pipelines of `role`."""
    return Channels(cute.recast_ptr(smem.base, dtype=cutlass.Int64), smem.plan, role)


def initialise_barriers(smem: SharedMemory) -> None:
    """Give every mbarrier the arrival count that the plan derives for it, by one elected lane."""
    barriers = cute.recast_ptr(smem.base, dtype=cutlass.Int64)
    with cute.arch.elect_one():
        for name, offset in smem.plan.mbarriers.items():
            pipeline, side = name.partition("[")[0].rsplit(".", 1)
            count = smem.plan.arrivals(smem.plan.pipeline(pipeline), side)
            cute.arch.mbarrier_init(barriers + offset // MBARRIER_BYTES, count)


def barrier(plan: Plan, name: str) -> None:
    """Wait at a named barrier for all warps of its roles."""
    with span(plan, name):
        cute.arch.barrier(barrier_id=plan.barrier_ids[name], number_of_threads=plan.barrier_threads(name))


def is_role(plan: Plan, role: str, warp: Int32) -> Any:
    """Whether a warp is one of a role's."""
    warps = plan.role(role).warps
    return (warp >= warps.start) & (warp < warps.stop) if len(warps) > 1 else warp == warps.start


def set_registers(plan: Plan, role: str) -> None:
    """Move from the launch's registers per thread to those of `role`; all warps of its warpgroup execute this."""
    registers = plan.role(role).registers
    if registers < REGISTERS_PER_SM // plan.num_threads:
        cute.arch.setmaxregister_decrease(registers)
    else:
        cute.arch.setmaxregister_increase(registers)
