"""What every body uses: the clock, the place of its results, its shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

WARP = 32
SMEM_ALIGNMENT = 1024
ONES = 0x3F803F80  # two bfloat16
SIGN_AND_FRACTION = 0x807F807F - (1 << 32)


@dataclass(frozen=True)
class Context:
    """out: 64-bit results. data: floats in global memory."""

    probe: cutlass.Constexpr
    out: cute.Tensor
    data: cute.Tensor

    def record(self, slot: Int32 | int, value: Int64, when: Boolean | None = None) -> None:
        """Write a result of this CTA."""
        cta, _, _ = cute.arch.block_idx()
        address = self.out.iterator.toint() + Int64(cta * self.probe.slots + slot) * 8
        cute.arch.inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[address, value], predicate=when)

    def smem(self) -> cute.Pointer:
        """The first byte of the dynamic shared memory."""
        return cute.arch.get_dyn_smem(cutlass.Int8, alignment=SMEM_ALIGNMENT)


def held(value: Int32) -> Int32:
    """The same, in a register from here on: through a shuffle, which nobody computes again where it is needed."""
    return cute.arch.shuffle_sync(value, cute.arch.lane_idx())


def clock() -> Int64:
    """Cycles of this SM. The 64-bit register: the 32-bit one is read late, out of order, on sm_90."""
    return _special_register("%clock64")


def nanoseconds() -> Int64:
    """The chip's wall clock."""
    return _special_register("%globaltimer")


def _special_register(name: str) -> Int64:
    """Read anew wherever it stands; `inline_ptx` takes no percent signs."""
    text, reads = f"mov.u64 $0, {name};", "=l,~{memory}"
    return Int64(llvm.inline_asm(T.i64(), [], text, reads, has_side_effects=True))


def warp_index() -> Int32:
    """Uniform in the warp, and known to be."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def first_lane() -> Boolean:
    """Whether this is lane 0."""
    return cute.arch.lane_idx() == 0


@cute.jit
def fill_operands(c: Context, size: Constexpr):
    """Fill shared memory with 16-bit floats of both signs between 1 and 2, in no order: zeros would save power."""
    words = cute.make_tensor(cute.recast_ptr(c.smem(), dtype=Int32), cute.make_layout(size // 4))
    for index in cutlass.range(cute.arch.thread_idx()[0], size // 4, c.probe.threads, unroll=1):
        mixed = index * Int32(0x2545F491)
        words[index] = ((mixed ^ (mixed >> 15)) & Int32(SIGN_AND_FRACTION)) | Int32(ONES)
    cute.arch.fence_view_async_shared()
