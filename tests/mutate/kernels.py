"""A kernel of two warps with synchronisations that are needed, and some that are not, each of a known category."""

from __future__ import annotations

import numpy as np

from undertow.cases import Kernel
from undertow.emulator import Launch, Pointer
from undertow.launch_file import FileLabels

ROUNDS = 3

HANDOVER = """\
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry handover(.param .u64 y)
.reqntid 64
{
    .reg .pred %p<4>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 31;
    shl.b32 %r3, %r2, 2;
    mov.u32 %r4, smem;
    add.s32 %r4, %r4, 16;
    add.s32 %r5, %r4, %r3;
    mov.b32 %r6, 0;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra INITIALISED;
    mbarrier.init.shared.b64 [smem], 32;
    mbarrier.init.shared.b64 [smem+8], 32;
INITIALISED:
    bar.sync 0;
    setp.gt.u32 %p2, %r1, 31;
    @%p2 bra CONSUMER;
FIRST:
    mbarrier.try_wait.parity.shared.b64 %p3, [smem+8], 1;
    @!%p3 bra FIRST;
PRODUCE:
    xor.b32 %r7, %r6, 1;
    and.b32 %r7, %r7, 1;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p3, [smem+8], %r7;
    @!%p3 bra EMPTY;
    mad.lo.s32 %r8, %r6, 100, %r2;
    st.shared.b32 [%r5], %r8;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.shared.b64 %rd1, [smem];
    add.s32 %r6, %r6, 1;
    setp.lt.s32 %p1, %r6, 3;
    @%p1 bra PRODUCE;
    bra END;
CONSUMER:
    ld.param.u64 %rd2, [y];
    mul.wide.u32 %rd3, %r3, 1;
    add.s64 %rd2, %rd2, %rd3;
    sub.s32 %r9, 124, %r3;
    add.s32 %r9, %r4, %r9;
CONSUME:
    and.b32 %r7, %r6, 1;
FULL:
    mbarrier.try_wait.parity.shared.b64 %p3, [smem], %r7;
    @!%p3 bra FULL;
    ld.shared.b32 %r10, [%r9];
    mbarrier.arrive.shared.b64 _, [smem+8];
    st.global.b32 [%rd2], %r10;
    add.s64 %rd2, %rd2, 128;
    add.s32 %r6, %r6, 1;
    setp.lt.s32 %p1, %r6, 3;
    @%p1 bra CONSUME;
END:
    bar.sync 1, 64;
    ret;
}
"""

SURVIVORS = """\
[[survivor]]
role = "producer"
function = ""
kind = "wait"
form = "mbarrier.try_wait.parity.shared.b64"
about = "empty"
place = "before"
category = "first-pass"
because = "A fresh barrier passes parity 1, so the wait for the first round never blocks."

[[survivor]]
role = "producer"
function = ""
kind = "proxy-fence"
form = "fence.proxy.async.shared::cta"
about = "before full"
place = "in"
category = "redundant"
because = "Only ordinary loads read the tile; no engine does, so there is no second proxy."

[[survivor]]
role = "all"
function = ""
kind = "barrier"
form = "bar.sync"
about = "end"
place = "after"
category = "tail"
because = "Both warps exit right behind it and touch nothing that the other one reads."

[[survivor]]
role = "all"
function = ""
kind = "narrowed"
form = "bar.sync"
about = "end"
place = "after"
category = "tail"
because = "Both warps exit right behind it, joined lanes or not."
"""

LAUNCH = """\
grid = [1]
block = [64]
dynamic_smem = 152
[arrays.y]
dtype = "s32"
shape = [3, 32]
fill = -1
[[params]]
kind = "pointer"
array = "y"
[roles]
producer = [0]
consumer = [1]
[smem]
full = [0, 8]
empty = [8, 8]
tile = [16, 128]
[barriers]
end = 1
"""

MEET_APART = HANDOVER.replace("    bra END;\nCONSUMER", "    bar.sync 1, 64;\n    bra END;\nCONSUMER").replace(
    "END:\n    bar.sync 1, 64;", "    bar.sync 1, 64;\nEND:"
)
"""The same, but each warp has the last barrier in its own code."""

WAITS_TWICE = (
    HANDOVER.replace("[smem+8], 32;\n", "[smem+8], 32;\n    mbarrier.init.shared.b64 [smem+144], 32;\n")
    .replace("%rd1, [smem];\n", "%rd1, [smem];\n    mbarrier.arrive.shared.b64 _, [smem+144];\n")
    .replace(
        "bra FULL;\n",
        "bra FULL;\nAGAIN:\n    mbarrier.try_wait.parity.shared.b64 %p3, [smem+144], %r7;\n    @!%p3 bra AGAIN;\n",
    )
)
"""The same, but the producer signals each round on a second mbarrier as well, and the consumer waits for both."""

COUNTED = (
    HANDOVER.replace("(.param .u64 y)", "(.param .u64 y, .param .u32 rounds)")
    .replace("    bar.sync 0;\n", "    bar.sync 0;\n    setp.eq.s32 %p1, %r11, 0;\n    @%p1 bra END;\n")
    .replace("    mov.u32 %r1, %tid.x;\n", "    mov.u32 %r1, %tid.x;\n    ld.param.u32 %r11, [rounds];\n")
    .replace("%r6, 3;", "%r6, %r11;")
)
"""The same, but the launch says how many rounds there are; both loops are skipped if none."""

SAME_LANES = """\
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry same_lanes()
.reqntid 160
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    setp.ne.u32 %p1, %r2, 0;
    setp.ne.u32 %p2, %r2, 4;
    mov.u32 %r3, smem;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %r4, [%r3];
    @%p1 bra LATER;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r4], {%r1, %r1};
    tcgen05.wait::st.sync.aligned;
LATER:
    bar.sync 0;
    @%p1 bra STORE;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5, %r6}, [%r4];
    tcgen05.wait::ld.sync.aligned;
    bra MEET;
STORE:
    @%p2 bra MEET;
    add.s32 %r7, %r4, 1;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r7], {%r1, %r1};
    tcgen05.wait::st.sync.aligned;
MEET:
    bar.sync 0;
    @%p1 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
END:
    ret;
}
"""
"""Warp 4 stores to a column of tensor memory that warp 0, which has the same lanes, loads at the same time."""

SAME_LANES_LAUNCH = "grid = [1]\nblock = [160]\ndynamic_smem = 16\n[roles]\nreader = [0]\nwriter = [4]\n"

LABELS = FileLabels(
    {"producer": [0], "consumer": [1]},
    {"full": [0, 8], "empty": [8, 8], "tile": [16, 128], "again": [144, 8]},
    {"end": 1},
)


def handover(text: str = HANDOVER) -> Kernel:
    """The kernel with a result that nobody has written yet."""
    y = np.full((ROUNDS, 32), -1, np.int32)
    return Kernel("handover", text, Launch((1,), (64,), (Pointer(y, name="y"),), dynamic_smem=152, labels=LABELS))


def rounds(count: int) -> Kernel:
    """The kernel that is told how many rounds there are."""
    y = np.full((ROUNDS, 32), -1, np.int32)
    launch = Launch((1,), (64,), (Pointer(y, name="y"), count), dynamic_smem=152, labels=LABELS)
    return Kernel(f"handover of {count}", COUNTED, launch)


def expected() -> np.ndarray:
    """What the consumer reads: lane 31 - i of every round."""
    return (100 * np.arange(ROUNDS)[:, None] + np.arange(31, -1, -1)).astype(np.int32)


def without_the_wait_for_full() -> str:
    """The consumer reads whatever is there."""
    wait = "FULL:\n    mbarrier.try_wait.parity.shared.b64 %p3, [smem], %r7;\n    @!%p3 bra FULL;\n"
    assert wait in HANDOVER
    return HANDOVER.replace(wait, "")
