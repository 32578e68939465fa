"""wgmma: fragments and operand layouts against their plain definition, groups, the warpgroup, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from undertow import emulator as emu
from undertow.emulator.descriptors import SharedDescriptor, decode_wgmma_descriptor, operand_index

from .kernels import run
from .wgmma_kernels import BASE, HEADER, Product, WgmmaOperand, a_registers, d_matrix, descriptor

B_BASE = BASE + 32768


def operands(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A (64 x 16) and B (n x 16) of small integers, so that every product and sum is exact."""
    rng = np.random.default_rng(seed)
    return rng.integers(-8, 9, (64, 16)).astype(np.float64), rng.integers(-8, 9, (n, 16)).astype(np.float64)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_operand_layouts_agree_with_tensor_copies(kind, swizzle, a_mn, b_mn):
    x, y = operands(64)
    a, b = WgmmaOperand(x, kind, swizzle, bool(a_mn), BASE), WgmmaOperand(y, kind, swizzle, bool(b_mn), B_BASE)
    np.testing.assert_array_equal(Product(a, b, 64, kind).run(), (x @ y.T).astype(np.float32))


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width(n):
    x, y = operands(n, n)
    b = WgmmaOperand(y, "bf16", 128, False, B_BASE)
    expected = (x @ y.T).astype(np.float32)
    np.testing.assert_array_equal(
        Product(WgmmaOperand(x, "bf16", 128, False, BASE), b, n).run(), expected, "A in shared memory"
    )
    np.testing.assert_array_equal(Product(a_registers(x, "bf16"), b, n).run(), expected, "A in registers")


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("n", [64, 128, 192, 256])
def test_wide_operands_that_are_contiguous_along_n(swizzle, n):
    x, y = operands(n, 3)
    b = WgmmaOperand(y, "bf16", swizzle, True, B_BASE)
    np.testing.assert_array_equal(Product(a_registers(x, "bf16"), b, n).run(), (x @ y.T).astype(np.float32))


@pytest.mark.parametrize("scales", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("keep", [False, True])
def test_scales_and_accumulation(scales, keep):
    x, y = operands(16, 4)
    start = np.random.default_rng(5).integers(-50, 50, (64, 16)).astype(np.float64)
    b = WgmmaOperand(y, "f16", 0, False, B_BASE)
    product = Product(a_registers(x, "f16"), b, 16, "f16", start, keep, scales)
    expected = scales[0] * scales[1] * (x @ y.T) + (start if keep else 0)
    np.testing.assert_array_equal(product.run(), expected.astype(np.float32))


def test_sixteen_products_are_added_exactly_and_rounded_once():
    """2^24 and fifteen ones: in float32 the ones would be lost one by one."""
    x, y = np.ones((64, 16)), np.ones((8, 16))
    x[:, 0] = y[:, 0] = 4096
    b = WgmmaOperand(y, "bf16", 0, False, B_BASE)
    start = np.full((64, 8), 0.5)
    result = Product(a_registers(x, "bf16"), b, 8, start=start, keep=True).run()
    assert (result == np.float32(2.0**24 + 15.5)).all() and float(result[0, 0]) == 2**24 + 16


def test_a_base_offset_begins_the_swizzle_elsewhere():
    plain = operand_index(SharedDescriptor(4096, 16, 1024, 128), False, 8)
    moved = operand_index(SharedDescriptor(4096 + 3 * 128, 16, 1024, 128, base_offset=3), False, 8)
    np.testing.assert_array_equal(moved, plain + 3 * 64)


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 48, 52, 61])
def test_reserved_bits_of_a_descriptor(bit):
    with pytest.raises(emu.ProtocolError, match="reserved bits"):
        decode_wgmma_descriptor(descriptor(BASE, 16, 1024, 128) | 1 << bit)


def test_an_operand_outside_of_shared_memory():
    x, y = operands(8)
    b = WgmmaOperand(y, "bf16", 128, False, B_BASE)
    b.descriptor = descriptor(0x30000, 16, 1024, 128)
    with pytest.raises(emu.MemoryFault, match="leaves shared memory"):
        Product(a_registers(x, "bf16"), b, 8).run()


def chain(product: Product, *steps: str) -> Product:
    """The product with these instructions in place of fence, MMA, commit and wait."""
    words = {
        "fence": "wgmma.fence.sync.aligned;", "mma": product.instruction, "commit": "wgmma.commit_group.sync.aligned;",
        "wait": "wgmma.wait_group.sync.aligned 0;", "keep": "setp.eq.u32 %q1, 0, 0;",
    }  # fmt: skip
    text = " ".join(words.get(step, step) for step in steps)
    return Product(product.a, product.b, product.n, product.kind, product.start, product.keep, product.scales, text)


def narrow(start: np.ndarray | None = None) -> tuple[Product, np.ndarray]:
    """A product of width 8 with A in registers, and its exact result."""
    x, y = operands(8, 6)
    return Product(a_registers(x, "bf16"), WgmmaOperand(y, "bf16", 128, False, B_BASE), 8, start=start), x @ y.T


@pytest.mark.parametrize("completion", ["eager", "late", ("seeded", 1)])
@pytest.mark.parametrize("schedule", ["fixed", 1, 2])
def test_results_are_there_after_the_wait_in_any_order(completion, schedule):
    product, expected = narrow()
    twice = chain(product, "fence", "mma", "keep", "mma", "commit", "mma", "commit", "wait")
    options = emu.Options(schedule=schedule, completion=completion)
    np.testing.assert_array_equal(twice.run(options=options), (3 * expected).astype(np.float32))


def test_without_the_wait_registers_are_old():
    """An accumulator is written, and A read, when the MMA completes: at the earliest when all four warps are there."""
    product, expected = narrow(np.zeros((64, 8)))
    early = chain(product, "fence", "mma", "commit", "bar.sync 0;")
    assert (early.run(options=emu.Options(completion="eager")) == expected).all()
    assert (early.run(options=emu.Options(completion="late")) == 0).all()
    overwritten = chain(product, "fence", "mma", "commit", "bar.sync 0;", "mov.b32 %a0, 0;", "wait")
    assert (overwritten.run(options=emu.Options(completion="eager")) == expected).all()
    assert not (overwritten.run(options=emu.Options(completion="late")) == expected).all()


def test_a_wait_may_leave_the_latest_groups_open():
    product, expected = narrow(np.zeros((64, 8)))
    steps = ("fence", "mma", "commit", "keep", "mma", "commit", "wgmma.wait_group.sync.aligned 1;")
    result = chain(product, *steps).run(options=emu.Options(completion="late"))
    np.testing.assert_array_equal(result, expected.astype(np.float32))


def test_a_group_that_was_not_committed_is_not_waited_for():
    product, _ = narrow(np.zeros((64, 8)))
    assert (
        chain(product, "fence", "mma", "wait", "bar.sync 0;").run(options=emu.Options(completion="late")) == 0
    ).all()


def test_warps_of_a_warpgroup_that_multiply_differently():
    product, _ = narrow()
    other = chain(product, "shr.u32 %r0, %t, 5; setp.eq.u32 %q1, %r0, 3;", "fence", "mma", "commit", "wait")
    with pytest.raises(emu.ProtocolError, match="warp 3 differs from the warps before it") as caught:
        other.run()
    assert caught.value.rule == "partial-warpgroup"


SKIP = "setp.ge.u32 %q3, %t, 96; @%q3 bra BEHIND;"


def test_a_warp_that_does_not_multiply():
    product, _ = narrow()
    with pytest.raises(emu.ProtocolError, match=r"never executed by warps \[3\] of warpgroup 0") as caught:
        chain(product, SKIP, "fence", "mma", "commit", "BEHIND:").run()
    assert caught.value.rule == "partial-warpgroup"


def test_waiting_for_a_warp_that_does_not_multiply_is_a_deadlock():
    product, _ = narrow()
    with pytest.raises(emu.Deadlock, match="3 of 4 warps have issued the next MMA"):
        chain(product, SKIP, "fence", "mma", "commit", "wait", "BEHIND:").run()


def test_part_of_a_warp_and_part_of_a_warpgroup():
    product, _ = narrow()
    with pytest.raises(emu.ProtocolError, match="executed by part of a warp"):
        chain(product, "setp.ge.u32 %q3, %t, 16; @%q3 bra BEHIND;", "fence", "BEHIND:").run()
    text = HEADER + ".visible .entry k() { wgmma.fence.sync.aligned; ret; }"
    with pytest.raises(emu.ProtocolError, match="fewer than four warps"):
        run(text, block=(64,))


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        (".f32.bf16.bf16", ".f16.f16.f16", "no semantics"),
        (".f32.bf16.bf16", ".f32.bf16.f16", "no semantics"),
        ("m64n8k16.f32.bf16.bf16", "m64n8k32.f32.e4m3.e4m3", "no semantics"),
        ("m64n8k16", "m64n16k16", "4 registers for D; the shape has 8"),
        ("%q1, 1, 1", "%q1, 2, 1", "scale_a 2; allowed are the literals"),
    ],
)
def test_forms_without_semantics_are_refused_by_name(old, new, fact):
    product, _ = narrow()
    text = product.instruction.replace(old, new)
    assert text != product.instruction
    with pytest.raises(emu.UnsupportedPtx, match=fact):
        chain(product, "fence", text, "commit", "wait").run()


def test_the_figure_of_d_is_a_bijection():
    numbers = d_matrix(np.arange(128 * 12).reshape(128, 12))
    assert sorted(numbers.ravel().tolist()) == list(range(128 * 12))
