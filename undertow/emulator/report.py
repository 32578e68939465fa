"""Say where things are and why they wait, in the kernel's own words."""

from dataclasses import dataclass

from .semantics import barriers
from .state import Cta, LaneSet, Wait, Warp


@dataclass(frozen=True)
class WarpReport:
    """One line of a deadlock report. waits_for: the label of what it waits for; kind and subject as in Wait."""

    warp: int
    role: str
    lanes: int
    ptx_line: int
    source: str
    kind: str
    subject: int
    waits_for: str

    def __str__(self) -> str:
        lanes = "" if self.lanes == 0xFFFFFFFF else f" (lanes {self.lanes:#010x})"
        return f"warp {self.warp:2d} {self.role}{lanes}: {self.waits_for}; PTX line {self.ptx_line}, {self.source}"


def warp_numbers(warps: list[int]) -> str:
    """Write a run of warps: `warp 3` or `warps 4-11`."""
    if len(warps) == 1:
        return f"warp {warps[0]}"
    return f"warps {warps[0]}-{warps[-1]}"


def place(machine, lanes: LaneSet, index: int) -> str:
    """Describe where lanes execute an instruction: kernel, CTA, warps, roles, PTX line, source line."""
    labels = machine.launch.labels
    program = machine.program
    roles = dict.fromkeys(labels.role(w) for w in lanes.warps)
    numbers = warp_numbers(lanes.warps)
    names = ", ".join(r for r in roles if r not in (numbers, *(f"warp {w}" for w in lanes.warps)))
    who = f"{numbers} ({names})" if names else numbers
    if not lanes.full:
        who += f" lanes {lanes.masks[0]:#010x}"
    text = ""
    if index < len(program.code):
        text = f": `{program.module.source.line(program.code[index].instruction.line)}`"
    return f"{program.name}, CTA {lanes.cta.position}, {who}, {program.where(index)}{text}"


def describe_wait(machine, wait: Wait) -> str:
    """What a warp waits for, by label."""
    labels = machine.launch.labels
    if wait.kind == "mbarrier":
        offset = wait.subject - machine.program.dynamic_base
        return f"mbarrier {labels.smem(offset)} ({wait.detail})"
    if wait.kind == "barrier":
        if wait.subject == barriers.CLUSTER_BARRIER:
            return f"cluster barrier ({wait.detail})"
        return f"named barrier {labels.barrier_id(wait.subject)} ({wait.detail})"
    if wait.kind == "tmem_alloc":
        return f"{wait.subject} free TMEM columns ({wait.detail})"
    if wait.kind == "wgmma_group":
        return f"asynchronous MMAs ({wait.detail})"
    return f"asynchronous copies ({wait.detail})"


def warp_reports(machine, cta: Cta) -> list[WarpReport]:
    """One entry per group of lanes that has not exited."""
    entries = []
    for warp in cta.warps:
        for pc, mask in sorted(warp.groups.items()):
            entries.append(_entry(machine, warp, pc, mask))
    return entries


def _entry(machine, warp: Warp, pc: int, mask: int) -> WarpReport:
    wait = warp.waits.get(pc)
    instruction = machine.program.code[pc].instruction
    source = str(instruction.source) if instruction.source else "no source line"
    if wait is None:
        kind, subject = "running", -1
        alone = len(warp.groups) > 1
        waits_for = "waits for the other lanes of its warp" if alone else "spins"
    else:
        kind, subject = wait.kind, wait.subject
        waits_for = f"waits for {describe_wait(machine, wait)}"
    return WarpReport(
        warp.number, machine.launch.labels.role(warp.number), mask, instruction.line, source, kind, subject, waits_for
    )
