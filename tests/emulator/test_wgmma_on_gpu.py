"""The same PTX and inputs on the emulator and on a Hopper GPU: what wgmma reads where, and how it rounds.

Shared memory is filled word by word from an image that the emulator's own layouts made, so that any difference in how
the hardware reads a descriptor shows as a wrong product.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from undertow import emulator as emu
from undertow.emulator.descriptors import SharedDescriptor, operand_index
from undertow.emulator.program import SHARED_BASE

from .wgmma_kernels import HEADER, a_registers, d_matrix, descriptor

SIZE = 48 * 1024
B_OFFSET = 16 * 1024
SWIZZLES = (0, 32, 64, 128)


def half_bits(values: np.ndarray, kind: str) -> np.ndarray:
    """Round to nearest even and return bit patterns."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Layout:
    """Where an operand lies: bytes from the beginning of shared memory, and as in SharedDescriptor."""

    mn_major: bool
    offset: int
    leading: int
    stride: int
    swizzle: int
    base_offset: int = 0

    @classmethod
    def dense(cls, mn_major: bool, offset: int, extent: int, swizzle: int, base_offset: int = 0) -> Layout:
        """Tiles one behind the other."""
        row = swizzle or 16
        if mn_major:
            leading, stride = (16 * row, 8 * row) if swizzle else (8 * row, 16 * row)
        else:
            leading, stride = 16 * extent, 8 * row
        return cls(mn_major, offset, leading, stride, swizzle, base_offset)

    @property
    def bits(self) -> int:
        """The descriptor, relative to the beginning of shared memory."""
        return descriptor(self.offset, self.leading, self.stride, self.swizzle, self.base_offset)

    def place(self, image: np.ndarray, values: np.ndarray) -> None:
        """Put an (extent, 16) matrix of bit patterns into an image of shared memory."""
        start = SHARED_BASE + self.offset
        fields = SharedDescriptor(start, self.leading, self.stride, self.swizzle, self.base_offset)
        image[operand_index(fields, self.mn_major, len(values)) - SHARED_BASE // 2] = values


@dataclass(frozen=True)
class Case:
    """steps times D (+)= A B; a: None for registers."""

    n: int
    kind: str
    a: Layout | None
    b: Layout
    steps: int = 1

    @property
    def text(self) -> str:
        """PTX; shared memory begins at a multiple of 1024 on both machines."""
        accumulator = "{" + ", ".join(f"%acc{i}" for i in range(self.n // 2)) + "}"
        a = "{%a0, %a1, %a2, %a3}, " if self.a is None else "%d1, "
        majors = ([] if self.a is None else [int(self.a.mn_major)]) + [int(self.b.mn_major)]
        mma = (
            f"wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.{self.kind}.{self.kind} {accumulator}, {a}%d2, %q1,"
            f" 1, 1, {', '.join(map(str, majors))};"
        )
        places = range(self.n // 2)
        return f"""{HEADER}
.extern .shared .align 1024 .b8 tiles[];
.visible .entry k(.param .u64 out, .param .u64 a, .param .u64 image)
{{
.reg .b64 %d<10>; .reg .b32 %r<8>, %t, %acc<{self.n // 2}>, %a<4>, %v<4>; .reg .pred %q<4>;
mov.u32 %t, %tid.x; ld.param.u64 %d0, [out]; ld.param.u64 %d5, [a]; ld.param.u64 %d6, [image];
cvta.to.global.u64 %d0, %d0; cvta.to.global.u64 %d5, %d5; cvta.to.global.u64 %d6, %d6;
mul.wide.u32 %d3, %t, {2 * self.n}; add.s64 %d3, %d3, %d0; mul.wide.u32 %d4, %t, 16; add.s64 %d4, %d4, %d5;
mov.u32 %r1, tiles; shl.b32 %r2, %t, 4; add.u32 %r3, %r1, %r2; cvt.u64.u32 %d7, %r2; add.s64 %d7, %d7, %d6;
mov.u32 %r4, 0;
COPY: ld.global.v4.u32 {{%v0, %v1, %v2, %v3}}, [%d7]; st.shared.v4.u32 [%r3], {{%v0, %v1, %v2, %v3}};
add.s64 %d7, %d7, 2048; add.u32 %r3, %r3, 2048; add.u32 %r4, %r4, 2048; setp.lt.u32 %q2, %r4, {SIZE}; @%q2 bra COPY;
fence.proxy.async.shared::cta; bar.sync 0;
ld.global.v4.u32 {{%a0, %a1, %a2, %a3}}, [%d4]; {"".join(f"mov.b32 %acc{i}, 0;" for i in places)}
shr.u32 %r5, %r1, 4; cvt.u64.u32 %d8, %r5; add.s64 %d1, %d8, {self.a.bits if self.a else 0};
add.s64 %d2, %d8, {self.b.bits}; setp.ne.u32 %q1, 0, 0;
wgmma.fence.sync.aligned; {mma} setp.eq.u32 %q1, 0, 0; {mma * (self.steps - 1)}
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
{"".join(f"st.global.u32 [%d3+{4 * i}], %acc{i};" for i in places)}
ret;
}}"""

    def inputs(self, draw) -> tuple[np.ndarray, np.ndarray]:
        """A's registers and the image of shared memory; draw: shape -> values."""
        a, b = draw((64, 16)), draw((self.n, 16))
        image = np.zeros(SIZE // 2, np.uint16)
        if self.a is not None:
            self.a.place(image, half_bits(a, self.kind))
        self.b.place(image, half_bits(b, self.kind))
        low = half_bits(a, self.kind)
        exact = low.view(np.float16) if self.kind == "f16" else (low.astype(np.uint32) << 16).view(np.float32)
        return a_registers(exact, self.kind), image


def majors() -> list[Case]:
    """Both types, every swizzle, A in registers or along K or M, B along K or N."""
    cases = []
    for kind, swizzle, a, b in itertools.product(("bf16", "f16"), SWIZZLES, (None, False, True), (False, True)):
        left = None if a is None else Layout.dense(a, 0, 64, swizzle)
        cases.append(Case(64, kind, left, Layout.dense(b, B_OFFSET, 64, swizzle)))
    return cases


def widths() -> list[Case]:
    """Every N, and wide operands that are contiguous along N."""
    narrow = [
        Case(n, "bf16", Layout.dense(False, 0, 64, 128), Layout.dense(False, B_OFFSET, n, 128))
        for n in range(8, 257, 8)
    ]
    return narrow + [
        Case(n, "bf16", None, Layout.dense(True, B_OFFSET, n, swizzle))
        for swizzle, n in itertools.product((32, 64, 128), (128, 192, 256))
    ]


def starts() -> list[Case]:
    """Tiles that begin within the pattern of the swizzle, by absolute addresses or by a base offset; free strides."""
    cases = []
    for swizzle, rows, base, mn in itertools.product((128, 64, 32), (1, 2, 3, 5), (False, True), (False, True)):
        if mn and not base:
            continue
        shift, offset = 128 * rows, rows if base else 0
        a = Layout.dense(mn, shift, 64, swizzle, offset)
        cases.append(Case(64, "bf16", a, Layout.dense(mn, B_OFFSET + shift, 64, swizzle, offset)))
    free = [
        (Layout(False, 0, 2048, 144, 0), Layout(False, B_OFFSET, 4096, 160, 0)),
        (Layout(True, 0, 128, 256, 0), Layout(True, B_OFFSET, 4096, 160, 0)),
        (Layout(False, 0, 16, 2048, 128), Layout(False, B_OFFSET, 4096, 2048, 128)),
        (Layout(True, 0, 4096, 1024, 128), Layout(True, B_OFFSET, 4096, 2048, 128)),
    ]
    return cases + [Case(64, "bf16", a, b) for a, b in free]


def emulated(case: Case, registers: np.ndarray, image: np.ndarray) -> np.ndarray:
    out = np.zeros((128, case.n // 2), np.float32)
    params = [emu.Pointer(array) for array in (out, registers, image)]
    emu.launch(case.text, emu.Launch(grid=(1,), block=(128,), params=params, dynamic_smem=SIZE))
    return d_matrix(out)


def on_gpu(case: Case, registers: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Run the PTX through the driver on the device of torch, which must be a Hopper GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma needs a GPU of compute capability 9.0")
    driver = pytest.importorskip("cuda.bindings.driver")
    torch.zeros(1, device="cuda")
    error, module = driver.cuModuleLoadData(case.text.encode() + b"\0")
    assert int(error) == 0, error
    error, function = driver.cuModuleGetFunction(module, b"k")
    assert int(error) == 0, error
    out = torch.zeros(128, case.n // 2, device="cuda")
    arrays = [out, *(torch.from_numpy(array.view(np.uint8).copy()).cuda() for array in (registers, image))]
    values = tuple(array.data_ptr() for array in arrays), (ctypes.c_void_p,) * 3
    stream = torch.cuda.current_stream().cuda_stream
    (error,) = driver.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, SIZE, stream, values, 0)
    assert int(error) == 0, error
    torch.cuda.synchronize()
    return d_matrix(out.cpu().numpy())


@pytest.mark.parametrize("make", [majors, widths, starts])
def test_emulated_products_are_exact(make):
    """The cases themselves: with small integers the emulator gives A B."""
    rng = np.random.default_rng(1)
    for case in make():
        drawn = []
        registers, image = case.inputs(lambda shape, drawn=drawn: drawn.append(rng.integers(-8, 9, shape)) or drawn[-1])
        expected = (drawn[0] @ drawn[1].T).astype(np.float32)
        np.testing.assert_array_equal(emulated(case, registers, image), expected, str(case))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [majors, widths, starts])
def test_a_gpu_reads_the_same_elements(make):
    rng = np.random.default_rng(2)
    for case in make():
        given = case.inputs(lambda shape: rng.integers(-8, 9, shape))
        np.testing.assert_array_equal(on_gpu(case, *given), emulated(case, *given), str(case))


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_a_gpu_rounds_to_within_a_millionth(steps):
    case = Case(128, "bf16", Layout.dense(False, 0, 64, 128), Layout.dense(False, B_OFFSET, 128, 128), steps)
    given = case.inputs(np.random.default_rng(3).standard_normal)
    expected = emulated(case, *given).astype(np.float64)
    difference = np.linalg.norm(on_gpu(case, *given) - expected) / np.linalg.norm(expected)
    assert difference < 1e-6
