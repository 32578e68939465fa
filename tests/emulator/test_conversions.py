"""cvt: rounding, clamping, packing."""

from __future__ import annotations

import numpy as np
import pytest

from .kernels import bits, evaluate, patterns

INF, NAN = float("inf"), float("nan")

TABLE = [
    ("cvt.rz.f32.s32", "f32", "s32", [16777219], [16777218.0]),  # T39
    ("cvt.rn.f32.s32", "f32", "s32", [16777219], [16777220.0]),
    ("cvt.rp.f32.u32", "f32", "u32", [16777217], [16777218.0]),
    ("cvt.rn.f32.u64", "f32", "u64", [2**63 + 2**39 + 1], [float(2**63 + 2**40)]),
    ("cvt.rz.f32.u64", "f32", "u64", [2**64 - 1], [float(2**64 - 2**40)]),
    ("cvt.rn.f64.s64", "f64", "s64", [-(2**53) - 1], [-float(2**53)]),
    ("cvt.rzi.s32.f32", "s32", "f32", [-1.5, 3e9, -3e9, NAN], [-1, 2**31 - 1, -(2**31), 0]),
    ("cvt.rni.s32.f32", "s32", "f32", [2.5, 3.5, -0.5], [2, 4, 0]),
    ("cvt.rmi.s32.f32", "s32", "f32", [-1.5, 1.5], [-2, 1]),
    ("cvt.rpi.u32.f32", "u32", "f32", [1.25, -7.0], [2, 0]),
    ("cvt.rzi.u64.f32", "u64", "f32", [2.0**63, INF], [2**63, 2**64 - 1]),
    ("cvt.rzi.s64.f64", "s64", "f64", [-(2.0**63), 2.0**63], [-(2**63), 2**63 - 1]),
    ("cvt.u16.u32", "u16", "u32", [0x12345], [0x2345]),
    ("cvt.s64.s32", "s64", "s32", [-2], [-2]),
    ("cvt.u64.u32", "u64", "u32", [2**32 - 1], [2**32 - 1]),
    ("cvt.s32.s8", "s32", "s32", [0x80, 0x17F], [-128, 127]),
    ("cvt.sat.u8.s32", "u32", "s32", [-5, 300, 7], [0, 255, 7]),
    ("cvt.f64.f32", "f64", "f32", [1.5], [1.5]),
    ("cvt.rn.f32.f64", "f32", "f64", [1 + 2.0**-25], [1.0]),
    ("cvt.rp.f32.f64", "f32", "f64", [1 + 2.0**-40], [1 + 2.0**-23]),
    ("cvt.rni.f32.f32", "f32", "f32", [2.5, -3.7], [2.0, -4.0]),
    ("cvt.sat.f32.f32", "f32", "f32", [1.5, -1.0, NAN], [1.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("mnemonic", "target", "source", "values", "expected"), TABLE, ids=lambda v: str(v)[:24])
def test_table(mnemonic, target, source, values, expected):
    assert evaluate(f"{mnemonic} {{d}}, {{a}};", target, a=(source, values)) == expected


def test_bf16_rounds_to_nearest_even_and_first_source_is_upper():
    """T46."""
    a = ("f32", bits([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 0x7F800001]))
    b = ("f32", [1.0, 2.0, -1.0, 0.0, 4.0])
    got = evaluate("cvt.rn.bf16x2.f32 {d}, {a}, {b};", "b32", a=a, b=b)
    assert [f"{v:08x}" for v in got] == ["3f803f80", "3f824000", "3f81bf80", "7f800000", "7fff4080"]


def test_bf16_rounds_to_zero_on_request():
    got = evaluate("cvt.rz.bf16x2.f32 {d}, {a}, {a};", "b32", a=("f32", bits([0x3F80FFFF, 0x7F7FFFFF])))
    assert [f"{v:08x}" for v in got] == ["3f803f80", "7f7f7f7f"]


def test_single_half_conversions():
    values = [1.0 + 2.0**-9, 65520.0, -0.0, 1e-8, NAN]
    expected = [0x3F80, 0x4780, 0x8000, 0x322C, 0x7FFF]
    assert evaluate("cvt.rn.bf16.f32 {d}, {a};", "bf16", a=("f32", values)) == expected
    halves = evaluate("cvt.rn.f16.f32 {d}, {a};", "f16", a=("f32", values))
    assert halves == [0x3C02, 0x7C00, 0x8000, 0x0000, 0x7FFF]
    assert evaluate("cvt.f32.f16 {d}, {a};", "f32", a=("f16", patterns([1.5, -2.0], "f2"))) == [1.5, -2.0]
    assert evaluate("cvt.f32.bf16 {d}, {a};", "f32", a=("bf16", [0x3FC0])) == [1.5]
    assert evaluate("cvt.rn.relu.f16x2.f32 {d}, {a}, {b};", "b32", a=("f32", [-1.0]), b=("f32", [2.0])) == [0x4000]


def test_every_f16_survives_the_round_trip():
    every = np.arange(0x7C00, dtype=np.uint16)
    chunk = every[:: len(every) // 1000][:1000].tolist()
    wide = list(evaluate("cvt.f32.f16 {d}, {a};", "f32", a=("f16", chunk)))
    assert evaluate("cvt.rn.f16.f32 {d}, {a};", "f16", a=("f32", wide)) == chunk


def test_tf32_keeps_ten_bits():
    got = patterns(evaluate("cvt.rna.tf32.f32 {d}, {a};", "f32", a=("f32", bits([0x3F801000, 0x3F800FFF]))))
    assert got == [0x3F802000, 0x3F800000]
