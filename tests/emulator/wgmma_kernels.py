"""Kernels of one warpgroup that multiplies once: operands by tensor copies or from registers, D as registers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from undertow import emulator as emu
from undertow.emulator.descriptors import decode_shared_descriptor

from .test_tcgen05 import WAIT, Operand, as_bits

HEADER = ".version 8.0\n.target sm_90a\n.address_size 64\n"
LAYOUT = {0: 0, 128: 1, 64: 2, 32: 3}
BASE = 2048


def descriptor(start: int, leading: int, stride: int, swizzle: int, base_offset: int = 0) -> int:
    """A wgmma shared-memory descriptor from byte quantities."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base_offset << 49 | LAYOUT[swizzle] << 62


class WgmmaOperand(Operand):
    """An (extent x 16) operand in shared memory, with the descriptor of wgmma."""

    def __init__(self, values: np.ndarray, kind: str, swizzle: int, mn_major: bool, base: int):
        super().__init__(values, kind, swizzle, mn_major, base)
        fields = decode_shared_descriptor(self.descriptor)
        self.descriptor = descriptor(fields.start, fields.leading, fields.stride, swizzle)
        self.mn_major = mn_major


def a_registers(values: np.ndarray, kind: str) -> np.ndarray:
    """A (64 x 16) as the four registers of each of 128 threads: array (128, 4) of uint32, by the manual's figure."""
    bits = as_bits(values, kind).astype(np.uint32)
    out = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for i in range(4):
            r, c = row + i % 2 * 8, column + i // 2 * 8
            out[thread, i] = bits[r, c] | bits[r, c + 1] << 16
    return out


def d_matrix(registers: np.ndarray) -> np.ndarray:
    """The registers (128, N / 2) of D as the matrix (64, N), by the manual's figure."""
    out = np.zeros((64, 2 * registers.shape[1]), registers.dtype)
    for thread in range(128):
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for i in range(registers.shape[1]):
            out[row + i // 2 % 2 * 8, column + i // 4 * 8 + i % 2] = registers[thread, i]
    return out


def d_registers(matrix: np.ndarray) -> np.ndarray:
    """The inverse of `d_matrix`."""
    numbers = d_matrix(np.arange(128 * matrix.shape[1] // 2).reshape(128, -1))
    out = np.empty(matrix.size, matrix.dtype)
    out[numbers.ravel()] = matrix.ravel()
    return out.reshape(128, -1)


@dataclass(frozen=True)
class Product:
    """What to multiply: A as a WgmmaOperand or as registers (128, 4), B, and the instruction's literals.

    start: what D holds before (64 x N); keep: scale-d. mma: PTX in place of the fence, the MMA, commit and wait.
    """

    a: WgmmaOperand | np.ndarray
    b: WgmmaOperand
    n: int
    kind: str = "bf16"
    start: np.ndarray | None = None
    keep: bool = False
    scales: tuple[int, int] = (1, 1)
    mma: str = ""

    @property
    def accumulator(self) -> str:
        """D in braces."""
        return "{" + ", ".join(f"%acc{i}" for i in range(self.n // 2)) + "}"

    @property
    def instruction(self) -> str:
        """The wgmma.mma_async."""
        if isinstance(self.a, WgmmaOperand):
            a, transposes = "%d1", f"{int(self.a.mn_major)}, {int(self.b.mn_major)}"
        else:
            a, transposes = "{%a0, %a1, %a2, %a3}", f"{int(self.b.mn_major)}"
        return (
            f"wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.{self.kind}.{self.kind} {self.accumulator}, {a}, %d2,"
            f" %q1, {self.scales[0]}, {self.scales[1]}, {transposes};"
        )

    @property
    def text(self) -> str:
        """PTX of the kernel."""
        copies, num_bytes = self.b.copies("bmap"), self.b.num_bytes
        if isinstance(self.a, WgmmaOperand):
            copies, num_bytes = copies + self.a.copies("amap"), num_bytes + self.a.num_bytes
            load, a_bits = "", self.a.descriptor
        else:
            load, a_bits = "ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%d4];", 0
        places = range(self.n // 2)
        mma = self.mma or (
            f"wgmma.fence.sync.aligned; {self.instruction} wgmma.commit_group.sync.aligned;"
            " wgmma.wait_group.sync.aligned 0;"
        )
        return (
            HEADER
            + f"""
    .shared .align 8 .b64 bar; .extern .shared .align 1024 .b8 tiles[];
    .visible .entry k(.param .u64 out, .param .u64 a, .param .align 64 .b8 amap[128], .param .align 64 .b8 bmap[128])
    {{
    .reg .b64 %d<10>; .reg .b32 %r<24>; .reg .pred %q<4>; .reg .b32 %t; .reg .b32 %acc<{self.n // 2}>, %a<4>;
    mov.u32 %t, %tid.x; ld.param.u64 %d0, [out]; ld.param.u64 %d5, [a];
    mul.wide.u32 %d3, %t, {2 * self.n}; add.s64 %d3, %d3, %d0; mul.wide.u32 %d4, %t, 16; add.s64 %d4, %d4, %d5;
    setp.ne.u32 %q2, %t, 0;
    @%q2 bra READY;
    mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    READY: bar.sync 0;
    @%q2 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], {num_bytes};
    {copies}
    LOADED: {WAIT.format("bar")}
    {"".join(f"ld.global.u32 %acc{i}, [%d3+{4 * i}];" for i in places)} {load}
    mov.b64 %d1, {a_bits}; mov.b64 %d2, {self.b.descriptor}; setp.ne.u32 %q1, {int(self.keep)}, 0;
    {mma}
    {"".join(f"st.global.u32 [%d3+{4 * i}], %acc{i};" for i in places)}
    ret;
    }}"""
        )

    def run(self, **launch) -> np.ndarray:
        """D as float32 (64 x N)."""
        start = np.full((64, self.n), np.nan, np.float32) if self.start is None else self.start.astype(np.float32)
        out = d_registers(start)
        a_map, registers = self.b.map, self.a
        if isinstance(self.a, WgmmaOperand):
            a_map, registers = self.a.map, np.zeros((128, 4), np.uint32)
        params = [emu.Pointer(out), emu.Pointer(registers), a_map, self.b.map]
        description = emu.Launch(grid=(1,), block=(128,), params=params, dynamic_smem=65536)
        emu.launch(self.text, description, **launch)
        return d_matrix(out)
