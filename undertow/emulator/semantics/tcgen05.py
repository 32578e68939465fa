"""Fifth-generation tensor core: PTX ISA, "TensorCore 5th Generation Family Instructions", one CTA, kind::f16.

An MMA adds 16 products per element: products and their sum in float64, added to the f32 accumulator in float64, and
rounded once to f32. ASSUMED: real tensor cores align and truncate differently, so their bits differ.
"""

import numpy as np

from ..async_agents import AsyncOperation
from ..descriptors import decode_instruction_descriptor, decode_shared_descriptor
from ..errors import MemoryFault, ProtocolError, UnsupportedPtx
from ..events import MemoryAccess, TmemAccess, TmemAllocation, TmemWait
from ..numpy_backend.arithmetic import widen
from ..state import Wait
from .lane_values import common_value, distinct, full
from .matrix_operand import SharedOperand
from .mbarrier import SPLIT, Signals, shared_address
from .table import Effect, machine

CHAPTER = "tcgen05-instructions"


def _whole_warps(lanes, mask, what: str) -> None:
    if not lanes.full or (mask is not None and not mask.all()):
        raise ProtocolError(f"{what} executed by part of a warp; all 32 lanes must take part", "partial-warp")


def warp_values(lanes, values) -> list[int]:
    """One value per warp of an operand that must be the same in all lanes of a warp."""
    values = np.asarray(values)
    if values.size == 1:
        return [int(values.flat[0])] * lanes.num_warps
    table = values.reshape(lanes.num_warps, 32)
    if (table != table[:, :1]).any():
        raise ProtocolError("operand of a warp-wide instruction differs between lanes")
    return table[:, 0].tolist()


@machine(
    "tcgen05.alloc.cta_group::1.sync.aligned{.<space>}.b32 [d], columns:u32", chapter=CHAPTER,
    effects=(Effect("write", "shared"), Effect("write", "tmem")), blocking=True, space="shared::cta",
)  # fmt: skip
def _alloc(decoded, bus):
    allocated, accessed = bus.sink(TmemAllocation), bus.sink(MemoryAccess)

    def handler(lanes, mask, dst, columns):
        _whole_warps(lanes, mask, "tcgen05.alloc")
        if lanes.num_warps > 1:
            return SPLIT
        tmem, wanted = lanes.cta.tmem, int(np.asarray(columns).flat[0])
        target = shared_address(warp_values(lanes, dst)[0])
        column = tmem.allocate(wanted)
        if column is None:

            def ready() -> bool:
                free = [
                    c for c in range(0, 512, wanted)
                    if all(c + wanted <= f or f + n <= c for f, n in tmem.allocations.items())
                ]  # fmt: skip
                return bool(free)

            return [Wait("tmem_alloc", wanted, f"live allocations: {tmem.describe()}", ready)]
        address = np.array([target], np.uint32)
        lanes.cta.shared.scatter(address, 4, np.array([[column]], np.uint32))
        lanes.cta.progress += 1
        if allocated:
            allocated(TmemAllocation(lanes, decoded, "alloc", column, wanted))
        if accessed:
            accessed(MemoryAccess(lanes, decoded, "write", "shared", "generic", address, 4, np.array([0])))
        return None

    return handler


@machine(
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 address:b32, columns:u32", chapter=CHAPTER,
    effects=(Effect("write", "tmem"),),
)  # fmt: skip
def _dealloc(decoded, bus):
    sink = bus.sink(TmemAllocation)

    def handler(lanes, mask, address, columns):
        _whole_warps(lanes, mask, "tcgen05.dealloc")
        for start in warp_values(lanes, address):
            count = int(np.asarray(columns).flat[0])
            lanes.cta.tmem.deallocate(start & 0xFFFF, count)
            lanes.cta.progress += 1
            if sink:
                sink(TmemAllocation(lanes, decoded, "dealloc", start & 0xFFFF, count))

    return handler


@machine(
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned", chapter=CHAPTER, effects=(Effect("release", "tmem"),)
)
def _relinquish(decoded, bus):
    sink = bus.sink(TmemAllocation)

    def handler(lanes, mask):
        _whole_warps(lanes, mask, "tcgen05.relinquish_alloc_permit")
        lanes.cta.tmem.may_allocate = False
        if sink:
            sink(TmemAllocation(lanes, decoded, "relinquish", 0, 0))

    return handler


def _quarter_access(lanes, address, num_columns: int, what: str) -> list[tuple[int, int, int]]:
    """(warp, first row, column) per warp of a 32x32b access.

    Raises: MemoryFault if a warp names lanes of another quarter or columns that are not allocated.
    """
    places = []
    for warp, value in zip(lanes.warps, warp_values(lanes, address), strict=True):
        row, column = value >> 16, value & 0xFFFF
        if row != 32 * (warp % 4):
            raise MemoryFault(
                f"{what} at TMEM lane {row} by warp {warp}, which may use lanes {32 * (warp % 4)} to"
                f" {32 * (warp % 4) + 31} only",
                "tmem-lane",
            )
        lanes.cta.tmem.check(column, num_columns, what)
        places.append((warp, row, column))
    return places


_SHAPES = "x1 x2 x4 x8 x16 x32 x64 x128"


@machine(
    "tcgen05.ld.sync.aligned.32x32b.<num>.b32 d:b32, [a]", chapter=CHAPTER,
    effects=(Effect("read", "tmem"),), num=_SHAPES,
)  # fmt: skip
def _ld(decoded, bus):
    """Delivered at once; observers judge uses before tcgen05.wait::ld."""
    count = int(decoded.mods["num"][1:])
    sink = bus.sink(TmemAccess)

    def handler(lanes, mask, address):
        _whole_warps(lanes, mask, "tcgen05.ld")
        cells = lanes.cta.tmem.cells
        values = np.empty((count, lanes.n), np.uint32)
        for i, (warp, row, column) in enumerate(_quarter_access(lanes, address, count, "tcgen05.ld")):
            values[:, 32 * i : 32 * i + 32] = cells[row : row + 32, column : column + count].T
            if sink:
                sink(TmemAccess(lanes, decoded, "read", warp, row, 32, column, count))
        return values if count > 1 else values[0]

    return handler


@machine(
    "tcgen05.st.sync.aligned.32x32b.<num>.b32 [a], b:b32", chapter=CHAPTER, effects=(Effect("write", "tmem"),),
    num=_SHAPES,
)  # fmt: skip
def _st(decoded, bus):
    count = int(decoded.mods["num"][1:])
    sink = bus.sink(TmemAccess)

    def handler(lanes, mask, address, items):
        _whole_warps(lanes, mask, "tcgen05.st")
        cells = lanes.cta.tmem.cells
        values = np.empty((count, lanes.n), np.uint32)
        for row_values, item in zip(values, items if isinstance(items, list) else [items], strict=True):
            row_values[:] = item
        for i, (warp, row, column) in enumerate(_quarter_access(lanes, address, count, "tcgen05.st")):
            cells[row : row + 32, column : column + count] = values[:, 32 * i : 32 * i + 32].T
            if sink:
                sink(TmemAccess(lanes, decoded, "write", warp, row, 32, column, count))
        lanes.cta.progress += 1

    return handler


def _make_wait(kind: str):
    def make(decoded, bus):
        sink = bus.sink(TmemWait)

        def handler(lanes, mask):
            if kind in ("read", "write"):
                _whole_warps(lanes, mask, "tcgen05.wait")
            if sink:
                sink(TmemWait(lanes, decoded, kind))

        return handler

    return make


machine("tcgen05.wait::ld.sync.aligned", chapter=CHAPTER, effects=(Effect("complete", "tmem_read"),))(
    _make_wait("read")
)
machine("tcgen05.wait::st.sync.aligned", chapter=CHAPTER, effects=(Effect("complete", "tmem_write"),))(
    _make_wait("write")
)
machine("tcgen05.fence::before_thread_sync", chapter=CHAPTER, effects=(Effect("fence", "tmem"),))(_make_wait("before"))
machine("tcgen05.fence::after_thread_sync", chapter=CHAPTER, effects=(Effect("fence", "tmem"),))(_make_wait("after"))


def accumulator_rows(m: int) -> np.ndarray | slice:
    """TMEM rows of an accumulator: all 128, or for M = 64 the first 16 of each quarter (layout F of the manual)."""
    return slice(0, 128) if m == 128 else (np.arange(64) % 16) + 32 * (np.arange(64) // 16)


class _Mma:
    """Executes and reports the MMAs of one instruction."""

    def __init__(self, decoded, bus):
        self.decoded = decoded
        self.tmem_sink = bus.sink(TmemAccess)
        self.operand = SharedOperand(decoded, bus)

    def shared_operand(self, operation, bits: int, mn_major: bool, extent: int, kind: str) -> np.ndarray:
        """Read a (extent, 16) operand through its descriptor as float64."""
        return self.operand.read(operation, decode_shared_descriptor(bits), mn_major, extent, kind)

    def tmem_operand(self, operation, address: int, m: int, kind: str) -> np.ndarray:
        """Read a (128, 16) operand A from 8 TMEM columns as float64; each column holds two elements, low half first."""
        tmem = operation.lanes.cta.tmem
        row, column = address >> 16, address & 0xFFFF
        if row or m != 128:
            raise UnsupportedPtx(f"operand A in TMEM at lane {row} with M = {m}")
        tmem.check(column, 8, "MMA operand A")
        if self.tmem_sink:
            self.tmem_sink(
                TmemAccess(operation.lanes, self.decoded, "read", operation.warp, 0, 128, column, 8, operation)
            )
        packed = np.ascontiguousarray(tmem.cells[:, column : column + 8])
        return widen(packed.view(np.uint16), kind).astype(np.float64)

    def accumulate(self, operation, address: int, idesc, product: np.ndarray, keep: bool) -> None:
        """Add the product to the accumulator in float64 and round once to f32."""
        tmem = operation.lanes.cta.tmem
        row, column = address >> 16, address & 0xFFFF
        if row:
            raise UnsupportedPtx(f"accumulator at TMEM lane {row}")
        tmem.check(column, idesc.n, "MMA accumulator")
        rows, columns = accumulator_rows(idesc.m), slice(column, column + idesc.n)
        if keep:
            product += tmem.floats[rows, columns]
        tmem.floats[rows, columns] = product
        operation.lanes.cta.progress += 1
        if self.tmem_sink:
            for kind in ("read", "write") if keep else ("write",):
                self.tmem_sink(
                    TmemAccess(operation.lanes, self.decoded, kind, operation.warp, 0, 128, column, idesc.n, operation)
                )


def _check_lane_mask(disabled) -> None:
    for item in disabled:
        if np.asarray(item).any():
            raise UnsupportedPtx("tcgen05.mma with a disable-output-lane mask that is not zero")


def _make_mma(a_in_tmem: bool, has_lane_mask: bool):
    def make(decoded, bus):
        mma = _Mma(decoded, bus)

        def handler(lanes, mask, *sources):
            d, a, b, idesc, *rest = sources
            if has_lane_mask:
                _check_lane_mask(rest[0])
                rest = rest[1:]
            if len(rest) > 1 and rest[1] is not None and common_value(rest[1]):
                raise UnsupportedPtx("tcgen05.mma with a scale for the accumulator")
            cta = lanes.cta
            for position, operands in distinct(lanes, mask, d, a, b, idesc, rest[0]):
                d_address, a_bits, b_bits, idesc_bits, keep = operands
                shape = decode_instruction_descriptor(idesc_bits)

                def run(operation, d_address=d_address, a_bits=a_bits, b_bits=b_bits, shape=shape, keep=keep):
                    if a_in_tmem:
                        a_values = mma.tmem_operand(operation, a_bits, shape.m, shape.a_format)
                    else:
                        a_values = mma.shared_operand(operation, a_bits, shape.a_mn_major, shape.m, shape.a_format)
                    b_values = mma.shared_operand(operation, b_bits, shape.b_mn_major, shape.n, shape.b_format)
                    product = a_values @ b_values.T
                    if shape.negate_a != shape.negate_b:
                        np.negative(product, product)
                    mma.accumulate(operation, d_address, shape, product, bool(keep))

                details = {"accumulator": d_address, "a": a_bits, "b": b_bits, "shape": shape, "keeps": bool(keep)}
                thread = int(lanes.index[position])
                cta.engines.issue(AsyncOperation("tensor", decoded, lanes, thread, run, (), details))

        return handler

    return make


for _a, _in_tmem in (("[a]", True), ("a:b64", False)):
    for _lane_mask, _has_mask in (("", False), (", lanes:vector", True)):
        machine(
            f"tcgen05.mma.cta_group::1.kind::f16{{.<collector>}} [d], {_a}, b:b64, idesc:b32{_lane_mask}, keep:pred"
            "{, scale:u32}",
            chapter=CHAPTER,
            effects=(Effect("issue", "tmem", "async"), Effect("read", "shared", "async"), Effect("write", "tmem")),
            collector="collector::a::fill collector::a::use collector::a::lastuse collector::a::discard",
        )(_make_mma(_in_tmem, _has_mask))  # fmt: skip


@machine(
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one{.<space>}.b64 [a]", chapter=CHAPTER,
    effects=(Effect("issue", "mbarrier", "async"), Effect("release", "mbarrier", "async")),
    space="shared::cluster shared::cta",
)  # fmt: skip
def _commit(decoded, bus):
    """Arrive once when all earlier MMAs of the issuing thread are complete; at once if there are none."""
    signal = Signals(decoded, bus)

    def handler(lanes, mask, address):
        cta = lanes.cta
        for position, (where,) in distinct(lanes, mask, full(address, lanes.n)):
            word = shared_address(where)
            cta.shared.mbarrier(word)

            def run(operation, word=word):
                signal(lanes, "arrive", (cta, word), 1, operation)

            thread = int(lanes.index[position])
            cta.engines.issue(AsyncOperation("tensor", decoded, lanes, thread, run, (), {"mbarrier": word}))

    return handler
