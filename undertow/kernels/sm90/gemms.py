"""The five GEMMs of a tile, as one compute warpgroup issues them: operands, accumulators, and the wgmma instructions.

The warpgroup owns 64 keys, so that every accumulator has 64 rows: of keys, or for dQ of the query rows whose share it
computes. A thread holds, for every group of 8 columns, two neighbours c, c + 1 of rows r and r + 8: this order makes
two packed accumulator groups exactly the A operand of the next GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from undertow.kernels.events import span
from undertow.kernels.sm90.instructions import opaque
from undertow.kernels.sm90.plan import ROW_TERMS, TERM_UNITS, WARPGROUP_THREADS, WARPGROUPS
from undertow.kernels.sm100.arguments import ELEMENT_TYPES
from undertow.kernels.sm100.bind import SharedMemory
from undertow.plan.schema import DType, Plan

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
_BITS = {(DType.BF16, 1.0): 0x3F80, (DType.F16, 2.0**6): 0x5400, (DType.F16, 2.0**-10): 0x1400}
SMEM, REGISTERS = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM


@dataclass(frozen=True)
class Gemm:
    """One GEMM. a: fragments of descriptors, or None where the operand is in registers; b: of descriptors."""

    plan: cutlass.Constexpr
    name: cutlass.Constexpr
    mma: cute.TiledMma
    shape: Any  # (m of both warpgroups, n, k)
    a: Any
    b: Any

    def accumulator(self) -> cute.Tensor:
        """Registers for the thread's part of the result."""
        return cute.make_rmem_tensor(self.mma.partition_shape_C(self.shape[:2]), Float32)

    def operand(self, plan: Plan) -> cute.Tensor:
        """Registers for the thread's part of operand a."""
        return cute.make_rmem_tensor(self.mma.partition_shape_A(self.shape[::2]), ELEMENT_TYPES[plan.dtype])

    def issue(self, d: cute.Tensor, a: Any, stage: Any, accumulate: bool, onto: Any = None) -> None:
        """Issue d = a b, d += a b, or d = a b + onto, and close its group.

        a: registers, or the stage of a in shared memory. onto: a one-step GEMM and its operand a; same stage.
        """
        with span(self.plan, self.name):
            warpgroup.fence()
            if onto is not None:
                gemm, operand = onto
                gemm.steps(d, operand, gemm.b[None, None, None, stage], False)
            a = a if self.a is None else self.a[None, None, None, a]
            self.steps(d, a, self.b[None, None, None, stage], accumulate or onto is not None)
            warpgroup.commit_group()

    def steps(self, d: cute.Tensor, a: Any, b: Any, accumulate: bool) -> None:
        """Issue the instructions, 16 of k each."""
        atom = cute.make_mma_atom(self.mma.op)
        for k in range(cute.size(a.shape[2])):
            atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
            cute.gemm(atom, d, a[None, None, k], b[None, None, k], d)


@dataclass(frozen=True)
class Gemms:
    """S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K.

    row: a step of k = 16 that adds a number of each query row to the columns of S or dP.
    """

    row: Gemm
    s: Gemm
    dp: Gemm
    dv: Gemm
    dk: Gemm
    dq: Gemm


def gemms(smem: SharedMemory, owner: Int32) -> Gemms:
    """The GEMMs of a warpgroup, with their descriptors."""
    plan = smem.plan
    m, n, d = plan.tile_m, plan.tile_n, plan.head_dim
    q, k, v, do = (_rows(smem, region) for region in ("sQ", "sK", "sV", "sdO"))
    ds = _panels(smem, "sdS")
    return Gemms(
        row=_gemm((plan, "row"), (n, m, ROW_TERMS), owner, None, (_row_terms(smem), K_MAJOR)),
        s=_gemm((plan, "S"), (n, m, d), owner, (k, K_MAJOR), (q, K_MAJOR)),
        dp=_gemm((plan, "dP"), (n, m, d), owner, (v, K_MAJOR), (do, K_MAJOR)),
        dv=_gemm((plan, "dV"), (n, d, m), owner, None, (_transposed(do), MN_MAJOR)),
        dk=_gemm((plan, "dK"), (n, d, m), owner, None, (_transposed(q), MN_MAJOR)),
        dq=_gemm((plan, "dQ"), (m, d, n), owner, (ds, MN_MAJOR), (_transposed(k), MN_MAJOR)),
    )


def _gemm(of: tuple[Plan, str], shape: tuple[int, int, int], owner: Int32, a: Any, b: tuple) -> Gemm:
    """of: the plan, and the GEMM's name."""
    plan, name = of
    element = ELEMENT_TYPES[plan.dtype]
    source, a_major = (REGISTERS, K_MAJOR) if a is None else (SMEM, a[1])
    op = warpgroup.MmaF16BF16Op(element, Float32, (64, shape[1], 16), source, a_major, b[1])
    mma = cute.make_tiled_mma(op, (WARPGROUPS, 1, 1))
    own = mma.get_slice(owner * WARPGROUP_THREADS)
    from_a = None if a is None else own.make_fragment_A(own.partition_A(a[0]))
    return Gemm(plan, name, mma, shape, from_a, own.make_fragment_B(own.partition_B(b[0])))


def _rows(smem: SharedMemory, region: str) -> cute.Tensor:
    """A region of rows of 128 swizzled bytes as (rows, columns, stages)."""
    of = smem.plan.smem_region(region)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, ELEMENT_TYPES[of.dtype])
    return _tensor(smem, region, cute.tile_to_shape(atom, (of.rows, of.columns, of.stages), order=(0, 1, 2)))


def _panels(smem: SharedMemory, region: str) -> cute.Tensor:
    """sdS as (query rows, keys, stages): the rows of a panel are keys, 64 query rows wide."""
    of = smem.plan.smem_region(region)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, ELEMENT_TYPES[of.dtype])
    return _tensor(smem, region, cute.tile_to_shape(atom, (of.columns, of.rows, of.stages), order=(1, 0, 2)))


def _row_terms(smem: SharedMemory) -> cute.Tensor:
    """sRow as (query rows, 16 terms, stages): rows of 32 bytes under the 32-byte swizzle."""
    of = smem.plan.smem_region("sRow")
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, ELEMENT_TYPES[of.dtype])
    return _tensor(smem, "sRow", cute.tile_to_shape(atom, (of.rows, of.columns, of.stages), order=(0, 1, 2)))


def _tensor(smem: SharedMemory, region: str, layout: cute.ComposedLayout) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(smem.pointer(region), layout.inner), layout.outer)


def _transposed(rows: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(rows.iterator, cute.select(rows.layout, [1, 0, 2]))


def add_number(gemms: Gemms, plan: Plan, number: int) -> tuple[Gemm, cute.Tensor]:
    """What adds a number of each query row to an accumulator, as `onto`: its terms times their units, no others."""
    operand = gemms.row.operand(plan)
    even, odd = (_BITS[plan.dtype, unit] for unit in TERM_UNITS[plan.dtype])
    half = cute.size(words(operand)) // 2
    values = [opaque(odd << 16 | even if which == number else 0) for which in range(2)]  # before the fence
    for index in range(2 * half):
        words(operand)[index] = values[index // half]
    return gemms.row, operand


def words(registers: cute.Tensor) -> cute.Tensor:
    """16-bit registers as 32-bit words."""
    return cute.recast_tensor(registers, Int32)
