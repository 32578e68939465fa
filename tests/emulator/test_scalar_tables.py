"""Lane forms against values worked out by hand or by exact arithmetic; T rows are public bug reports."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .kernels import bits, evaluate, patterns

U32, U64 = 2**32, 2**64

INTEGER_TABLE = [
    # instruction, result type, operands, expected
    ("add.u64 {d}, {a}, {b};", "u64", {"a": ("u64", [0xFFFFFFFF00000000]), "b": ("u64", [0x100000000])}, [0]),  # T39
    ("add.s32 {d}, {a}, {b};", "s32", {"a": ("s32", [2**31 - 1]), "b": ("s32", [1])}, [-(2**31)]),
    ("add.sat.s32 {d}, {a}, {b};", "s32", {"a": ("s32", [2**31 - 1, -5]), "b": ("s32", [1, 3])}, [2**31 - 1, -2]),
    ("sub.sat.s32 {d}, {a}, {b};", "s32", {"a": ("s32", [-(2**31)]), "b": ("s32", [1])}, [-(2**31)]),
    ("mul.hi.u32 {d}, {a}, {b};", "u32", {"a": ("u32", [U32 - 1]), "b": ("u32", [U32 - 1])}, [U32 - 2]),
    ("mul.hi.s32 {d}, {a}, {b};", "s32", {"a": ("s32", [-1, -(2**31)]), "b": ("s32", [1, -(2**31)])}, [-1, 2**30]),
    ("mul.hi.u64 {d}, {a}, {b};", "u64", {"a": ("u64", [U64 - 1]), "b": ("u64", [U64 - 1])}, [U64 - 2]),
    ("mul.hi.s64 {d}, {a}, {b};", "s64", {"a": ("s64", [-3, 2**62]), "b": ("s64", [5, 4])}, [-1, 1]),
    ("mul.wide.s32 {d}, {a}, {b};", "s64", {"a": ("s32", [-(2**31)]), "b": ("s32", [3])}, [-3 * 2**31]),
    ("mul.wide.u16 {d}, {a}, {b};", "u32", {"a": ("u16", [65535]), "b": ("u16", [65535])}, [65535**2]),
    ("mad.wide.u32 {d}, {a}, {b}, {c};", "u64",
     {"a": ("u32", [U32 - 1]), "b": ("u32", [2]), "c": ("u64", [5])}, [2 * U32 + 3]),
    ("mad.lo.s32 {d}, {a}, {b}, {c};", "s32", {"a": ("s32", [7]), "b": ("s32", [-3]), "c": ("s32", [1])}, [-20]),
    ("mul24.lo.s32 {d}, {a}, {b};", "s32", {"a": ("s32", [0x800000]), "b": ("s32", [1])}, [-0x800000]),
    ("div.s32 {d}, {a}, {b};", "s32", {"a": ("s32", [-7, 7, -(2**31)]), "b": ("s32", [2, -2, -1])}, [-3, -3, -(2**31)]),
    ("rem.s32 {d}, {a}, {b};", "s32", {"a": ("s32", [-7, 7, -(2**31)]), "b": ("s32", [2, -2, -1])}, [-1, 1, 0]),
    ("div.u32 {d}, {a}, {b};", "u32", {"a": ("u32", [U32 - 1, 9]), "b": ("u32", [2, 0])}, [2**31 - 1, U32 - 1]),
    ("abs.s32 {d}, {a};", "s32", {"a": ("s32", [-5, -(2**31)])}, [5, -(2**31)]),
    ("sad.u32 {d}, {a}, {b}, {c};", "u32", {"a": ("u32", [3]), "b": ("u32", [10]), "c": ("u32", [100])}, [107]),
    ("popc.b64 {d}, {a};", "u32", {"a": ("b64", [U64 - 1, 5])}, [64, 2]),
    ("clz.b32 {d}, {a};", "u32", {"a": ("b32", [0, 1, 0x80000000, 0x00010000])}, [32, 31, 0, 15]),
    ("clz.b64 {d}, {a};", "u32", {"a": ("b64", [0, 1, 2**63])}, [64, 63, 0]),
    ("brev.b32 {d}, {a};", "b32", {"a": ("b32", [1, 0x80000001, 6])}, [0x80000000, 0x80000001, 0x60000000]),
    ("bfind.u32 {d}, {a};", "u32", {"a": ("u32", [0, 1, 0x80000000])}, [U32 - 1, 0, 31]),
    ("bfind.s32 {d}, {a};", "u32", {"a": ("s32", [-1, -5, 4])}, [U32 - 1, 2, 2]),
    ("bfind.shiftamt.u32 {d}, {a};", "u32", {"a": ("u32", [1])}, [31]),
    ("bfe.u32 {d}, {a}, {b}, {c};", "u32",
     {"a": ("u32", [0xFFFFFFFF, 0xABCD1234, 0xF0, 5]), "b": ("u32", [32, 8, 4, 0]), "c": ("u32", [8, 8, 4, 0])},
     [0, 0x12, 0xF, 0]),  # T39: past the end gives 0
    ("bfe.s32 {d}, {a}, {b}, {c};", "s32",
     {"a": ("s32", [-1, 0xF0, 0x70, -(2**31), 0x7FFFFFFF]), "b": ("u32", [32, 4, 4, 28, 28]),
      "c": ("u32", [8, 4, 4, 8, 8])}, [-1, -1, 7, -8, 7]),
    ("bfi.b32 {d}, {a}, {b}, {p}, {c};", "b32",
     {"a": ("b32", [0xFF, 0x3]), "b": ("b32", [0, 0xFFFFFFFF]), "p": ("u32", [8, 40]), "c": ("u32", [4, 4])},
     [0xF00, 0xFFFFFFFF]),
    ("shl.b32 {d}, {a}, {b};", "b32", {"a": ("b32", [1, 1, 1]), "b": ("u32", [31, 32, 200])}, [2**31, 0, 0]),
    ("shr.u32 {d}, {a}, {b};", "u32", {"a": ("u32", [2**31, 2**31]), "b": ("u32", [31, 32])}, [1, 0]),
    ("shr.s32 {d}, {a}, {b};", "s32", {"a": ("s32", [-8, -8]), "b": ("u32", [1, 99])}, [-4, -1]),
    ("shl.b32 {d}, {a}, 33;", "b32", {"a": ("b32", [1])}, [0]),
    ("shf.l.wrap.b32 {d}, {a}, {b}, {c};", "b32",
     {"a": ("b32", [0x80000000, 1]), "b": ("b32", [1, 2]), "c": ("u32", [1, 32])}, [3, 2]),
    ("shf.r.clamp.b32 {d}, {a}, {b}, {c};", "b32",
     {"a": ("b32", [2, 7]), "b": ("b32", [1, 9]), "c": ("u32", [1, 50])}, [0x80000001, 9]),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0x80;", "b32",
     {"a": ("b32", [0b1100]), "b": ("b32", [0b1010]), "c": ("b32", [0b1111])}, [0b1000]),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0x96;", "b32",
     {"a": ("b32", [0b1100]), "b": ("b32", [0b1010]), "c": ("b32", [0b1111])}, [0b1001]),
    ("prmt.b32 {d}, {a}, {b}, {c};", "b32",
     {"a": ("b32", [0x33221100, 0x80000000]), "b": ("b32", [0x77665544, 0]), "c": ("u32", [0x7531, 0x000B])},
     [0x77553311, 0x000000FF]),
    ("prmt.b32.b4e {d}, {a}, {b}, {c};", "b32",
     {"a": ("b32", [0x33221100]), "b": ("b32", [0x77665544]), "c": ("u32", [0])}, [0x55667700]),
    ("dp4a.s32.s32 {d}, {a}, {b}, {c};", "s32",
     {"a": ("b32", [0xFF020304]), "b": ("b32", [0x01010101]), "c": ("s32", [10])}, [10 - 1 + 2 + 3 + 4]),
    ("selp.s32 {d}, {a}, {b}, !{c};", "s32",
     {"a": ("s32", [1, 1]), "b": ("s32", [2, 2]), "c": ("pred", [1, 0])}, [2, 1]),  # T39: the negation counts
    ("slct.u32.s32 {d}, {a}, {b}, {c};", "u32",
     {"a": ("u32", [1, 1]), "b": ("u32", [2, 2]), "c": ("s32", [-1, 0])}, [2, 1]),
    ("min.s32 {d}, {a}, {b};", "s32", {"a": ("s32", [-1]), "b": ("s32", [1])}, [-1]),
    ("min.u32 {d}, {a}, {b};", "u32", {"a": ("u32", [U32 - 1]), "b": ("u32", [1])}, [1]),
    ("set.lt.u32.s32 {d}, {a}, {b};", "u32", {"a": ("s32", [-1, 4]), "b": ("s32", [0, 3])}, [U32 - 1, 0]),
    ("cnot.b32 {d}, {a};", "b32", {"a": ("b32", [0, 9])}, [1, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "result", "operands", "expected"), INTEGER_TABLE, ids=lambda v: str(v)[:40])
def test_integer_forms(instruction, result, operands, expected):
    assert evaluate(instruction, result, **operands) == expected


def test_carry_chain_has_no_operand_for_the_carry():
    """T41: mad.lo.cc sets it, madc.hi takes it."""
    text = "mad.lo.cc.u32 {d}, {a}, {b}, {b}; madc.hi.u32 {e}, {a}, {b}, 0;"
    assert evaluate(text, ("u32", "u32"), a=("u32", [0xFFFFFFFF]), b=("u32", [1])) == ([0], [1])


@given(st.lists(st.tuples(st.integers(0, U64 - 1), st.integers(0, U64 - 1)), min_size=1, max_size=8))
def test_two_word_addition_and_subtraction_by_carries(pairs):
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    words = ".reg .b32 al, ah, bl, bh, lo, hi; mov.b64 {{al, ah}}, {a}; mov.b64 {{bl, bh}}, {b};"
    add = "{{" + words + "add.cc.u32 lo, al, bl; addc.u32 hi, ah, bh; mov.b64 {d}, {{lo, hi}}; }}"
    sub = "{{" + words + "sub.cc.u32 lo, al, bl; subc.u32 hi, ah, bh; mov.b64 {d}, {{lo, hi}}; }}"
    assert evaluate(add, "u64", a=("u64", a), b=("u64", b)) == [(x + y) % U64 for x, y in pairs]
    assert evaluate(sub, "u64", a=("u64", a), b=("u64", b)) == [(x - y) % U64 for x, y in pairs]


FLOAT_TABLE = [
    ("add.rm.f32 {d}, {a}, {b};", {"a": [1.0], "b": [2.0**-30]}, [1.0]),  # T39
    ("add.rp.f32 {d}, {a}, {b};", {"a": [1.0], "b": [2.0**-30]}, [1 + 2.0**-23]),
    ("add.rz.f32 {d}, {a}, {b};", {"a": [-1.0], "b": [2.0**-30]}, [-1 + 2.0**-24]),
    ("mul.rp.f32 {d}, {a}, {b};", {"a": [1 + 2.0**-23], "b": [1 + 2.0**-23]}, [1 + 3 * 2.0**-23]),
    ("fma.rn.f32 {d}, {a}, {b}, {c};", {"a": [1 + 2.0**-12], "b": [1 + 2.0**-12], "c": [-1.0]}, [2.0**-11 + 2.0**-24]),
    ("fma.rz.f32 {d}, {a}, {b}, {c};", {"a": [1.0], "b": [1.0], "c": [2.0**-60]}, [1.0]),
    ("div.rn.f32 {d}, {a}, {b};", {"a": [1.0], "b": [3.0]}, [float(np.float32(1) / np.float32(3))]),
    ("div.rz.f32 {d}, {a}, {b};", {"a": [2.0], "b": [3.0]}, [float(np.nextafter(np.float32(2 / 3), np.float32(0)))]),
    ("sqrt.rn.f32 {d}, {a};", {"a": [2.0]}, [float(np.sqrt(np.float32(2)))]),
    ("rcp.rn.f32 {d}, {a};", {"a": [3.0]}, [float(np.float32(1) / np.float32(3))]),
    ("add.sat.f32 {d}, {a}, {b};", {"a": [0.75, -2.0, 0.25], "b": [0.75, 1.0, 0.25]}, [1.0, 0.0, 0.5]),
    ("ex2.approx.ftz.f32 {d}, {a};", {"a": [3.0, -126.0, -127.0, -200.0]}, [8.0, 2.0**-126, 0.0, 0.0]),
    ("ex2.approx.f32 {d}, {a};", {"a": [-127.0, float("-inf"), 128.0]}, [2.0**-127, 0.0, float("inf")]),
    ("ex2.approx.ftz.f32 {d}, {a};", {"a": bits([0x00000001])}, [1.0]),  # T44: subnormal input
    ("lg2.approx.f32 {d}, {a};", {"a": [8.0, 0.0]}, [3.0, float("-inf")]),
    ("rsqrt.approx.f32 {d}, {a};", {"a": [4.0]}, [0.5]),
    ("max.f32 {d}, {a}, {b};", {"a": [float("nan"), -0.0], "b": [1.0, 0.0]}, [1.0, 0.0]),  # T44
    ("min.f32 {d}, {a}, {b}, {c};", {"a": [3.0], "b": [2.0], "c": [float("nan")]}, [2.0]),
    ("neg.f32 {d}, {a};", {"a": [1.5]}, [-1.5]),
    ("copysign.f32 {d}, {a}, {b};", {"a": [-1.0], "b": [3.0]}, [-3.0]),
]


@pytest.mark.parametrize(("instruction", "operands", "expected"), FLOAT_TABLE, ids=lambda v: str(v)[:40])
def test_f32_forms(instruction, operands, expected):
    assert evaluate(instruction, "f32", **{k: ("f32", v) for k, v in operands.items()}) == expected


def test_flush_to_zero_keeps_the_sign():
    """T44: results and inputs below the normal range become zero of the same sign."""
    small = bits([0x80200000])
    assert patterns(evaluate("mul.ftz.f32 {d}, {a}, {b};", "f32", a=("f32", small), b=("f32", [1.0]))) == [0x80000000]
    assert patterns(evaluate("mul.f32 {d}, {a}, {b};", "f32", a=("f32", small), b=("f32", [1.0]))) == [0x80200000]
    tiny = ("f32", bits([0x00000001]))
    assert patterns(evaluate("add.ftz.f32 {d}, {a}, {b};", "f32", a=tiny, b=("f32", [0.0]))) == [0]


def test_nan_rule_of_max():
    """T44: the number wins, unless .NaN."""
    operands = {"a": ("f32", [float("nan")]), "b": ("f32", [1.0])}
    assert evaluate("max.f32 {d}, {a}, {b};", "f32", **operands) == [1.0]
    assert patterns(evaluate("max.NaN.f32 {d}, {a}, {b};", "f32", **operands)) == [0x7FFFFFFF]


@pytest.mark.parametrize("cmp", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "num", "nan"])
def test_float_comparison_with_nan(cmp):
    got = evaluate(
        f"setp.{cmp}.f32 {{d}}, {{a}}, {{b}};", "pred", a=("f32", [float("nan"), 1.0]), b=("f32", [1.0, 1.0])
    )
    ordered = {"eq": 1, "ne": 0, "lt": 0, "le": 1, "gt": 0, "ge": 1, "equ": 1, "neu": 0, "ltu": 0, "num": 1, "nan": 0}
    assert got == [int(cmp in ("equ", "neu", "ltu", "nan")), ordered[cmp]]


def test_setp_with_two_results_and_a_predicate():
    operands = {"a": ("s32", [1, 5]), "b": ("s32", [3, 3]), "c": ("pred", [1, 1])}
    assert evaluate("setp.lt.s32 {d}|{e}, {a}, {b};", ("pred", "pred"), a=operands["a"], b=operands["b"]) == (
        [1, 0], [0, 1],
    )  # fmt: skip
    assert evaluate("setp.lt.and.s32 {d}, {a}, {b}, !{c};", "pred", **operands) == [0, 0]
    assert evaluate("setp.lt.or.s32 {d}|{e}, {a}, {b}, !{c};", ("pred", "pred"), **operands) == ([1, 0], [0, 1])


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=32))
def test_fma_is_rounded_once(rows):
    a, b, c = (list(column) for column in zip(*rows, strict=True))
    got = evaluate("fma.rn.f32 {d}, {a}, {b}, {c};", "f32", a=("f32", a), b=("f32", b), c=("f32", c))
    for x, y, z, result in zip(a, b, c, got, strict=True):
        assert result == nearest_f32(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)


def nearest_f32(value: Fraction) -> float:
    """Round an exact value to f32, nearest even, by looking at the neighbours of a first guess."""
    with np.errstate(over="ignore"):
        try:
            guess = np.float32(float(value))
        except OverflowError:
            guess = np.float32(np.inf) if value > 0 else np.float32(-np.inf)
    if abs(value) >= Fraction(2) ** 128 - Fraction(2) ** 103:
        return float("inf") if value > 0 else float("-inf")
    if np.isinf(guess):
        guess = np.nextafter(guess, np.float32(0))
    with np.errstate(over="ignore"):
        near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    near = [n for n in near if np.isfinite(n)]
    return float(min(near, key=lambda n: (abs(Fraction(float(n)) - value), int(n.view(np.uint32)) & 1)))


def test_fma_where_rounding_twice_is_wrong():
    """The exact sum is just below the middle between two f32 neighbours; its float64 value is the middle."""
    a, b, c = 16 * (1 + 2.0**-23), 1 - 2.0**-23, 2.0**28 * (1 + 2.0**-23)
    assert float(np.float32(a * b + c)) != nearest_f32(Fraction(a) * Fraction(b) + Fraction(c))
    got = evaluate("fma.rn.f32 {d}, {a}, {b}, {c};", "f32", a=("f32", [a]), b=("f32", [b]), c=("f32", [c]))
    assert got == [nearest_f32(Fraction(a) * Fraction(b) + Fraction(c))]


def test_fma_into_its_own_addend():
    """The destination may be one of the sources, also where the exact path is taken."""
    a, b, c = 16 * (1 + 2.0**-23), 1 - 2.0**-23, 2.0**28 * (1 + 2.0**-23)
    operands = {"a": ("f32", [a]), "b": ("f32", [b]), "c": ("f32", [c])}
    got = evaluate("fma.rn.f32 {c}, {a}, {b}, {c}; mov.f32 {d}, {c};", "f32", **operands)
    assert got == [nearest_f32(Fraction(a) * Fraction(b) + Fraction(c))]


@pytest.mark.parametrize(("op", "function"), [("add", np.add), ("sub", np.subtract), ("mul", np.multiply)])
def test_packed_f32x2_treats_halves_alike(op, function):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 8, 2)).astype(np.float32)
    got = evaluate(
        f"{op}.rn.f32x2 {{d}}, {{a}}, {{b}};", "b64",
        a=("b64", a.view(np.uint64).ravel().tolist()), b=("b64", b.view(np.uint64).ravel().tolist()),
    )  # fmt: skip
    assert got == function(a, b).view(np.uint64).ravel().tolist()


def test_half_precision_arithmetic():
    def h(values):
        return "f16", patterns(values, "f2")

    assert bits(evaluate("add.f16 {d}, {a}, {b};", "f16", a=h([1.0]), b=h([2.0**-11])), "f2") == [1.0]
    assert bits(evaluate("add.f16 {d}, {a}, {b};", "f16", a=h([1 + 2.0**-10]), b=h([2.0**-11])), "f2") == [1 + 2.0**-9]
    fused = evaluate(
        "fma.rn.f16 {d}, {a}, {b}, {c};", "f16", a=h([1 + 2.0**-10]), b=h([1 + 2.0**-10]), c=h([-1 - 2.0**-9])
    )
    assert bits(fused, "f2") == [2.0**-20]
    assert evaluate("mul.bf16x2 {d}, {a}, {b};", "b32", a=("b32", [0x3F804000]), b=("b32", [0x40003F80])) == [
        0x40004000
    ]
    assert evaluate("neg.bf16x2 {d}, {a};", "b32", a=("b32", [0x3F80BF80])) == [0xBF803F80]
    assert evaluate("fma.rn.f32.bf16 {d}, {a}, {b}, {c};", "f32", a=("bf16", [0x3F80]), b=("bf16", [0x4040]),
                    c=("f32", [0.5])) == [3.5]  # fmt: skip
