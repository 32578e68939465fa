"""Tensor copies: swizzles by absolute address, bounds, fills and reductions."""

from __future__ import annotations

import numpy as np
import pytest

from undertow import emulator as emu
from undertow.emulator.descriptors import swizzle_address

from .kernels import HEADER

TENSOR_LOAD = """
.visible .entry k(.param .u64 p0, .param .align 64 .b8 map[128], .param .align 64 .b8 store[128], .param .s32 x,
                  .param .s32 y, .param .u32 offset)
{
.reg .b64 %d<8>; .reg .b32 %r<32>; .reg .pred %q<4>;
ld.param.u64 %d0, [p0]; ld.param.s32 %r1, [x]; ld.param.s32 %r2, [y]; ld.param.u32 %r3, [offset];
mov.u32 %r4, tile; add.u32 %r4, %r4, %r3;
mbarrier.init.shared.b64 [bar], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [bar], BYTES;
mov.b64 %d1, map; cvta.param.u64 %d1, %d1;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r4], [%d1, {%r1, %r2}], [bar];
{ .reg .pred P1; W: mbarrier.try_wait.parity.shared.b64 P1, [bar], 0; @P1 bra D; bra W; D: }
mov.u32 %r5, 0;
COPY: add.u32 %r6, %r4, %r5; ld.shared.u32 %r7, [%r6]; cvt.u64.u32 %d2, %r5; add.s64 %d3, %d0, %d2;
st.global.u32 [%d3], %r7; add.u32 %r5, %r5, 4; setp.lt.u32 %q1, %r5, BYTES; @%q1 bra COPY;
mov.b64 %d4, store; cvta.param.u64 %d4, %d4;
STORE.global.shared::cta.tile.bulk_group [%d4, {%r1, %r2}], [%r4];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
ret;
}
"""


def tensor_round_trip(swizzle, corner=(0, 0), offset=0, **box_and_kind):
    """Load a box of a 100x40 tensor of u16, dump shared memory linearly, and store the box to another tensor.

    box_and_kind: box (inner, outer), dtype, fill_nan, reduce (the store adds instead of overwriting).
    """
    options = {"box": (64, 16), "dtype": "u16", "fill_nan": False, "reduce": False, **box_and_kind}
    box, dtype, reduce = options["box"], options["dtype"], options["reduce"]
    source = np.arange(104 * 40, dtype=np.uint16).reshape(40, 104) + 1
    target = np.zeros_like(source)
    num_bytes = box[0] * box[1] * 2
    dump = np.zeros(num_bytes // 2, np.uint16)
    store = "cp.reduce.async.bulk.tensor.2d" if reduce else "cp.async.bulk.tensor.2d"
    text = (HEADER + ".shared .align 8 .b64 bar;\n.shared .align 1024 .b8 tile[8192];\n" + TENSOR_LOAD).replace(
        "BYTES", str(num_bytes)
    ).replace("STORE.global.shared::cta", store + ".global.shared::cta" + (".add" if reduce else ""))  # fmt: skip

    def tensor_map(a):
        return emu.TensorMap(a, dtype, (100, 40), (208,), box, swizzle, options["fill_nan"])

    params = [emu.Pointer(dump), tensor_map(source), tensor_map(target), *corner, offset]
    emu.launch(text, emu.Launch(grid=(1,), block=(1,), params=params), emu.Options(completion="late"))
    return source, target, dump.reshape(box[1], box[0])


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("offset", [0, 128])
def test_tensor_copy_swizzles_by_absolute_address(swizzle, offset):
    """T32: at a base that is off by 128 bytes the pattern differs from the one at 1024."""
    box = {0: (64, 16), 32: (16, 16), 64: (32, 16), 128: (64, 16)}[swizzle]
    source, target, dump = tensor_round_trip(swizzle, offset=offset, box=box)
    base = 2048 + offset
    linear = base + 2 * np.arange(box[0] * box[1])
    where = (swizzle_address(linear, swizzle) - base) // 2
    assert sorted(where.tolist()) == list(range(box[0] * box[1]))
    assert (dump.ravel()[where] == source[: box[1], : box[0]].ravel()).all()
    by_offset = swizzle_address(linear - base, swizzle) // 2
    assert (by_offset == where).all() == (offset == 0 or swizzle == 0)
    if swizzle == 128 and offset:
        assert (by_offset != where).all()
    assert (target[: box[1], : box[0]] == source[: box[1], : box[0]]).all()
    assert not target[box[1] :].any() and not target[:, box[0] :].any()


def test_swizzle_formula():
    """T32: chunk index XOR (address >> 7) & 7, on the absolute address; every chunk differs between the two rules."""
    for row in range(1, 8):
        for chunk in range(8):
            address = 1024 + 128 * row + 16 * chunk
            assert swizzle_address(address, 128) == 1024 + 128 * row + 16 * (chunk ^ row)
            shifted = address + 128
            assert swizzle_address(shifted, 128) != swizzle_address(address, 128) + 128
    assert swizzle_address(1024 + 256 + 16, 64) == 1024 + 256 + 48
    assert swizzle_address(1024 + 512 + 16, 64) == 1024 + 512 + 16
    assert swizzle_address(1024 + 128, 32) == 1024 + 128 + 16
    assert swizzle_address(1024 + 256, 32) == 1024 + 256


@pytest.mark.parametrize(("x", "y"), [(-8, -4), (64, 32), (90, 38), (200, 0)])
def test_out_of_bounds_elements_are_zero_and_never_written(x, y):
    source, target, dump = tensor_round_trip(0, (x, y))
    padded = np.zeros((40 + 64, 100 + 300), np.uint16)
    padded[16:56, 100:200] = source[:, :100]
    assert (dump == padded[16 + y : 32 + y, 100 + x : 164 + x]).all()
    expected = np.zeros_like(source)
    low_x, low_y = max(x, 0), max(y, 0)
    expected[low_y : max(y + 16, 0), low_x : max(min(x + 64, 100), 0)] = source[
        low_y : max(y + 16, 0), low_x : max(min(x + 64, 100), 0)
    ]
    assert (target == expected).all()


def test_nan_fill_and_reducing_store():
    _, _, dump = tensor_round_trip(0, (96, 0), dtype="f16", fill_nan=True)
    assert (dump[:, 4:] == 0x7FFF).all() and (dump[:, :4] != 0x7FFF).all()
    text_source, target, _ = tensor_round_trip(64, box=(32, 8), dtype="f16", reduce=True)
    assert (target[:8, :32] == text_source[:8, :32]).all()


def test_a_map_larger_than_its_buffer_is_a_fault():
    text = (
        HEADER
        + """
    .shared .align 8 .b64 bar; .shared .align 128 .b8 tile[4096];
    .visible .entry k(.param .align 64 .b8 map[128]) { .reg .b64 %d;
    mbarrier.init.shared.b64 [bar], 1; mov.b64 %d, map;
    cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%d, {0, 8}], [bar]; ret; }"""
    )
    array = np.zeros((16, 64), np.uint16)
    description = emu.Launch(
        grid=(1,), block=(1,), params=[emu.TensorMap(array, "u16", (64, 32), (128,), (64, 16), name="K")]
    )
    with pytest.raises(emu.MemoryFault, match=r"leaves buffer K .* dims or strides do not fit"):
        emu.launch(text, description)
