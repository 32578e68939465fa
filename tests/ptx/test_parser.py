"""Every directive and operand form of PTX text, and errors that say where."""

from __future__ import annotations

import pytest

from undertow import ptx

HEADER = ".version 8.8\n.target sm_100a, debug\n.address_size 64\n"


def parse_body(body: str, declarations: str = "") -> ptx.Function:
    text = f"{HEADER}.visible .entry k(.param .u64 p)\n{{\n{declarations}\n{body}\n}}"
    return ptx.parse_module(text, "k.ptx").entry("k")


def operands(line: str, declarations: str = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>, q;"):
    return parse_body(line, declarations).instructions[0].operands


R1, R2, RD1 = ptx.Register("%r1", "b32"), ptx.Register("%r2", "b32"), ptx.Register("%rd1", "b64")
P1 = ptx.Register("%p1", "pred")

OPERANDS = [
    ("add.u32 %r1, %r2, 0x1F;", (R1, R2, ptx.Immediate(31))),
    ("add.u32 %r1, %r2, -7;", (R1, R2, ptx.Immediate(-7))),
    ("add.u32 %r1, %r2, 10U;", (R1, R2, ptx.Immediate(10))),
    ("add.u32 %r1, %r2, 017;", (R1, R2, ptx.Immediate(15))),
    ("add.u32 %r1, %r2, 0b101;", (R1, R2, ptx.Immediate(5))),
    ("mov.f32 %r1, 0f3F800000;", (R1, ptx.Immediate(0x3F800000, "f32"))),
    ("mov.f32 %r1, -0f3F800000;", (R1, ptx.Immediate(0xBF800000, "f32"))),
    ("mov.f64 %rd1, 0d3FF0000000000000;", (RD1, ptx.Immediate(0x3FF0000000000000, "f64"))),
    ("mov.f64 %rd1, 1.0;", (RD1, ptx.Immediate(0x3FF0000000000000, "f64"))),
    ("mov.f64 %rd1, 1e0;", (RD1, ptx.Immediate(0x3FF0000000000000, "f64"))),
    ("mov.u32 %r1, %tid.x;", (R1, ptx.Special("%tid.x"))),
    ("mov.u32 %r1, WARP_SZ;", (R1, ptx.Immediate(32))),
    ("ld.param.u64 %rd1, [p+8];", (RD1, ptx.Address(ptx.Symbol("p"), 8))),
    ("ld.u32 %r1, [%rd1+-4];", (R1, ptx.Address(RD1, -4))),
    ("ld.u32 %r1, [%rd1 + 0x8];", (R1, ptx.Address(RD1, 8))),
    ("ld.u32 %r1, [%rd1-4];", (R1, ptx.Address(RD1, -4))),
    ("ld.u32 %r1, [64];", (R1, ptx.Address(ptx.Immediate(64)))),
    ("ld.v2.u32 {%r1, _}, [%rd1];", (ptx.Vector((R1, ptx.Sink())), ptx.Address(RD1))),
    ("elect.sync _|%p1, -1;", (ptx.Pair(ptx.Sink(), P1), ptx.Immediate(-1))),
    ("selp.u32 %r1, 1, 0, !%p1;", (R1, ptx.Immediate(1), ptx.Immediate(0), ptx.Negated(P1))),
    ("cp.x [%r1], [%rd1, {%r1, %r2}], [%r2];",
     (ptx.Address(R1), ptx.Address(RD1, 0, (R1, R2)), ptx.Address(R2))),
    ("cp.x [%rd1, {%r1}, {%r2}];", (ptx.Address(RD1, 0, (R1,), (R2,)),)),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), OPERANDS)
def test_operand_forms(line, expected):
    assert operands(line) == expected


def test_guards_and_modifiers():
    first, second = parse_body(
        "@%p1 cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%r1];\n"
        "@!%p1 tcgen05.ld.sync.aligned.32x32b.x32.b32 %r1, [%r2];",
        ".reg .pred %p<2>; .reg .b32 %r<3>;",
    ).instructions
    assert first.guard == ptx.Guard(P1, False)
    assert second.guard == ptx.Guard(P1, True)
    assert first.mnemonic.split(".")[-1] == "L2::cache_hint"
    assert second.mnemonic == "tcgen05.ld.sync.aligned.32x32b.x32.b32"
    assert (second.line, second.column, second.opcode) == (8, 1, "tcgen05")


def test_scopes_have_their_own_registers_and_labels():
    wait = "{ .reg .pred P1; LOOP: setp.eq.u32 P1, %r1, 0; @P1 bra DONE; bra LOOP; DONE: }"
    function = parse_body(f"{wait}\n{wait}\nbra DONE;\nDONE: ret;", ".reg .b32 %r<2>;")
    predicates = [name for name in function.registers if name.startswith("P1")]
    assert len(predicates) == len(set(predicates)) == 2
    targets = [i.operands[0] for i in function.instructions if i.mnemonic == "bra"]
    assert [function.labels[t.name] for t in targets if isinstance(t, ptx.LabelRef)] == [3, 0, 6, 3, 7]


def test_an_inner_scope_sees_outer_names_and_shadows_them():
    function = parse_body("{ .reg .b32 %r1; mov.u32 %r1, %r2; } mov.u32 %r1, %r2;", ".reg .b32 %r<3>;")
    inner, outer = (i.operands for i in function.instructions)
    assert outer == (R1, R2)
    assert inner[0] != R1 and inner[1] == R2


LEGAL = """
//
// T42: everything that stopped some parser
//
.version 8.8
.target sm_100a
.address_size 64
\t.file\t1 "a.cu", 1700000000, 512
.pragma "nounroll";
.extern .shared .align 1024 .b8 dynamic[];
.shared .align 8 .b64 bars[4];
.visible .global .align 4 .u32 counters[2] = {1, 0x2};
.const .align 4 .b8 table[4] = {1, 2, 3, 4};
.global .u64 pointers[2] = {counters, generic(counters)+4};
.extern .func (.param .b32 status) vprintf (.param .b64 format, .param .b64 arguments);
.weak .func helper(.param .b64 x) .noreturn;
.func (.reg .u32 result) device(.reg .u32 x) { ret; }
.visible .entry empty() { ret; }
.visible .entry k(
    .param .u64 .ptr .align 1 a,
    .param .u64 .ptr .global .align 16 b,
    .param .align 64 .b8 map[128],
    .param .f32 scale
)
.reqntid 128, 1, 1
.maxntid 256
.minnctapersm 1
.maxnreg 64
.pragma "used_bytes_mask 1";
{
    .loc 1 10 0
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    .local .align 16 .b8 __local_depot0[32];
    .shared .align 4 .f32 tile[32];
    .pragma "nounroll";
    {
        .param .b64 param0;
        .param .b64 param1;
        .param .b32 retval0;
        st.param.b64 [param0], %rd1;
        call.uni (retval0), vprintf, (param0, param1);
    }
    {
        .param .b64 param0;
        ld.param.b64 %rd2, [param0];
    }
    .loc 1 12 3, function_name $L__info_string0, inlined_at 1 10 5
    brx.idx %r1, targets;
targets: .branchtargets here, there;
here:
there:
    mov.u32 %r2, %r3;   /* a comment
                           over two lines */
    bar.sync 0;
    ret;
}
.section .debug_abbrev
{
$L__info_string0:
.b8 1, 17, 1
.b32 .debug_str
}
.file 2 "b.cu"
"""


def test_legal_text_parses():
    module = ptx.parse_module(LEGAL, "t42.ptx")
    kernel = module.entry("k")
    assert kernel.directives == {"reqntid": (128, 1, 1), "maxntid": (256,), "minnctapersm": (1,), "maxnreg": (64,)}
    assert [(p.name, p.size, p.offset) for p in kernel.parameters] == [
        ("a", 8, 0), ("b", 8, 8), ("map", 128, 64), ("scale", 4, 192),
    ]  # fmt: skip
    assert kernel.parameters[1].pointer_space == "global"
    assert kernel.parameter_bytes == 196
    assert module.variables["dynamic"].size is None
    assert module.variables["counters"].initializer == (ptx.Immediate(1), ptx.Immediate(2))
    assert module.variables["pointers"].initializer[0] == ("symbol", "counters", 0)
    assert kernel.branch_targets == {"targets": ("here", "there")}
    assert module.entry("empty").parameters == ()
    move = next(i for i in kernel.instructions if i.mnemonic == "mov.u32")
    assert move.source is not None and move.source.inlined_at is not None
    assert (move.source.file, move.source.line, move.source.inlined_at.line) == ("a.cu", 12, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + ".visible .entry k() {\n  add.u32 %r1, 1, 2;\n}", "k.ptx:5:11: register %r1 is not declared"),
        (HEADER + ".visible .entry k() {\n  bra nowhere;\n}", "k.ptx:5:7: unknown name nowhere"),
        (HEADER + ".visible .entry k() {\n  ret\n}", "k.ptx:6:1: expected"),
        (HEADER + ".visible .entry k() {\n  ret;\n", "expected a statement, got the end of the file"),
        (HEADER + ".nonsense 3", "k.ptx:4:1: expected a directive"),
        (HEADER + "/* open", "k.ptx:4:1: comment is never closed"),
        (HEADER + ".visible .entry k() { # }", "k.ptx:4:23: unexpected character '#'"),
        (HEADER + ".visible .entry k() { L: L: ret; }", "label L is defined twice"),
        (HEADER + ".visible .entry k() { .reg .b31 a; }", "unknown register type .b31"),
        (HEADER + ".visible .entry k(.param n) { ret; }", "a parameter needs a type"),
    ],
)
def test_errors_name_line_and_column(text, message):
    with pytest.raises(ptx.PtxSyntaxError) as caught:
        ptx.parse_module(text, "k.ptx")
    assert message in str(caught.value)


def test_choosing_a_kernel():
    two = HEADER + ".entry a() { ret; } .entry b() { ret; }"
    module = ptx.parse_module(two)
    assert module.entry("b").name == "b"
    with pytest.raises(ValueError, match="has 2 entries"):
        module.entry(None)
    with pytest.raises(ValueError, match="no entry named 'c'"):
        module.entry("c")


def test_lines_of_inline_assembly_are_not_lines_of_the_source():
    """LLVM adds one to the line with every line of the assembly's text; a scope may still come from another place."""
    text = """.version 8.8
.target sm_100a
.address_size 64
.file 1 "a.py"
.file 2 "b.py"
.visible .entry k()
{
    .reg .b32 %r<3>;
    .loc 1 72 12
    {
    .reg .pred P1;
    .loc 1 74 12
    WAIT:
    .loc 1 75 12
    mov.b32 %r1, 1;
    }
    mov.b32 %r1, 2;
    {
    .loc 2 5 12
    mov.b32 %r2, 3;
    .loc 2 6 7
    mov.b32 %r2, 4;
    }
    .loc 1 80 12
    ret;
}
"""
    instructions = ptx.parse_module(text).entry("k").instructions
    assert [str(i.source) for i in instructions] == ["a.py:72", "a.py:72", "b.py:5", "b.py:6", "a.py:80"]
