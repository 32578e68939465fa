"""CTAs on several threads: sums of floats come out as if one CTA ran after the other."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.emulator.kernels import kernel
from undertow import emulator as emu

CTAS, WORDS = 12, 64
REDUCE = f"""
    mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, {WORDS}, %t; mul.wide.u32 %d0, %r2, 4; add.s64 %d1, %p1, %d0;
    ld.global.f32 %f1, [%d1]; shl.b32 %r3, %t, 2; mov.u32 %r4, tile; add.u32 %r4, %r4, %r3; st.shared.f32 [%r4], %f1;
    fence.proxy.async.shared::cta; bar.sync 0;
    setp.ne.u32 %q1, %t, 0; @%q1 bra REDUCED;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%p0], [tile], {4 * WORDS};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    REDUCED: bar.sync 0;
"""
TILE = f".shared .align 128 .b8 tile[{4 * WORDS}];"
SUM = kernel(REDUCE, 2, TILE)
# Every CTA looks at the running sum: it must see its own addition and those of all earlier CTAs, no later ones.
SUM_AND_LOOK = kernel(
    f"{REDUCE} mul.wide.u32 %d2, %t, 4; add.s64 %d3, %p0, %d2; ld.global.f32 %f2, [%d3];"
    " add.s64 %d4, %p2, %d0; st.global.f32 [%d4], %f2;",
    3,
    TILE,
)


def addends() -> np.ndarray:
    """Large and small numbers of both signs: the order of their sum shows in its bits."""
    generator = np.random.default_rng(5)
    return (generator.standard_normal((CTAS, WORDS)) * 10.0 ** generator.integers(-4, 5, (CTAS, WORDS))).astype(
        np.float32
    )


def running_sums(order) -> np.ndarray:
    total, seen = np.zeros(WORDS, np.float32), np.zeros((CTAS, WORDS), np.float32)
    for cta in order:
        total = total + addends()[cta]
        seen[cta] = total
    return seen


def run(text: str, order, *more: np.ndarray) -> np.ndarray:
    total = np.zeros(WORDS, np.float32)
    params = tuple(emu.Pointer(a) for a in (total, addends(), *more))
    description = emu.Launch(grid=(CTAS, 1, 1), block=(WORDS, 1, 1), params=params)
    emu.launch(text, description, emu.Options(backend="compiled", cta_order=order))
    return total


@pytest.fixture(params=[1, 2, 8])
def threads(monkeypatch, request):
    """Let the back end believe in that many processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(request.param)))


ORDERS = {"ascending": None, "descending": range(CTAS)[::-1], "mixed": [3, 0, 11, 7, 1, 9, 2, 10, 4, 8, 6, 5]}


@pytest.mark.parametrize("name", ORDERS)
def test_sums_are_those_of_the_given_order(threads, name):
    order = range(CTAS) if ORDERS[name] is None else ORDERS[name]
    expected = running_sums(order)[list(order)[-1]]
    for _ in range(10):
        np.testing.assert_array_equal(run(SUM, ORDERS[name]).view(np.uint32), expected.view(np.uint32))


def test_the_order_shows_in_the_sums():
    assert (running_sums(range(CTAS))[CTAS - 1] != running_sums(range(CTAS)[::-1])[0]).any()


@pytest.mark.parametrize("name", ORDERS)
def test_a_cta_that_looks_sees_all_earlier_ones_and_itself(threads, name):
    order = range(CTAS) if ORDERS[name] is None else ORDERS[name]
    for _ in range(10):
        seen = np.zeros((CTAS, WORDS), np.float32)
        run(SUM_AND_LOOK, ORDERS[name], seen)
        np.testing.assert_array_equal(seen.view(np.uint32), running_sums(order).view(np.uint32))


def test_the_first_fault_in_the_order_of_ctas_is_reported(threads):
    text = kernel(
        "mov.u32 %r1, %ctaid.x; setp.lt.u32 %q1, %r1, 5; @%q1 bra END; mul.wide.u32 %d0, %r1, 1024;"
        " add.s64 %d1, %p0, %d0; ld.global.u32 %r2, [%d1]; END:",
        1,
    )
    description = emu.Launch(grid=(CTAS, 1, 1), block=(32, 1, 1), params=(emu.Pointer(np.zeros(4, np.uint32)),))
    for _ in range(10):
        with pytest.raises(emu.MemoryFault, match=r"CTA \(\d+, 0, 0\), warp 0") as caught:
            emu.launch(text, description, emu.Options(backend="compiled"))
        assert "CTA (5, 0, 0)" in str(caught.value)
