"""Fences that nobody awaits are found in machine code: by hand, in twins of real objects, as one ptxas makes them."""

from __future__ import annotations

import importlib.util
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.machine_code import bytes_of, code, cubin
from undertow.kernels.compile import OBJECT, OBJECT_PTX
from undertow.kernels.fences import unawaited, unawaited_in
from undertow.kernels.opcodes import BRA, BSSY, FENCE, MEMBAR, PHASECHK, PUBLISHES
from undertow.kernels.sass import SIZE, Code, Instruction, SassError, kernels_of
from undertow.plan.schema import DType
from undertow.runtime import objects
from undertow.runtime.architectures import ARCHITECTURES
from undertow.timing.listing import disassembled

ARCHES = pytest.mark.parametrize("arch", ["sm90", "sm100"])
ALL = " ".join(f"wait={n}" for n in range(6))

CLEAN = {
    "wait between": ("FENCE set=1", "NOP wait=1", "BAR", "EXIT"),
    "wait of the barrier": ("FENCE set=1", "BAR wait=1", "EXIT"),
    "wait of a guarded instruction": ("FENCE set=1", "@P0 NOP wait=1", "BAR", "EXIT"),
    "wait in the loop's head": ("NOP wait=1", "BAR", "FENCE set=1", "@P0 BRA 0", "EXIT"),
    "wait of the back edge": ("BAR", "FENCE set=1", "@P0 BRA 0 wait=1", "EXIT"),
    "wait on both branches": ("FENCE set=1", "@P0 BRA 4", "NOP wait=1", "BRA 5", "NOP wait=1", "BAR", "EXIT"),
    "scoreboard set again": ("FENCE set=1", "LDS set=1", "BAR wait=1", "EXIT"),
    "other scoreboards": ("FENCE set=1", "NOP wait=1", "LDS set=1", "BAR", "EXIT"),
    "only asked": ("FENCE set=1", "PHASECHK", "NOP wait=1", "ARRIVE", "EXIT"),
    "nobody is told": ("FENCE set=1", "NOP", "EXIT"),
    "fence that nobody needs": ("FENCE", "NOP", "EXIT", "BAR"),
    "trap": ("FENCE set=1", "@P0 BRA 3", "BAR wait=1", "TRAP", "BAR", "EXIT"),
    "membar, then fence": ("MEMBAR read=2", "FENCE set=1 wait=2", "BAR wait=1", "EXIT"),
    "joined lanes": ("FENCE set=1", "BSSY 3", "BSYNC", "WARPSYNC", "BAR wait=1", "EXIT"),
}
FOUND = {  # name: lines, the fence and the instruction that is too early, by line
    "no wait": (("FENCE set=1", "NOP wait=0 wait=2", "BAR", "EXIT"), 0, 2),
    "back edge without wait": (("BAR", "NOP", "FENCE set=1", "@P0 BRA 0", "EXIT"), 2, 0),
    "uniform back edge": (("BAR", "NOP", "FENCE set=1", "BRA.U 0", "EXIT"), 2, 0),
    "only before the loop": (("NOP wait=1", "BAR", "FENCE set=1", "@P0 BRA 1", "EXIT"), 2, 1),
    "wait on one branch": (("FENCE set=1", "@P0 BRA 4", "NOP wait=1", "BRA 5", "NOP", "BAR", "EXIT"), 0, 5),
    "wait on the other branch": (("FENCE set=1", "@P0 BRA 4", "NOP", "BRA 5", "NOP wait=1", "BAR", "EXIT"), 0, 5),
    "scoreboard of another": (("FENCE set=1", "LDS set=2", "BAR wait=2", "EXIT"), 0, 2),
    "fence without scoreboard": (("FENCE", f"NOP {ALL}", f"BAR {ALL}", "EXIT"), 0, 2),
    "behind a guarded exit": (("FENCE set=1", "@P0 EXIT", "ARRIVE", "EXIT"), 0, 2),
    "global memory": (("FENCE.G set=0", "NOP", "REDG", "EXIT"), 0, 2),
    "membar": (("MEMBAR read=2", "NOP", "BAR", "EXIT"), 0, 2),
    "in a called function": (("FENCE set=3", "CALL 3", "EXIT", "BAR wait=1", "RET"), 0, 3),
}
UNKNOWN = {
    "computed jump": (("FENCE set=1", "BRX", "EXIT"), "at 0x10, behind a fence, an instruction is not known: 0x0+7949"),
    "return": (("FENCE set=1", "CALL 3", "EXIT", "RET"), "at 0x30, behind a fence"),
    "joined elsewhere": (("FENCE set=1", "BSSY 4", "BSYNC", "NOP", "BAR wait=1", "EXIT"), "at 0x20, behind a fence"),
    "collective": (("FENCE set=1", "COLLECTIVE", "BAR wait=1", "EXIT"), "at 0x10, behind a fence"),
    "end of the code": (("FENCE set=1", "NOP"), "a path behind 0x0 leaves the code for 0x20"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_wait_on_every_path_is_enough(name):
    assert list(unawaited_in(code(*CLEAN[name]))) == []


@pytest.mark.parametrize("name", FOUND)
def test_a_path_without_a_wait_is_found(name):
    lines, fence, place = FOUND[name]
    (found,) = unawaited_in(code(*lines))
    assert (found.fence_address, found.address) == (fence * SIZE, place * SIZE)
    assert found.kind == {"ARRIVE": "SYNCS"}.get(lines[place].split()[0], lines[place].split()[0])


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_followed_is_no_proof(name):
    lines, said = UNKNOWN[name]
    with pytest.raises(SassError, match=said):
        list(unawaited_in(code(*lines)))


LINES = st.one_of(
    st.sampled_from(["NOP", "BAR", "EXIT", "PHASECHK", "ARRIVE", "LDS set=0", "NOP wait=0", "NOP wait=1"]),
    st.sampled_from(["FENCE set=0", "FENCE set=1", "FENCE", "MEMBAR read=0", "FENCE set=1 wait=0", "BAR wait=1"]),
    st.builds("{} {}".format, st.sampled_from(["BRA", "@P0 BRA", "BRA.U"]), st.integers(0, 8)),
)


def walked(kernel: Code) -> set[tuple[int, int]]:
    """Fence and place, by walking with all fences that are on their way: another formulation of the same question."""
    found, seen, due = set(), set(), [(start, frozenset()) for start in range(len(kernel.instructions))]
    while due:
        state = due.pop()
        if state in seen:
            continue
        seen.add(state)
        number, before = state
        x = kernel.instructions[number]
        fences = {(place, board) for place, board in before if board == 7 or not x.high >> 52 + board & 1}
        if x.operation in PUBLISHES and x.opcode != PHASECHK:
            found |= {(place, number) for place, _ in fences}
            fences = set()
        if x.operation == FENCE:
            fences.add((number, x.high >> 46 & 7))
        elif x.operation == MEMBAR and x.high >> 49 & 7 != 7:
            fences.add((number, x.high >> 49 & 7))
        behind = [x.target // SIZE] if x.operation == BRA else []
        if not (x.opcode in (0x947, 0x94D) and x.low >> 12 & 15 == 7):
            behind.append(number + 1)
        due += [(follower, frozenset(fences)) for follower in behind]
    return found


@settings(max_examples=300)
@given(st.lists(LINES, min_size=8, max_size=8))
def test_all_that_a_walk_finds_is_found_and_nothing_else(lines):
    kernel = code(*lines, "EXIT")
    assert {(x.fence_address // SIZE, x.address // SIZE) for x in unawaited_in(kernel)} == walked(kernel)


def test_every_kernel_of_a_file_is_read_wherever_its_cubin_lies():
    early, clean = code("BAR", "FENCE set=1", "@P0 BRA 0", "EXIT", name="early"), code("EXIT", name="clean")
    content = b"\x7fELF of the host" + cubin(clean) + b"between" + cubin(early, clean)
    assert [kernel.name for kernel in kernels_of(content)] == ["clean", "early", "clean"]
    assert kernels_of(content)[1] == early
    (found,) = unawaited(content)
    assert str(found) == (
        "early: the FENCE.VIEW.ASYNC.S at 0x10 may be incomplete when the BAR at 0x0 is issued, for on a path between "
        "them nothing waits for it"
    )


@pytest.mark.parametrize("content", [b"", b"\x7fELF, or is it?", cubin(code("EXIT"))[:-65], cubin(code("EXIT"))[:64]])
def test_no_machine_code_is_no_proof(content):
    with pytest.raises(SassError, match=r"no machine code of a GPU was found|the cubin at byte 0 cannot be read"):
        unawaited(content)


def made(arch: str) -> dict[str, bytes]:
    row = ARCHITECTURES[arch]
    return objects.precompile(row, row.call.variant_named("dense", DType.BF16)).files


@ARCHES
def test_the_decoder_reads_what_nvdisasm_lists(arch):
    """Every instruction: its address, whether it is guarded, where it jumps, whether it is one that publishes."""
    content = made(arch)[OBJECT]
    kernels = {kernel.name: kernel for kernel in kernels_of(content)}
    listed, labels, jumps = {name: [] for name in kernels}, {}, []
    name = None
    for line in disassembled(content[content.index(b"\x7fELF", 1) :]).splitlines():
        if found := re.match(r"\s*\.section\s+(?:\.text\.)?([\w.$]+)", line):
            name = found.group(1) if found.group(1) in kernels else None
        elif name and (found := re.match(r"(\S+):$", line.strip())):
            labels[found.group(1)] = (name, len(listed[name]) * SIZE)
        elif name and (found := re.match(r"\s+/\*(\w{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z]\w*)([^;]*);", line)):
            listed[name].append((int(found.group(1), 16), bool(found.group(2)), found.group(3)))
            if found.group(3) in ("BRA", "BSSY", "CALL"):
                jumps.append((name, listed[name][-1][0], re.findall(r"`\((\S+)\)", found.group(4))[0]))
    for name, kernel in kernels.items():
        assert [row[:2] for row in listed[name]] == [(x.address, x.is_guarded) for x in kernel.instructions]
        for x, (_, _, text) in zip(kernel.instructions, listed[name], strict=True):
            assert PUBLISHES.get(x.operation, text) == text
            assert x.operation in PUBLISHES or text not in PUBLISHES.values()
    assert len(jumps) > 100
    assert all(labels[label] == (name, kernels[name].instructions[at // SIZE].target) for name, at, label in jumps)


def awaited_by_who_publishes(kernel: Code) -> Iterator[tuple[Instruction, Instruction]]:
    """Fences behind which, without a jump, the first to wait is one that publishes; and that one."""
    for fence in kernel.instructions:
        if fence.operation == FENCE:
            (board,) = fence.sets
            behind = kernel.instructions[fence.address // SIZE + 1 :]
            first = next(x for x in behind if x.waits_for(board) or x.operation in (BRA, BSSY))
            if first.waits_for(board) and first.operation in PUBLISHES:
                yield fence, first


@ARCHES
def test_a_twin_without_a_wait_is_found_at_that_place(arch):
    """In the objects as they are made nothing is found; without one bit of one instruction, that instruction is."""
    content, twins = made(arch)[OBJECT], 0
    assert unawaited(content) == []
    for kernel in kernels_of(content):
        begin = content.index(bytes_of(kernel))
        for fence, last in awaited_by_who_publishes(kernel):
            (board,) = fence.sets
            twin = bytearray(content)
            struct.pack_into("<Q", twin, begin + last.address + 8, last.high & ~(1 << 52 + board))
            found = unawaited(bytes(twin))
            assert {(x.kernel, x.address) for x in found} == {(kernel.name, last.address)}
            assert fence.address in {x.fence_address for x in found}
            twins += 1
    assert twins >= 3


LOOP = """
.version 8.6
.target {target}
.address_size 64
.extern .shared .align 16 .b8 stage[];
.visible .entry loop(.param .u32 trips)
{{
    .reg .pred %p;
    .reg .b32 %r<5>;
    ld.param.u32 %r0, [trips];
    mov.u32 %r1, stage;
    mov.u32 %r2, 0;
$again:
    bar.sync 0;
    ld.shared.u32 %r3, [%r1];
    st.shared.u32 [%r1], %r2;
    fence.proxy.async.shared::cta;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p, %r2, %r0;
    @%p bra $again;
    ret;
}}
"""


def assembled(tool: str, target: str, text: str, folder: Path) -> tuple[str, bytes]:
    """The release of one of the assemblers in Triton's wheel, which the compiler does not use, and what it makes."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin, "the development extra brings triton"
    program = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / tool
    if not program.exists():
        pytest.skip(f"this release of triton brings no {tool}")
    source, result = folder / "text.ptx", folder / "code.cubin"
    source.write_text(text)
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    subprocess.run([program, "-arch", target, source, "-o", result], check=True, capture_output=True, timeout=120)
    release = re.search(r"release ([\d.]+)", said)
    assert release is not None, said
    return release.group(1), result.read_bytes()


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("tool", ["ptxas", "ptxas-blackwell"])
def test_a_loop_that_begins_with_the_barrier_is_what_ptxas_13_4_gets_wrong(tool, target, tmp_path):
    release, content = assembled(tool, target, LOOP.format(target=target), tmp_path)
    found = [(x.fence, x.kind, x.address < x.fence_address) for x in unawaited(content)]
    known = {"12.9": [], "13.4": [("FENCE.VIEW.ASYNC.S", "BAR", True)]}
    if release not in known:
        pytest.skip(f"what ptxas {release} makes of it is not known")
    assert found == known[release]


@ARCHES
@pytest.mark.parametrize("tool", ["ptxas", "ptxas-blackwell"])
def test_the_kernels_are_clean_by_other_assemblers(tool, arch, tmp_path):
    assert unawaited(assembled(tool, ARCHITECTURES[arch].target, made(arch)[OBJECT_PTX].decode(), tmp_path)[1]) == []
