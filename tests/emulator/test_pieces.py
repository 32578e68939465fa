"""Pieces say what single instructions say, with fewer events."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from undertow import emulator as emu
from undertow.emulator.events import InstructionExecuted, PieceExecuted

PTX = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry pieces(.param .u64 out)
{
    .reg .pred p; .reg .pred q; .reg .b32 r<6>; .reg .b64 d<3>; .shared .align 8 .b64 ready;
    mov.u32 r0, %tid.x;
    shl.b32 r1, r0, 2;
    setp.lt.u32 p, r0, 40;
    @p add.u32 r1, r1, 0;
    @!p add.u32 r1, r1, 0;
    setp.eq.u32 q, r0, 0;
    mov.u32 r2, ready;
    @q mbarrier.init.shared::cta.b64 [r2], 1;
    bar.sync 0;
    @q mbarrier.arrive.shared::cta.b64 _, [r2];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 p, [r2], 0;
    @!p bra WAIT;
    ld.param.u64 d0, [out];
    cvt.u64.u32 d1, r1;
    add.u64 d2, d0, d1;
    st.global.u32 [d2], r1;
    ret;
}
"""


class Both:
    """The instructions of each warp, from either event, with how many lanes pass their guard."""

    subscriptions: ClassVar[tuple[type, ...]] = (InstructionExecuted, PieceExecuted)

    def __init__(self):
        self.single: list[tuple] = []
        self.pieces: list[tuple] = []
        self.longest = 0

    def start(self, program, launch):
        self.code = program.code

    def observe(self, event):
        warps = tuple(event.lanes.warps)
        passed = -1 if event.mask is None else int(np.count_nonzero(event.mask))
        if isinstance(event, InstructionExecuted):
            self.single.append((event.decoded.index, warps, passed))
            return
        piece = range(event.begin, event.end)
        self.pieces += [(index, warps, passed) for index in piece]
        self.longest = max(self.longest, len(piece))
        if len(piece) > 1:
            assert not any(self.code[index].guard or self.code[index].row.blocking for index in piece)

    def finish(self):
        return []


def test_pieces_are_the_instructions_in_the_same_order():
    out, seen = np.zeros(64, np.uint32), Both()
    launch = emu.Launch(grid=(1,), block=(64,), params=[emu.Pointer(out)])
    assert not emu.launch(PTX, launch, observers=[seen]).findings
    assert (out == 4 * np.arange(64)).all()
    assert sorted(seen.pieces) == sorted(seen.single)
    assert seen.longest > 2


def test_the_order_of_a_warp_is_that_of_its_instructions():
    seen = Both()
    emu.launch(PTX, emu.Launch(grid=(1,), block=(32,), params=[emu.Pointer(np.zeros(32, np.uint32))]), observers=[seen])
    assert seen.pieces == seen.single
