"""From PTX to what issues: by kernels of a few lines, each rule of the assembler by itself; and what is refused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.timing.kernels import SM90, SM100, Kind, Unit, kernel, replayed, values
from undertow.timing.errors import TimingError
from undertow.timing.lower import Lowering
from undertow.timing.order import scheduled
from undertow.timing.trace import record

SHARED = ".shared .align 128 .b8 buffer[4096];"
MBARRIER = ".shared .align 8 .b64 bar;"
READY = "setp.ne.u32 %q0, %t, 0; @%q0 bra INIT; mbarrier.init.shared.b64 [bar], 1; INIT: bar.sync 0;"


def issued(body: str, arch: str = SM100, **module) -> Counter:
    """Instructions that issue, by name of unit or kind, of a body; special registers and ret are not counted."""
    program = kernel(body, np.zeros(64, np.float32), arch=arch, **module).program()
    nodes = [node for node in Lowering(program).nodes if node is not None]
    names: Counter = Counter()
    for node in nodes:
        names[(node.form.unit if node.form.kind is Kind.ARITHMETIC else node.form.kind).name] += node.form.issues
    del names["SPECIAL"], names["BRANCH"]
    return names


LOAD = "ld.global.f32 %f0, [%p0]; ld.global.f32 %f1, [%p0+4];"
STORE = "st.global.f32 [%p0], %f3;"


@pytest.mark.parametrize("body, units", [
    ("add.f32 %f3, %f0, %f1;", {"FMA": 1}),
    ("mul.f32 %f2, %f0, %f1; sub.f32 %f3, %f2, %f1;", {"FMA": 1}),  # contracted
    ("mul.f32 %f2, %f0, %f1; sub.f32 %f3, %f2, %f1; add.f32 %f3, %f3, %f2;", {"FMA": 3}),  # used twice: kept
    ("mul.rn.f32 %f2, %f0, %f1; add.rn.f32 %f3, %f2, %f1;", {"FMA": 2}),  # roundings are asked for
    ("neg.f32 %f2, %f0; mul.f32 %f3, %f2, %f1;", {"FMA": 1}),  # a modifier of the operand
    ("mov.f32 %f2, %f0; mov.f32 %f4, %f2; add.f32 %f3, %f4, %f1;", {"FMA": 1}),
    ("mov.b64 %d1, {%f0, %f1}; add.rn.f32x2 %d2, %d1, %d1; mov.b64 {%f3, %f4}, %d2;", {"PACKED_FMA": 1}),
    ("mov.b32 %r1, 5; add.s32 %r2, %r1, 7; setp.ne.b32 %q1, %r2, 12; selp.f32 %f3, %f0, %f1, %q1;", {"ALU": 1}),
    ("mul.f32 %f4, %f0, %f1; mov.f32 %f3, %f0;", {}),  # nobody reads the product
    ("ex2.approx.ftz.f32 %f3, %f0;", {"MUFU": 1}),
    ("cvt.rn.bf16x2.f32 %r1, %f0, %f1; mov.b32 %f3, %r1;", {"CONVERT": 1}),
])  # fmt: skip
def test_what_the_assembler_makes_of_arithmetic(body, units):
    assert issued(f"{LOAD} {body} {STORE}") == {**units, "GLOBAL": 3}


def test_a_constant_added_to_an_address_is_part_of_it():
    body = "mov.u32 %r1, buffer; shl.b32 %r2, %t, 2; add.s32 %r3, %r2, %r1; add.s32 %r4, %r3, 64;"
    stores = "st.shared.b32 [%r3], %t; st.shared.b32 [%r4], %t;"
    assert issued(body + stores, module=SHARED) == {"ALU": 1, "STORE": 2}, "the shift"
    assert issued(body + stores + "st.shared.b32 [%r3], %r4;", module=SHARED)["ALU"] == 3, "%r4 is stored"


def test_uniform_values_are_computed_once_for_all_lanes():
    body = "mov.u32 %r1, %ctaid.x; shl.b32 %r2, %r1, 4; add.s32 %r3, %r2, %t; st.global.b32 [%p0], %r3;"
    assert issued(body) == {"UNIFORM": 1, "ALU": 1, "GLOBAL": 1}


def test_a_short_branch_guards_its_instructions():
    """Lanes that jump over it issue it, too."""
    body = f"{LOAD} setp.lt.u32 %q1, %t, 32; @%q1 bra OVER; add.f32 %f0, %f0, %f1; OVER: add.f32 %f3, %f0, %f1; {STORE}"
    done = replayed(kernel(body, np.zeros(64, np.float32), block=(64,)))
    for warp in range(2):
        names = [Kind(k).name for k in done.trace.uops[done.trace.uop[done.trace.stream(warp)], 0]]
        assert names.count("BRANCH") == 1, "only ret"
    assert len(done.times(Unit.FMA, 0)) == 1
    assert len(done.times(Kind.SKIP, 0)) == 1
    assert len(done.times(Unit.FMA, 1)) == 2


def test_a_long_branch_branches():
    work = "add.f32 %f0, %f0, %f1;" * 20
    body = f"{LOAD} setp.lt.u32 %q1, %t, 32; @%q1 bra OVER; {work} OVER: add.f32 %f3, %f0, %f1; {STORE}"
    done = replayed(kernel(body, np.zeros(64, np.float32), block=(64,)))
    assert len(done.times(Unit.FMA, 0)) == 1
    assert len(done.times(Kind.BRANCH, 0)) == 2
    assert len(done.times(Unit.FMA, 1)) == 21


def test_what_waits_lets_later_work_go_first():
    """The second load and the arithmetic on it fill the latency of the first; stores keep their order."""
    body = """ld.shared.f32 %f0, [buffer]; add.f32 %f2, %f0, %f0; st.shared.f32 [buffer+8], %f2;
        add.f32 %f3, %f1, %f1; st.shared.f32 [buffer+12], %f3;"""
    program = kernel("ld.global.f32 %f1, [%p0];" + body, np.zeros(4, np.float32), module=SHARED).program()
    nodes = [node for node in Lowering(program).nodes if node is not None][1:-1]
    order = [program.code[node.place].instruction.mnemonic for node in scheduled(nodes, values(SM100))]
    assert order[:3] == ["ld.shared.f32", "add.f32", "add.f32"]
    first_sum = next(n for n in scheduled(nodes, values(SM100)) if n.form.unit is Unit.FMA)
    assert first_sum.writes == ("%f3",)


@pytest.mark.parametrize("body, words", [
    ("ld.acquire.gpu.global.b32 %r1, [%p0];", "turns between CTAs"),
    ("atom.global.cas.b32 %r1, [%p0], 0, 1; st.global.b32 [%p0+4], %r1;", "turns between CTAs"),
    (f"{READY} mbarrier.try_wait.parity.shared.b64 %q1, [bar], 1; selp.b32 %r1, 1, 0, %q1; st.global.b32 [%p0], %r1;",
     "answer of a try_wait"),
    (f"{READY} ASK: mbarrier.test_wait.parity.shared.b64 %q1, [bar], 0; @%q1 bra END; @%q0 bra END;"
     "mbarrier.arrive.shared.b64 _, [bar]; bra ASK; END:", "before its phase was complete"),
])  # fmt: skip
def test_control_flow_that_depends_on_time_is_refused(body, words):
    given = kernel(body, np.zeros(64, np.int32), module=MBARRIER)
    with pytest.raises(TimingError, match=words):
        record(given, values(SM100))


def test_another_cta_and_unknown_constants_are_refused():
    given = kernel("bar.sync 0;", arch=SM90)
    with pytest.raises(ValueError, match="missing for sm_90a"):
        record(given, {})
    assert replayed(given, SM90).run.cycles > 0


def test_claims_of_work_are_an_assumption_with_a_name():
    given = kernel("atom.global.add.u32 %r1, [%p0], 1; st.global.b32 [%p0+4], %r1;", np.zeros(64, np.int32))
    (assumption,) = record(given, values(SM100)).assumptions
    assert assumption.startswith("dynamic scheduling")
