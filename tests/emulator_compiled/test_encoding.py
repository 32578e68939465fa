"""Encoding: every machine row has a form, registers share rows only when that is safe, poison stays poison."""

from __future__ import annotations

import numpy as np

from tests.emulator.kernels import kernel
from tests.emulator_compiled.differential import launch_on_both
from undertow import emulator as emu
from undertow.emulator import flow, semantics
from undertow.emulator.compiled import encode_machine, registers


def test_every_machine_row_has_a_form_and_every_form_a_row():
    rows = [row for rows in semantics.ROWS.values() for row in rows if row.make is not None and not row.control]
    assert [row.syntax for row in rows if not encode_machine.knows(row)] == []
    words = {encode_machine.fixed_words(row.syntax) for row in rows}
    assert [form for form in encode_machine.FORMS if form not in words] == []


def chain(length: int) -> str:
    """Each register is read by the next instruction only."""
    lines = ["mov.u32 %c0, %t;"] + [f"add.u32 %c{i + 1}, %c{i}, {i};" for i in range(length)]
    return "\n".join([*lines, f"mov.u32 %r1, %c{length};"])


STORE = "mul.wide.u32 %d0, %t, 4; add.s64 %d1, %p0, %d0; st.global.u32 [%d1], %r1;"


def test_a_long_chain_needs_few_rows():
    text = kernel(f"{chain(500)} {STORE}", 1, ".reg .b32 %c<501>;")
    allocation = registers.allocate(emu.load_program(text))
    assert allocation.num_bytes < 40 * 256
    out = np.zeros(32, np.uint32)
    launch_on_both(text, emu.Launch(grid=(1, 1, 1), block=(32, 1, 1), params=(emu.Pointer(out),)))
    assert out.tolist() == [t + sum(range(500)) for t in range(32)]


def test_rows_of_registers_live_together_are_apart():
    text = kernel(f"{chain(20)} mov.u32 %r2, 7; add.u32 %r1, %r1, %r2; {STORE}", 1, ".reg .b32 %c<21>;")
    program = emu.load_program(text)
    rows = registers.allocate(program).rows
    usages = [flow.usage(decoded) for decoded in program.code]
    for usage in usages:
        wide = {name: rows[name] for name in usage.reads}
        assert len(set(wide.values())) == len(wide)


def test_a_value_survives_a_loop_that_does_not_read_it():
    text = kernel(
        f"""
        mov.u32 %r5, 99; mov.u32 %r1, 0; mov.u32 %r2, 0;
        LOOP: add.u32 %r3, %r2, 5; add.u32 %r4, %r3, %r2; add.u32 %r1, %r1, %r4; add.u32 %r2, %r2, 1;
        setp.lt.u32 %q1, %r2, %t; @%q1 bra LOOP;
        add.u32 %r1, %r1, %r5; {STORE}
        """,
        1,
    )
    out = np.zeros(32, np.uint32)
    launch_on_both(text, emu.Launch(grid=(1, 1, 1), block=(32, 1, 1), params=(emu.Pointer(out),)))
    assert out.tolist() == [99 + sum(2 * i + 5 for i in range(max(t, 1))) for t in range(32)]


def test_lanes_that_part_keep_their_own_values():
    text = kernel(
        f"""
        and.b32 %r6, %t, 3; setp.eq.u32 %q1, %r6, 0; @%q1 bra A; setp.eq.u32 %q2, %r6, 1; @%q2 bra B;
        add.u32 %r2, %t, 100; mul.lo.u32 %r1, %r2, 3; bra JOIN;
        A: add.u32 %r3, %t, 200; mul.lo.u32 %r1, %r3, 5; bra JOIN;
        B: add.u32 %r4, %t, 300; mul.lo.u32 %r1, %r4, 7;
        JOIN: {STORE}
        """,
        1,
    )
    out = np.zeros(32, np.uint32)
    launch_on_both(text, emu.Launch(grid=(1, 1, 1), block=(32, 1, 1), params=(emu.Pointer(out),)))
    expected = [[(t + 200) * 5, (t + 300) * 7, (t + 100) * 3, (t + 100) * 3][t % 4] for t in range(32)]
    assert out.tolist() == expected


def test_registers_that_nobody_wrote_hold_poison():
    text = kernel(f"setp.lt.u32 %q1, %t, 16; @%q1 mov.u32 %r9, 5; add.u32 %r1, %r9, %r8; {STORE}", 1)
    out = np.zeros(32, np.uint32)
    launch_on_both(text, emu.Launch(grid=(1, 1, 1), block=(32, 1, 1), params=(emu.Pointer(out),)))
    poison = 0xCDCDCDCD
    assert out.tolist() == [(5 + poison) % 2**32] * 16 + [2 * poison % 2**32] * 16
