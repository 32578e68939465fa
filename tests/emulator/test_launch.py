"""Launch descriptions: what is refused and how, forms without semantics, options, events, the documented example."""

from __future__ import annotations

import doctest
import warnings

import numpy as np
import pytest

import undertow.emulator
import undertow.ptx
from undertow import emulator as emu
from undertow.emulator import events, semantics
from undertow.emulator.observers import Coverage

from .kernels import HEADER, kernel, run

TEXT = (
    HEADER
    + """
.visible .entry k(.param .u64 out, .param .align 8 .b8 t[40], .param .align 4 .b8 shape[8], .param .f32 a, .param .u8 b)
.reqntid 32, 1, 1
{ .reg .b64 %d<9>; .reg .b32 %r<9>; .reg .b16 %h<2>;
ld.param.u64 %d0, [out]; ld.param.u64 %d1, [t]; ld.param.v2.u32 {%r1, %r2}, [t+8]; ld.param.u64 %d2, [t+24];
ld.param.v2.b32 {%r3, %r4}, [shape]; ld.param.f32 %r5, [a]; ld.param.s8 %h0, [b]; cvt.s32.s16 %r6, %h0;
st.global.u64 [%d0], %d1; st.global.v2.u32 [%d0+8], {%r1, %r2}; st.global.u64 [%d0+16], %d2;
st.global.v4.u32 [%d0+32], {%r3, %r4, %r5, %r6}; ret; }"""
)


def description(**changes) -> emu.Launch:
    out, tensor = np.zeros(12, np.uint32), np.zeros(6, np.float32)
    params = [emu.Pointer(out), emu.Tensor(tensor, (7, 8, 9), (1 << 33, 5)), emu.Ints(3, -4), 1.5, -2]
    return emu.Launch(**{"grid": (1,), "block": (32,), "params": params, **changes})


def test_parameters_arrive_as_described():
    launch = description()
    emu.launch(TEXT, launch)
    out = launch.params[0].array
    assert out[2:4].tolist() == [7, 8]
    assert out[4:6].view(np.uint64)[0] == 1 << 33
    assert out[8:12].view(np.int32).tolist() == [3, -4, 0x3FC00000, -2]


def changed(place: int, value) -> dict:
    params = list(description().params)
    params[place] = value
    return {"params": params}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": []}, "params: 0 values for 5 parameters of k"),
        (changed(1, emu.Tensor(np.zeros(4), (1, 2, 3))), r"params\[1\]: Tensor has 24 bytes, .param 1 of k has 40"),
        (changed(2, emu.Ints(1)), r"params\[2\]: Ints has 4 bytes, .param 2 of k has 8"),
        (changed(4, 300), r"params\[4\]: 300 does not fit .param 4 of 1 bytes"),
        (changed(0, "text"), r"params\[0\]: str; allowed are Tensor, Pointer"),
        (changed(0, emu.Pointer([1, 2])), r"params\[0\]: list is neither a NumPy array nor a CPU torch tensor"),
        ({"block": (64,)}, r"block: \(64, 1, 1\); the kernel requires \(32, 1, 1\) \(.reqntid\)"),
        ({"block": (0,)}, r"block: \(0, 1, 1\); allowed are one to three positive integers"),
        ({"block": (2048,)}, "2048 threads; allowed are up to 1024"),
        ({"dynamic_smem": 300_000}, "dynamic_smem: 300000 bytes"),
        ({"cluster": (2, 1, 1)}, r"cluster: \(2, 1, 1\)"),
        ({"kernel": "other"}, "kernel: no entry named 'other'"),
    ],
)
def test_bad_descriptions_name_argument_value_and_allowed(changes, message):
    with pytest.raises(ValueError, match=message):
        emu.launch(TEXT, description(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "f8"}, "dtype 'f8'"),
        ({"box": (512, 1)}, "allowed are 1 to 256"),
        ({"strides": (24,)}, "multiples of 16 bytes"),
        ({"box": (4, 1)}, "inner box of 8 bytes"),
        ({"swizzle": 32}, "at most the swizzle"),
        ({"swizzle": 48}, "allowed are 0, 32, 64, 128"),
        ({"dims": (64,)}, "need 1 to 5 dims"),
    ],
)
def test_bad_tensor_maps(changes, message):
    fields = {"dtype": "u16", "dims": (64, 4), "strides": (128,), "box": (64, 4), **changes}
    text = HEADER + ".visible .entry k(.param .align 64 .b8 map[128]) { ret; }"
    tensor_map = emu.TensorMap(np.zeros((4, 64), np.uint16), **fields, name="Q")
    with pytest.raises(emu.LaunchError, match=f"Q: .*{message}"):
        emu.launch(text, emu.Launch(grid=(1,), block=(1,), params=[tensor_map]))


@pytest.mark.parametrize(
    "line",
    [
        "wgmma.fence.sync;", "tcgen05.cp.cta_group::1.128x256b [%r1], %d1;",
        "tcgen05.mma.cta_group::2.kind::f16 [%r1], %d1, %d2, %r2, %q1;",
        "tcgen05.ld.sync.aligned.16x64b.x1.b32 %r1, [%r2];",
        "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%d1, {%f1, %f2}];", "add.f33 %r1, %r2, %r3;", "add.u32 %r1, %r2;",
        "vprintf.x;",
    ],
)  # fmt: skip
def test_unknown_forms_name_ptx_and_source_line(line):
    text = kernel(f".loc 1 7 3\n{line}", module='.file 1 "attention.py"')
    with pytest.raises(emu.UnsupportedPtx) as caught:
        run(text)
    assert line in str(caught.value)
    assert "<ptx>:14 (attention.py:7)" in str(caught.value)


def test_every_row_declares_effects_and_has_an_implementation():
    rows = [row for group in semantics.ROWS.values() for row in group]
    assert len({row.name for row in rows}) == len(rows) > 200
    for row in rows:
        assert isinstance(row.effects, tuple), row.syntax
        assert (row.numpy is None) != (row.make is None), row.syntax
    with pytest.raises(ValueError, match="declare effects"):
        semantics.table.machine("frob.u32 d:u32", chapter="none", effects=None)(lambda decoded, bus: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (emu.Options(backend="gpu"), "backend: 'gpu'"),
        (emu.Options(schedule="random"), "schedule: 'random'"),
        (emu.Options(completion="never"), "completion: 'never'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(emu.LaunchError, match=message):
        emu.launch(TEXT, description(), options)


def test_cta_order_is_obeyed():
    text = kernel("mov.u32 %r1, %ctaid.x; atom.global.exch.b32 %r2, [%p0], %r1;", 1)
    cell = np.zeros(1, np.uint32)
    run(text, cell, grid=(4,), block=(1,), options=emu.Options(cta_order=[3, 1, 0, 2]))
    assert cell[0] == 2


def test_coverage_counts_forms_and_branches():
    text = kernel("setp.lt.u32 %q1, %t, 16; @%q1 bra SKIP; add.u32 %r1, %t, 1; bra SKIP; nanosleep.u32 1; SKIP:")
    coverage = Coverage()
    result = run(text, block=(64,), observers=[coverage])
    assert coverage.forms["add.<type> d, a, b"] == 2
    assert coverage.branches == {2: {"taken", "not taken"}}
    assert coverage.unexecuted == [5]
    assert result.executions[5] == 0


class Recorder:
    """Keeps the events of some classes."""

    def __init__(self, *classes: type):
        self.subscriptions = classes
        self.events: list = []

    def start(self, program, launch) -> None:
        self.events.clear()

    def observe(self, event) -> None:
        self.events.append(event)

    def finish(self) -> list:
        return [emu.Finding("recorded", f"{len(self.events)} events")]


def test_events_of_a_bulk_copy():
    text = kernel(
        """
        setp.ne.u32 %q1, %t, 0; @%q1 bra END;
        mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [bar], 32;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%p0], 32, [bar];
        LOOP: mbarrier.try_wait.parity.shared.b64 %q2, [bar], 0; @!%q2 bra LOOP;
        ld.shared.v2.u32 {%r1, %r2}, [tile+8];
        END:
        """,
        1, ".shared .align 8 .b64 bar; .shared .align 16 .b8 tile[32];",
    )  # fmt: skip
    recorder = Recorder(
        events.MbarrierOperation, events.MemoryAccess, events.AsyncIssued, events.AsyncCompleted, events.FenceExecuted
    )
    result = run(text, np.zeros(8, np.uint32), observers=[recorder], options=emu.Options(completion="late"))
    told = []
    for event in recorder.events:
        if isinstance(event, events.MbarrierOperation):
            told.append((event.op, event.phase, event.completed))
        elif isinstance(event, events.MemoryAccess):
            told.append((event.kind, event.space, event.proxy, event.size, event.operation is not None))
        else:
            told.append(type(event).__name__)
    assert told == [
        ("init", 0, False), "FenceExecuted", ("expect_tx", 0, False), ("arrive", 0, False), "AsyncIssued",
        ("read", "global", "async", 32, True), ("write", "shared", "async", 32, True), ("complete_tx", 0, True),
        "AsyncCompleted", ("wait", 0, True), ("read", "shared", "generic", 8, False),
    ]  # fmt: skip
    assert result.findings[0].message == "11 events"


def test_without_observers_generated_code_publishes_nothing():
    program = emu.load_program(kernel("add.u32 %r1, %t, 1;"))
    emu.launch(program, emu.Launch(grid=(1,), block=(32,)))
    assert program.block_cache and not any("publish" in code.source for code in program.block_cache.values())


def test_auto_falls_back_to_numpy_with_one_line(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "undertow.emulator.compiled", None)
    monkeypatch.delattr(undertow.emulator, "compiled", raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = emu.launch(TEXT, description(), emu.Options(backend="auto"))
    assert result.backend == "numpy"
    assert len(caught) == 1 and "running on NumPy" in str(caught[0].message)
    assert "\n" not in str(caught[0].message)


@pytest.mark.parametrize("module", [undertow.emulator, undertow.ptx])
def test_documented_examples(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 2 and outcome.failed == 0
