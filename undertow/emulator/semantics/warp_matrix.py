"""Warp-wide matrix moves: PTX ISA, "ldmatrix", "stmatrix" and "movmatrix", 8x8 tiles of 16-bit elements.

Lane 8 i + r gives the address of row r of tile i; lane t holds elements (t / 4, 2 (t % 4) + {0, 1}) of each tile, or
with `.trans` elements (2 (t % 4) + {0, 1}, t / 4).
"""

import numpy as np

from ..errors import ProtocolError
from ..events import MemoryAccess
from .lane_values import full
from .mbarrier import shared_address
from .table import NO_EFFECTS, Effect, machine

CHAPTER = "warp-level-matrix-instructions"
_LANE = np.arange(32)
_SPACE = "shared shared::cta"


def _rows(lanes, mask, address, count: int, decoded, sink) -> np.ndarray:
    """Shared byte offsets of each warp's rows: array (warps, count, 8)."""
    if not lanes.full or mask is not None:
        raise ProtocolError(f"{decoded.instruction.opcode} executed by part of a warp")
    values = np.array([shared_address(int(a)) for a in full(address, lanes.n)], np.int64)
    places = values.reshape(lanes.num_warps, 32)[:, : 8 * count]
    lanes.cta.shared.rows(places.ravel(), 16)
    if sink:
        which = (np.arange(lanes.num_warps)[:, None] * 32 + np.arange(8 * count)[None, :]).ravel()
        kind = "read" if decoded.instruction.opcode == "ldmatrix" else "write"
        sink(MemoryAccess(lanes, decoded, kind, "shared", "generic", places.ravel(), 16, which))
    return places.reshape(lanes.num_warps, count, 8)


def _element_offsets(rows: np.ndarray, transposed: bool, half: int) -> np.ndarray:
    """Byte offset of element `half` (0 or 1) of each lane: array (warps, count, 32)."""
    line, column = _LANE // 4, 2 * (_LANE % 4) + half
    if transposed:
        line, column = column, line
    return rows[:, :, line] + 2 * column


@machine(
    "ldmatrix.sync.aligned.m8n8.<num>{.trans}{.<space>}.b16 d:b32, [a]", chapter=CHAPTER,
    effects=(Effect("read", "shared"),), num="x1 x2 x4", space=_SPACE,
)  # fmt: skip
def _ldmatrix(decoded, bus):
    count, transposed = int(decoded.mods["num"][1:]), decoded.mods["trans"]
    sink = bus.sink(MemoryAccess)

    def handler(lanes, mask, address):
        rows = _rows(lanes, mask, address, count, decoded, sink)
        memory = lanes.cta.shared.view(2, 1)[:, 0]
        low, high = (memory[_element_offsets(rows, transposed, h) >> 1].astype(np.uint32) for h in (0, 1))
        values = (low | high << 16).transpose(1, 0, 2).reshape(count, lanes.n)
        return values if count > 1 else values[0]

    return handler


@machine(
    "stmatrix.sync.aligned.m8n8.<num>{.trans}{.<space>}.b16 [a], b:b32", chapter=CHAPTER,
    effects=(Effect("write", "shared"),), num="x1 x2 x4", space=_SPACE,
)  # fmt: skip
def _stmatrix(decoded, bus):
    count, transposed = int(decoded.mods["num"][1:]), decoded.mods["trans"]
    sink = bus.sink(MemoryAccess)

    def handler(lanes, mask, address, items):
        rows = _rows(lanes, mask, address, count, decoded, sink)
        stack = np.stack([full(i, lanes.n) for i in (items if isinstance(items, list) else [items])])
        values = stack.reshape(count, lanes.num_warps, 32).transpose(1, 0, 2)
        memory = lanes.cta.shared.view(2, 1)[:, 0]
        for half in (0, 1):
            memory[_element_offsets(rows, transposed, half) >> 1] = (values >> 16 * half).astype(np.uint16)
        lanes.cta.progress += 1

    return handler


@machine("movmatrix.sync.aligned.m8n8.trans.b16 d:b32, a:b32", chapter=CHAPTER, effects=NO_EFFECTS)
def _movmatrix(decoded, bus):
    """Transpose the tile that the lanes of a warp hold."""

    def handler(lanes, mask, a):
        if not lanes.full or mask is not None:
            raise ProtocolError("movmatrix executed by part of a warp")
        tiles = np.ascontiguousarray(full(a, lanes.n)).view(np.uint16).reshape(-1, 8, 8)
        return np.ascontiguousarray(tiles.transpose(0, 2, 1)).reshape(-1).view(np.uint32)

    return handler
