"""Tensor core: descriptors, operand layouts against tensor copies, TMEM rules, commit."""

from __future__ import annotations

import numpy as np
import pytest

from undertow import emulator as emu
from undertow.emulator.descriptors import (
    SharedDescriptor,
    decode_instruction_descriptor,
    decode_shared_descriptor,
    operand_index,
)

from .kernels import HEADER, kernel, run

WAIT = "{{ .reg .pred P1; W: mbarrier.try_wait.parity.shared.b64 P1, [{}], 0; @P1 bra D; bra W; D: }}"
LAYOUT_FIELD = {0: 0, 128: 2, 64: 4, 32: 6}


def instruction_descriptor(m: int, n: int, a: int = 1, b: int = 1, **bits: int) -> int:
    """Build an instruction descriptor; bits: positions by name."""
    where = {"d": 4, "negate_a": 13, "negate_b": 14, "a_mn": 15, "b_mn": 16, "sparse": 2, "saturate": 3}
    value = a << 7 | b << 10 | (n >> 3) << 17 | (m >> 4) << 24 | 1 << 4
    for name, bit in bits.items():
        value ^= bit << where[name]
    return value


def shared_descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    """Build a tcgen05 shared-memory descriptor from byte quantities."""
    fields = (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46
    return fields | LAYOUT_FIELD[swizzle] << 61


def as_bits(values: np.ndarray, kind: str) -> np.ndarray:
    """Round to f16 or bf16 and return bit patterns (values are small integers: exact)."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Operand:
    """A matrix operand (extent x 16) copied to shared memory box by box, as real kernels do it.

    mn_major: global memory holds it as (16, extent), else as (extent, 16).
    """

    def __init__(self, values: np.ndarray, kind: str, swizzle: int, mn_major: bool, base: int):
        extent = values.shape[0]
        row = swizzle or 16
        per_row = row // 2
        self.array = np.ascontiguousarray(as_bits(values.T if mn_major else values, kind))
        if mn_major:
            inner, outer, box = extent, 16, (min(per_row, extent), 16)
            self.boxes = [((m, 0), base + m // per_row * 16 * row) for m in range(0, extent, per_row)]
            leading, stride = (16 * row, 8 * row) if swizzle else (8 * row, 16 * row)
        else:
            inner, outer, box = 16, extent, (min(per_row, 16), extent)
            self.boxes = [((k, 0), base + k // 8 * extent * 16) for k in range(0, 16, box[0])]
            leading, stride = extent * 16, 8 * row
            if swizzle > 32:
                padded = np.zeros((extent, per_row), np.uint16)
                padded[:, :16] = self.array
                self.array, inner, box = padded, per_row, (per_row, extent)
                self.boxes = [((0, 0), base)]
        self.map = emu.TensorMap(self.array, kind, (inner, outer), (inner * 2,), box, swizzle)
        self.num_bytes = box[0] * box[1] * 2 * len(self.boxes)
        self.descriptor = shared_descriptor(base, leading, stride, swizzle)

    def copies(self, name: str) -> str:
        """PTX that loads every box."""
        return f"mov.b64 %d9, {name}; cvta.param.u64 %d9, %d9;" + "".join(
            f"mov.b32 %r9, {where}; cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
            f" [%r9], [%d9, {{{x}, {y}}}], [bar];"
            for (x, y), where in self.boxes
        )


def multiply(a: Operand, b: Operand, idesc: int, n: int, mmas: str | None = None, **launch) -> np.ndarray:
    """Load both operands, run the MMAs, and return the (128, n) accumulator as float32."""
    out = np.zeros((128, n), np.float32)
    registers = ", ".join(f"%r{20 + i}" for i in range(n))
    stores = "".join(f"st.global.u32 [%d3+{4 * i}], %r{20 + i};" for i in range(n))
    mmas = mmas or "setp.ne.u32 %q1, 0, 0; tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r3, %q1;"
    text = (
        HEADER
        + f"""
    .shared .align 8 .b64 bar; .shared .align 8 .b64 done; .shared .align 4 .u32 address;
    .extern .shared .align 1024 .b8 tiles[];
    .visible .entry k(.param .u64 p0, .param .align 64 .b8 amap[128], .param .align 64 .b8 bmap[128])
    {{
    .reg .b64 %d<10>; .reg .b32 %r<{24 + n}>; .reg .pred %q<4>; .reg .b32 %t;
    mov.u32 %t, %tid.x; ld.param.u64 %d0, [p0];
    setp.ge.u32 %q3, %t, 32; @%q3 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [address], 512;
    ALLOCATED: setp.ne.u32 %q2, %t, 0;
    @%q2 bra READY;
    mbarrier.init.shared.b64 [bar], 1; mbarrier.init.shared.b64 [done], 1;
    READY: bar.sync 0; ld.shared.u32 %r2, [address];
    @%q2 bra MULTIPLIED;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], {a.num_bytes + b.num_bytes};
    {a.copies("amap")} {b.copies("bmap")}
    {WAIT.format("bar")}
    mov.b64 %d1, {a.descriptor}; mov.b64 %d2, {b.descriptor}; mov.b32 %r3, {idesc};
    {mmas}
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];
    MULTIPLIED: {WAIT.format("done")}
    tcgen05.fence::after_thread_sync;
    and.b32 %r4, %t, 96; shl.b32 %r4, %r4, 16; add.u32 %r4, %r4, %r2;
    tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {{{registers}}}, [%r4];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %d3, %t, {4 * n}; add.s64 %d3, %d3, %d0; {stores}
    bar.sync 0;
    @%q3 bra END;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512;
    END: ret;
    }}"""
    )
    params = [emu.Pointer(out), a.map, b.map]
    description = emu.Launch(grid=(1,), block=(128,), params=params, dynamic_smem=65536)
    emu.launch(text, description, **launch)
    return out


def operands(m: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two matrices of small integers, so that every product and sum is exact."""
    rng = np.random.default_rng(seed)
    return rng.integers(-8, 9, (m, 16)).astype(np.float64), rng.integers(-8, 9, (n, 16)).astype(np.float64)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_operand_layouts_agree_with_tensor_copies(kind, swizzle, a_mn, b_mn):
    x, y = operands(128, 64)
    a = Operand(x, kind, swizzle, bool(a_mn), 2048)
    b = Operand(y, kind, swizzle, bool(b_mn), 2048 + 32768)
    code = int(kind == "bf16")
    got = multiply(a, b, instruction_descriptor(128, 64, code, code, a_mn=a_mn, b_mn=b_mn), 64)
    assert (got == x @ y.T).all()


def test_a_flipped_major_bit_is_visible():
    x, y = operands(128, 64)
    a, b = Operand(x, "bf16", 128, False, 2048), Operand(y, "bf16", 128, False, 34816)
    got = multiply(a, b, instruction_descriptor(128, 64, b_mn=1), 64)
    assert not np.array_equal(got, x @ y.T)


@pytest.mark.parametrize("completion", ["eager", "late", ("seeded", 4)])
def test_accumulation_negation_and_order(completion):
    x, y = operands(128, 32)
    a, b = Operand(x, "bf16", 128, False, 2048), Operand(y, "bf16", 128, False, 34816)
    mmas = """
    setp.ne.u32 %q1, 0, 0;
    mov.b32 %r9, 0;
    tcgen05.mma.cta_group::1.kind::f16.collector::a::discard [%r2], %d1, %d2, %r3, {%r9, %r9, %r9, %r9}, %q1;
    tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r3, 1;
    xor.b32 %r3, %r3, 8192;
    tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r3, 1;
    tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r3, 1;
    tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r3, 1;
    """
    got = multiply(a, b, instruction_descriptor(128, 32), 32, mmas, options=emu.Options(completion=completion))
    assert (got == -(x @ y.T)).all()


def test_accumulating_into_unwritten_columns_gives_nan():
    x, y = operands(128, 32)
    a, b = Operand(x, "bf16", 128, False, 2048), Operand(y, "bf16", 128, False, 34816)
    got = multiply(
        a, b, instruction_descriptor(128, 32), 32, "tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r3, 1;"
    )
    assert np.isnan(got).all()


def test_m64_uses_the_first_sixteen_rows_of_each_quarter():
    x, y = operands(64, 16)
    a, b = Operand(x, "bf16", 128, False, 2048), Operand(y, "bf16", 128, False, 34816)
    got = multiply(a, b, instruction_descriptor(64, 16), 16).reshape(4, 32, 16)
    assert (got[:, :16].reshape(64, 16) == x @ y.T).all()
    assert np.isnan(got[:, 16:]).all()


def test_rounding_of_one_mma():
    """Products and sum exact, added to the accumulator, one rounding to f32."""
    x, y = np.zeros((128, 16)), np.zeros((16, 16))
    x[:, 0], x[:, 1], y[:, 0], y[:, 1] = 256.0, 2.0**-9, 256.0, 2.0**-9
    a, b = Operand(x, "bf16", 128, False, 2048), Operand(y, "bf16", 128, False, 34816)
    once = multiply(a, b, instruction_descriptor(128, 16), 16)
    assert (once == np.float32(65536 + 2.0**-18)).all() and once[0, 0] == 65536
    mmas = "tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r3, 0;" + 8 * (
        "tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r3, 1;"
    )
    assert multiply(a, b, instruction_descriptor(128, 16), 16, mmas)[0, 0] == 9 * 65536


TMEM = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 64; ld.shared.u32 %r1, [cell];"


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (TMEM + "bar.sync 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1+64];", emu.MemoryFault,
         r"tcgen05.ld of TMEM columns 64..64 outside live allocations: 0..63"),
        (TMEM + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;"
         "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];",
         emu.MemoryFault, "outside live allocations: none"),  # T16
        (TMEM + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;", emu.ProtocolError, "live: 0..63"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.b32 [cell], 48;", emu.ProtocolError, "alloc of 48 columns"),
        ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + TMEM, emu.ProtocolError, "after .*relinquish"),
        ("setp.lt.u32 %q1, %t, 3; @%q1 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];", emu.ProtocolError,
         "executed by part of a warp"),
    ],
)  # fmt: skip
def test_tmem_rules(body, error, message):
    with pytest.raises(error, match=message):
        run(kernel(body, 0, ".shared .align 4 .u32 cell;"))


def test_a_warp_may_touch_its_own_quarter_only():
    """T33."""
    body = f"""
    setp.ge.u32 %q1, %t, 32; @%q1 bra READY; {TMEM} READY: bar.sync 0; ld.shared.u32 %r1, [cell];
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r2}}, [%r1];
    """
    with pytest.raises(emu.MemoryFault, match="TMEM lane 0 by warp 1, which may use lanes 32 to 63 only"):
        run(kernel(body, 0, ".shared .align 4 .u32 cell;"), block=(64,))


def test_tmem_round_trip_and_allocation_that_waits():
    """Two warps want all columns: the second gets them when the first gives them back."""
    body = """
    mov.u32 %r9, cells; shr.u32 %r3, %t, 5; shl.b32 %r3, %r3, 2; add.u32 %r3, %r3, %r9;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 512;
    ld.shared.u32 %r1, [%r3]; and.b32 %r4, %t, 96; shl.b32 %r4, %r4, 16; add.u32 %r4, %r4, %r1;
    add.u32 %r5, %t, 1000; tcgen05.st.sync.aligned.32x32b.x2.b32 [%r4], {%t, %r5};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r4];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;
    add.u32 %r6, %r6, %r7; mul.wide.u32 %d0, %t, 4; add.s64 %d1, %p0, %d0; st.global.u32 [%d1], %r6;
    """
    for schedule in ("fixed", 1, 2):
        out = np.zeros(64, np.uint32)
        declarations = ".shared .align 4 .u32 cells[2];"
        run(kernel(body, 1, declarations), out, block=(64,), options=emu.Options(schedule=schedule))
        assert out.tolist() == [2 * t + 1000 for t in range(64)]


def test_commit_with_nothing_pending_arrives_at_once():
    """T36."""
    body = """
    setp.ne.u32 %q1, %t, 0; @%q1 bra END;
    mbarrier.init.shared.b64 [bar], 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
    LOOP: mbarrier.try_wait.parity.shared.b64 %q2, [bar], 0; @!%q2 bra LOOP;
    st.global.u32 [%p0], 1;
    END:
    """
    for completion in ("eager", "late"):
        out = np.zeros(1, np.uint32)
        run(kernel(body, 1, ".shared .align 8 .b64 bar;"), out, options=emu.Options(completion=completion))
        assert out[0] == 1


def test_instruction_descriptors_of_compiled_kernels():
    shape = decode_instruction_descriptor(0x8118490)
    assert (shape.m, shape.n, shape.a_mn_major, shape.b_mn_major, shape.a_format) == (128, 64, True, True, "bf16")
    assert (decode_instruction_descriptor(0x8200490).n, decode_instruction_descriptor(0x8110490).b_mn_major) == (
        128,
        True,
    )


@pytest.mark.parametrize(
    ("bits", "error", "message"),
    [
        (instruction_descriptor(128, 64, a=0, b=1), emu.ProtocolError, "A is f16 and B is bf16"),  # T35
        (instruction_descriptor(128, 64, a=1, b=0), emu.ProtocolError, "A is bf16 and B is f16"),
        (instruction_descriptor(128, 64, a=2, b=2), emu.ProtocolError, "format of A is 2"),
        (instruction_descriptor(128, 64, a=0, b=0, d=1), emu.UnsupportedPtx, "f16 accumulator"),
        (instruction_descriptor(128, 64, d=1), emu.ProtocolError, "bf16 operands with an f16 accumulator"),
        (instruction_descriptor(128, 64, d=3), emu.ProtocolError, "accumulator format 2"),
        (instruction_descriptor(128, 64, sparse=1), emu.UnsupportedPtx, "sparse"),
        (instruction_descriptor(128, 64, saturate=1), emu.ProtocolError, "bits \\[0:4\\)"),
        (instruction_descriptor(192, 64), emu.ProtocolError, "M is 192"),
        (instruction_descriptor(128, 24), emu.ProtocolError, "N is 24"),
        (instruction_descriptor(128, 0), emu.ProtocolError, "N is 0"),
        (instruction_descriptor(128, 264), emu.ProtocolError, "N is 264"),
        (instruction_descriptor(128, 64) | 1 << 23, emu.ProtocolError, "reserved bits"),
    ],
)
def test_bad_instruction_descriptors(bits, error, message):
    with pytest.raises(error, match=message):
        decode_instruction_descriptor(bits)


def test_every_pair_of_formats_is_judged():
    """T35 over all field values: only f16 x f16 and bf16 x bf16 (f32 accumulators) decode."""
    good = []
    for a in range(8):
        for b in range(8):
            try:
                decode_instruction_descriptor(instruction_descriptor(128, 64, a, b))
            except emu.EmulatorError:
                continue
            good.append((a, b))
    assert good == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("bits", "error", "message"),
    [
        (0, emu.ProtocolError, "version field .* is 0"),
        (shared_descriptor(1024, 0, 1024, 128) | 1 << 53, emu.ProtocolError, "reserved bits"),
        (shared_descriptor(1024, 0, 1024, 128) | 1 << 61, emu.ProtocolError, "layout field .* is 3"),
        (shared_descriptor(1024, 0, 1024, 0) | 1 << 61, emu.UnsupportedPtx, "32-byte atoms"),
        (shared_descriptor(1024, 0, 1024, 128) | 1 << 49, emu.UnsupportedPtx, "base offset 1"),
    ],
)
def test_bad_shared_descriptors(bits, error, message):
    with pytest.raises(error, match=message):
        decode_shared_descriptor(bits)


def test_shared_descriptor_fields():
    assert decode_shared_descriptor(0x4000404000010080) == SharedDescriptor(0x800, 16, 0x400, 128)
    index = operand_index(SharedDescriptor(1024, 16, 1024, 128), False, 16)
    assert index[0, 0] == 512 and index[1, 0] == (1024 + 128 + 16) // 2 and index[8, 0] == 1024
