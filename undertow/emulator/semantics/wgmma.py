"""Asynchronous warpgroup MMAs: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", m64nNk16 with f32 results.

D (64 x N) = A (64 x 16) B (N x 16)^T, plus D where scale-d is true. A comes from registers or from shared memory, B
from shared memory. Thread t of the warpgroup holds of D, in register 4 j + 2 h + c, row 16 (t / 32) + (t % 32) / 4 +
8 h and column 8 j + 2 (t % 4) + c; of A, in half c of register 2 k + h, the same row and column 8 k + 2 (t % 4) + c.

The arithmetic is that of tcgen05.mma here: sixteen products and their sum in float64, added to the f32 accumulator in
float64, rounded once to f32. ASSUMED: real tensor cores align and truncate differently, so their bits differ.
Registers and operands are read, and D is written, when the MMA completes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from undertow import ptx

from ..async_agents import AsyncOperation
from ..descriptors import decode_wgmma_descriptor
from ..errors import ProtocolError, UnsupportedPtx
from ..events import WarpgroupStep
from ..flow import async_operands
from ..numpy_backend.arithmetic import widen
from ..state import Wait
from ..warpgroup import PARTIAL, WARPS
from .matrix_operand import SharedOperand
from .table import Effect, machine
from .tcgen05 import warp_values

CHAPTER = "asynchronous-warpgroup-level-matrix-instructions"
THREADS = 32 * WARPS
DEPTH = 16
SHAPES = " ".join(f"m64n{n}k16" for n in range(8, 257, 8))
_CLASSES: dict[str, Any] = {"shape": SHAPES, "kind": "bf16.bf16 f16.f16"}


def accumulator_matrix(registers: np.ndarray) -> np.ndarray:
    """Registers (N / 2, 128) of any type as the matrix (64, N)."""
    count = len(registers) // 4
    fragments = registers.reshape(count, 2, 2, WARPS, 8, 4)
    return fragments.transpose(3, 1, 4, 0, 5, 2).reshape(64, 8 * count)


def accumulator_registers(matrix: np.ndarray) -> np.ndarray:
    """The inverse of `accumulator_matrix`."""
    count = matrix.shape[1] // 8
    return matrix.reshape(WARPS, 2, 8, count, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(4 * count, THREADS)


def a_matrix(registers: np.ndarray) -> np.ndarray:
    """Registers (4, 128) of two 16-bit elements each as the matrix (64, 16) of bit patterns."""
    halves = np.ascontiguousarray(registers).view(np.uint16).reshape(2, 2, WARPS, 8, 4, 2)
    return halves.transpose(2, 1, 3, 0, 4, 5).reshape(64, DEPTH)


def whole_warps(lanes, mask, what: str) -> None:
    """Refuse part of a warp, and warps that make no whole warpgroup."""
    if not lanes.full or (mask is not None and not mask.all()):
        raise ProtocolError(f"{what} executed by part of a warp; all 32 lanes must take part", "partial-warp")
    whole = len(lanes.cta.warps) // WARPS * WARPS
    if lanes.warps[-1] >= whole:
        warp = max(lanes.warps[0], whole)
        raise ProtocolError(f"{what} by warp {warp}, whose warpgroup has fewer than four warps", PARTIAL)


@dataclass(frozen=True)
class MmaForm:
    """What the text of a wgmma.mma_async fixes. negate: the product's sign changes; majors are those of A and B."""

    n: int
    kind: str
    a_in_registers: bool
    negate: bool
    a_mn_major: bool
    b_mn_major: bool


def form_of(decoded) -> MmaForm:
    """Read a decoded instruction.

    Raises: UnsupportedPtx for modifiers that are no legal literals and for a wrong number of registers.
    """

    def literal(name: str, allowed: tuple[int, ...]) -> int:
        operand = decoded.operands[name].operand
        if not isinstance(operand, ptx.Immediate) or operand.value not in allowed:
            value = getattr(operand, "value", operand)
            raise UnsupportedPtx(f"wgmma.mma_async with {name} {value}; allowed are the literals {allowed}")
        return operand.value

    names = async_operands(decoded)
    n = int(decoded.mods["shape"].partition("n")[2].partition("k")[0])
    for name, count in {"acc": n // 2, "a": 4}.items():
        if len(names.get(name, range(count))) != count:
            raise UnsupportedPtx(
                f"wgmma.mma_async {decoded.mods['shape']} with {len(names[name])} registers for"
                f" {'D' if name == 'acc' else 'A'}; the shape has {count}"
            )
    a_mn_major = "trans_a" in decoded.operands and literal("trans_a", (0, 1)) == 1
    return MmaForm(
        n, decoded.mods["kind"].partition(".")[0], "a" in names,
        literal("scale_a", (1, -1)) != literal("scale_b", (1, -1)), a_mn_major, literal("trans_b", (0, 1)) == 1,
    )  # fmt: skip


class _Mma:
    """Executes the MMAs of one instruction."""

    def __init__(self, decoded, bus):
        self.form = form_of(decoded)
        self.operand = SharedOperand(decoded, bus)
        self.names = async_operands(decoded)
        self._rows: dict[str, np.ndarray] = {}

    def rows(self, cta, name: str) -> np.ndarray:
        """Numbers of an operand's registers in the register file of 32-bit rows."""
        if name not in self._rows:
            slots = [cta.machine.program.slots[register] for register in self.names[name]]
            if any(slot.file != "32" for slot in slots):
                raise ProtocolError("wgmma.mma_async with registers that do not have 32 bits")
            self._rows[name] = np.array([slot.index for slot in slots])
        return self._rows[name]

    def run(self, operation, a: int, b: int, keep: int) -> None:
        """Read the operands, multiply, write the accumulator."""
        cta, form = operation.lanes.cta, self.form
        words = cta.registers.words["32"]
        columns = slice(operation.thread, operation.thread + THREADS)
        if form.a_in_registers:
            a_values = widen(a_matrix(words[self.rows(cta, "a"), columns]), form.kind).astype(np.float64)
        else:
            a_values = self.operand.read(operation, decode_wgmma_descriptor(a), form.a_mn_major, 64, form.kind)
        b_values = self.operand.read(operation, decode_wgmma_descriptor(b), form.b_mn_major, form.n, form.kind)
        product = a_values @ b_values.T
        if form.negate:
            np.negative(product, product)
        rows = self.rows(cta, "acc")
        if keep:
            product += accumulator_matrix(words[rows, columns].view(np.float32))
        words[rows, columns] = accumulator_registers(product.astype(np.float32)).view(np.uint32)
        cta.warpgroup(operation.warp).complete += 1


def _make_mma(decoded, bus):
    mma = _Mma(decoded, bus)
    form, sink = mma.form, bus.sink(WarpgroupStep)

    def handler(lanes, mask, *sources):
        _, a, b, keep = sources[:4]
        whole_warps(lanes, mask, "wgmma.mma_async")
        if sink:
            sink(WarpgroupStep(lanes, decoded, "mma"))
        a_bits = [0] * lanes.num_warps if form.a_in_registers else warp_values(lanes, a)
        for warp, *operands in zip(lanes.warps, a_bits, warp_values(lanes, b), warp_values(lanes, keep), strict=True):
            issue(lanes, warp, tuple(operands))

    def issue(lanes, warp: int, operands: tuple[int, ...]) -> None:
        cta = lanes.cta
        group = cta.warpgroup(warp)
        cta.progress += 1
        ready = group.issue(warp % WARPS, decoded, operands)
        if ready is None:
            return
        after = () if group.last is None else (group.last,)
        details = {"number": ready.number, "shape": form}
        thread = THREADS * group.number
        group.last = AsyncOperation(
            "wgmma", decoded, lanes, thread, lambda operation: mma.run(operation, *operands), after, details
        )
        cta.engines.issue(group.last)

    return handler


_EFFECTS = (
    Effect("issue", "registers", "async"), Effect("read", "registers", "async"), Effect("read", "shared", "async"),
    Effect("write", "registers", "async"),
)  # fmt: skip
machine(
    "wgmma.mma_async.sync.aligned.<shape>.f32.<kind> acc:async, a:b64, b:b64, keep:pred, scale_a:s32, scale_b:s32,"
    " trans_a:s32, trans_b:s32",
    chapter=CHAPTER, effects=_EFFECTS, **_CLASSES,
)(_make_mma)  # fmt: skip
machine(
    "wgmma.mma_async.sync.aligned.<shape>.f32.<kind> acc:async, a:async, b:b64, keep:pred, scale_a:s32, scale_b:s32,"
    " trans_b:s32",
    chapter=CHAPTER, effects=_EFFECTS, **_CLASSES,
)(_make_mma)  # fmt: skip


@machine("wgmma.fence.sync.aligned", chapter=CHAPTER, effects=(Effect("fence", "registers"),))
def _fence(decoded, bus):
    """Changes no values: registers are accessed in program order until an MMA takes them; observers use it."""
    sink = bus.sink(WarpgroupStep)

    def handler(lanes, mask):
        whole_warps(lanes, mask, "wgmma.fence")
        if sink:
            sink(WarpgroupStep(lanes, decoded, "fence"))

    return handler


@machine("wgmma.commit_group.sync.aligned", chapter=CHAPTER, effects=(Effect("issue", "group", "async"),))
def _commit(decoded, bus):
    sink = bus.sink(WarpgroupStep)

    def handler(lanes, mask):
        whole_warps(lanes, mask, "wgmma.commit_group")
        for warp in lanes.warps:
            lanes.cta.warpgroup(warp).commit(warp % WARPS)
        if sink:
            sink(WarpgroupStep(lanes, decoded, "commit"))

    return handler


@machine(
    "wgmma.wait_group.sync.aligned limit:u32", chapter=CHAPTER, effects=(Effect("complete", "group", "async"),),
    blocking=True,
)  # fmt: skip
def _wait(decoded, bus):
    """At most `limit` groups of the warp may stay open."""
    sink = bus.sink(WarpgroupStep)

    def wait_of(lanes, warp: int, limit: int) -> Wait:
        group = lanes.cta.warpgroup(warp)
        needed = group.warps[warp % WARPS].needed(limit)
        detail = f"{group.open_count(warp % WARPS)} groups of warp {warp} open, {limit} allowed"
        if group.gathering:
            detail += f"; {len(group.gathering[0].warps)} of 4 warps have issued the next MMA"
        return Wait("wgmma_group", limit, detail, lambda: group.complete >= needed)

    def handler(lanes, mask, limit):
        whole_warps(lanes, mask, "wgmma.wait_group")
        allowed = int(np.asarray(limit).flat[0])
        waits = [wait_of(lanes, warp, allowed) for warp in lanes.warps]
        if not all(wait.ready() for wait in waits):
            return waits
        if sink:
            sink(WarpgroupStep(lanes, decoded, "wait", allowed))
        return None

    return handler
