"""Names for what a machine only numbers: warps, shared-memory offsets, TMEM columns, named barriers.

One word everywhere: the emulator's reports, the findings and the timeline all ask this object.
"""

from __future__ import annotations

from bisect import bisect_right

from undertow.plan.schema import MBARRIER_BYTES, Plan


class PlanLabels:
    """The names that a plan gives to a running kernel.

    smem_base: byte offset of the plan's map within the CTA's dynamic shared memory, 0 if it starts there.
    """

    def __init__(self, plan: Plan, smem_base: int = 0):
        self.plan, self.smem_base = plan, smem_base
        self._roles = {warp: role.name for role in plan.roles for warp in role.warps}
        self._barriers = {identifier: name for name, identifier in plan.barrier_ids.items()}
        words = [(offset, name, MBARRIER_BYTES) for name, offset in plan.mbarriers.items()]
        words.append((plan.tmem_pointer_offset, "tmem_pointer", 4))
        for region in plan.smem:
            start = plan.smem_offsets[region.name]
            for stage in range(region.stages):
                name = f"{region.name}[{stage}]" if region.stages > 1 else region.name
                words.append((start + stage * region.stage_bytes, name, region.stage_bytes))
        self._smem = sorted(words)

    def role(self, warp: int) -> str:
        """The role of a warp of the CTA."""
        return self._roles.get(warp, "no role")

    def smem(self, offset: int) -> str:
        """The barrier word or buffer stage that holds a byte of dynamic shared memory: `sQ[1]+0x40`."""
        at = offset - self.smem_base
        index = bisect_right(self._smem, at, key=lambda word: word[0]) - 1
        if index >= 0:
            start, name, size = self._smem[index]
            if at < start + size:
                return name if at == start else f"{name}+{at - start:#x}"
        return f"smem+{offset:#x} (outside the plan's map)"

    def tmem(self, column: int) -> str:
        """The regions that lie on a TMEM column: `S/P` where they share it."""
        names = [region.name for region in self.plan.tmem if region.column <= column < region.end]
        return "/".join(names) if names else f"column {column} (outside the plan's map)"

    def barrier_id(self, identifier: int) -> str:
        """The named barrier with a hardware id."""
        return "cta" if identifier == 0 else self._barriers.get(identifier, f"barrier {identifier}")
