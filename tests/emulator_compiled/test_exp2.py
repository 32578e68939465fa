"""ex2.approx on ten million values: float64 exp2, rounded once, on both sides of every corner."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.kernels import kernel
from undertow import emulator as emu

TEXT = {
    flush: kernel(
        f"""
        mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 1024, %t; mul.wide.u32 %d0, %r2, 4;
        add.s64 %d1, %p1, %d0; add.s64 %d2, %p0, %d0;
        ld.global.f32 %f1, [%d1]; ex2.approx{flush}.f32 %f2, %f1; st.global.f32 [%d2], %f2;
        """,
        2,
    )
    for flush in ("", ".ftz")
}
SMALLEST_NORMAL = 2.0**-126


def values(count: int) -> np.ndarray:
    """Uniform over the exponents that matter, the arguments of a softmax, and any bit pattern."""
    generator = np.random.default_rng(3)
    spread = generator.uniform(-155, 130, count // 4)
    softmax = -np.abs(generator.standard_normal(count // 4)) * 8
    tiny = generator.standard_normal(count // 4) * 2.0 ** generator.integers(-40, 0, count // 4)
    patterns = generator.integers(0, 1 << 32, count - 3 * (count // 4), np.uint32).view(np.float32)
    return np.concatenate([spread.astype(np.float32), softmax.astype(np.float32), tiny.astype(np.float32), patterns])


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


@pytest.mark.parametrize("flush", TEXT)
def test_every_value_is_the_float64_result_rounded_once(flush):
    x = values(10 * 1024 * 1024)
    out = np.zeros_like(x)
    description = emu.Launch(grid=(len(x) // 1024, 1, 1), block=(1024, 1, 1), params=(emu.Pointer(out), emu.Pointer(x)))
    emu.launch(TEXT[flush], description, emu.Options(backend="compiled"))
    with np.errstate(all="ignore"):
        argument = flushed(x) if flush else x
        expected = np.exp2(argument.astype(np.float64)).astype(np.float32)
        expected = flushed(expected) if flush else expected
    same = (out.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(out) & np.isnan(expected))
    assert same.all(), (
        f"{(~same).sum()} differ, first ex2({x[~same][0].hex()}) = {out[~same][0]}, not {expected[~same][0]}"
    )
