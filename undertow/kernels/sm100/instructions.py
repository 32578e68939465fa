"""Instructions that the DSL's public layer does not offer in the form the roles need, one function each.

Plain Python that is called while a kernel is traced. TMEM addresses are 32-bit: lane << 16 | column. Registers are
lists of DSL values, one entry per 32-bit register of a thread.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm, vector
from cutlass.cutlass_dsl import T

from undertow.plan.schema import DType

_TMEM_ADDRESS_SPACE = 6


def tmem_load(address: Int32, columns: int) -> list[Int32]:
    """tcgen05.ld 32x32b: the thread's lane, `columns` words from `address` on; needs wait::ld before their use."""
    words = nvvm.tcgen05_ld(_vector(T.i32(), columns), nvvm.Tcgen05LdStShape.SHAPE_32X32B, _tmem_pointer(address))
    return [Int32(vector.extract(words, dynamic_position=[], static_position=[i])) for i in range(columns)]


def floats(words: list[Int32]) -> list[Float32]:
    """The same bits as fp32."""
    return [Float32(llvm.bitcast(T.f32(), word.ir_value())) for word in words]


def tmem_store(address: Int32, words: list[Int32]) -> None:
    """tcgen05.st 32x32b: one 32-bit word per column into the thread's lane; complete after wait::st."""
    values = vector.from_elements(_vector(T.i32(), len(words)), [word.ir_value() for word in words])
    nvvm.tcgen05_st(nvvm.Tcgen05LdStShape.SHAPE_32X32B, _tmem_pointer(address), values)


def mma(d: Int32, a: Int32 | Int64, b: Int64, instruction: int, accumulate: bool | Boolean) -> None:
    """One tcgen05.mma of 16-bit operands, by one thread: d = a b, or d += a b.

    d: TMEM address. a: TMEM address (Int32) or SMEM descriptor (Int64). b: SMEM descriptor.
    """
    operand = _tmem_pointer(a) if isinstance(a, Int32) else a.ir_value()
    nvvm.tcgen05_mma(
        nvvm.Tcgen05MMAKind.F16,
        nvvm.CTAGroupKind.CTA_1,
        _tmem_pointer(d),
        operand,
        b.ir_value(),
        Int32(instruction).ir_value(),
        Boolean(accumulate).ir_value(),
    )


def packed(low: Float32, high: Float32, dtype: DType) -> Int32:
    """Two floats rounded to nearest even in a 16-bit type; `low` is the one with the lower address or column."""
    element, convert = {
        DType.BF16: (T.bf16(), nvvm.convert_f32x2_to_bf16x2),
        DType.F16: (T.f16(), nvvm.convert_f32x2_to_f16x2),
    }[dtype]
    pair = convert(_vector(element, 2), high.ir_value(), low.ir_value(), rnd=nvvm.FPRoundingMode.RN)
    return Int32(llvm.bitcast(T.i32(), pair))


def shared_load(pointer: cute.Pointer, count: int) -> list[Float32]:
    """`count` floats from shared memory, in 16-byte vectors."""
    values = cute.make_tensor(pointer, cute.make_layout(count)).load()
    return [values[index] for index in range(count)]


def store_vector(space: str, address: Int32 | Int64, words: list[Int32], predicate: Boolean | None = None) -> None:
    """A 16-byte store of four 32-bit words to `space`, shared or global, by the threads whose predicate holds."""
    cute.arch.inline_ptx(
        f"st.{space}.v4.b32 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *words],
        predicate=predicate,
    )


def opaque(value: Int32) -> Int32:
    """The same value, computed where it is used: LLVM moves no arithmetic on it out of a loop."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def shifted_left(value: Int32, by: Int32) -> Int32:
    """value << by for any by >= 0: the machine's shift, which leaves nothing from 32 on (PTX ISA, shl)."""
    return cute.arch.inline_ptx("shl.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[value, by])


def bulk_reduce_add(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """Start an asynchronous fp32 += of `size` bytes from shared to global memory, in this thread's bulk group."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(size)],
    )


def bulk_store(target: cute.Pointer, source: cute.Pointer, size: int) -> None:
    """Start an asynchronous copy of `size` bytes from shared to global memory, in this thread's bulk group."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(size)],
    )


def _tmem_pointer(address: Int32) -> ir.Value:
    return llvm.inttoptr(llvm.PointerType.get(_TMEM_ADDRESS_SPACE), address.ir_value())


def _vector(element: ir.Type, count: int) -> ir.Type:
    return ir.VectorType.get([count], element)
