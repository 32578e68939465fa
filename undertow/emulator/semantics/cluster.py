"""Distributed shared memory: PTX ISA, "mapa", "getctarank", "st.async" and "red.async".

st.async and red.async write another CTA's shared memory and complete bytes of an mbarrier of the same CTA, both at one
moment. ASSUMED: they go through the generic proxy, as the ISA does not name them among the operations of the async one.
"""

import numpy as np

from ..async_agents import AsyncOperation
from ..cluster import locate, map_address, rank_of
from ..errors import ProtocolError
from ..events import MemoryAccess
from .atomics import combine
from .data_movement import SHARED_WINDOW
from .lane_values import full
from .mbarrier import Signals, shared_address
from .table import NO_EFFECTS, Effect, machine

CHAPTER = "data-movement-and-conversion-instructions"
_TYPES = "b32 b64 u32 u64 s32 s64 f32 f64"
_REMOTE = (Effect("issue", "shared"), Effect("write", "shared"), Effect("release", "mbarrier"))


def _make_mapa(decoded, bus):
    is_generic = not decoded.mods["space"]

    def handler(lanes, mask, address, rank):
        base = SHARED_WINDOW if is_generic else 0
        addresses, ranks = full(address, lanes.n).tolist(), full(rank, lanes.n).tolist()
        active = np.ones(lanes.n, bool) if mask is None else mask
        values = [
            base + map_address(lanes.cta, shared_address(a), r) if on else 0
            for a, r, on in zip(addresses, ranks, active, strict=True)
        ]
        return np.array(values, f"u{4 if decoded.mods['type'] == 'u32' else 8}")

    return handler


machine(
    "mapa{.<space>}.<type> d, a, b:u32", chapter=CHAPTER, effects=NO_EFFECTS, type="u32 u64", space="shared::cluster"
)(_make_mapa)


@machine(
    "getctarank{.<space>}.<type> d:u32, a:<type>", chapter=CHAPTER, effects=NO_EFFECTS, type="u32 u64",
    space="shared::cluster",
)  # fmt: skip
def _getctarank(decoded, bus):
    def handler(lanes, mask, address):
        ranks = [rank_of(lanes.cta, shared_address(a)) for a in full(address, lanes.n).tolist()]
        return np.array(ranks, np.uint32)

    return handler


def _make_remote(decoded, bus):
    mods = decoded.mods
    type_name, op = mods["type"], mods.get("op")
    size, count = int(type_name[1:]) // 8, int(mods["vec"][1:]) if mods.get("vec") else 1
    unsigned, sink, signal = np.dtype(f"u{size}"), bus.sink(MemoryAccess), Signals(decoded, bus)

    def handler(lanes, mask, address, value, barrier):
        items = value if isinstance(value, list) else [value]
        values = np.stack([full(item, lanes.n).view(unsigned) for item in items], axis=1)
        addresses, words = full(address, lanes.n), full(barrier, lanes.n)
        for position in range(lanes.n) if mask is None else np.flatnonzero(mask).tolist():
            home, target = locate(lanes.cta, shared_address(int(addresses[position])))
            owner, word = locate(lanes.cta, shared_address(int(words[position])))
            if owner is not home:
                raise ProtocolError(f"{decoded.instruction.opcode}.async: data and mbarrier lie in different CTAs")

            def run(operation, home=home, target=target, word=word, data=values[position]):
                place = np.array([target], np.uint64)
                if op:
                    data = combine(op, type_name, home.shared.gather(place, size, 1)[:, 0], data)
                home.shared.scatter(place, size, np.ascontiguousarray(data).reshape(count, 1))
                home.progress += 1
                if sink:
                    kind = "atomic" if op else "write"
                    sink(
                        MemoryAccess(
                            lanes, decoded, kind, "shared", "generic", place, size * count, None, operation, home=home
                        )
                    )
                signal(lanes, "complete_tx", (home, word), size * count, operation)

            details = {"shared": target, "bytes": size * count, "mbarrier": word, "homes": (home,)}
            thread = int(lanes.index[position])
            lanes.cta.engines.issue(AsyncOperation("bulk_load", decoded, lanes, thread, run, (), details))

    return handler


machine(
    "st.async{.weak}{.shared::cluster}{.mbarrier::complete_tx::bytes}{.<vec>}.<type> [a], b, [m]",
    chapter=CHAPTER, effects=_REMOTE, vec="v2 v4", type=_TYPES,
)(_make_remote)  # fmt: skip
machine(
    "red.async.relaxed.cluster{.shared::cluster}{.mbarrier::complete_tx::bytes}.<op>.<type> [a], b, [m]",
    chapter=CHAPTER, effects=_REMOTE, op="inc dec min max and or xor add", type="u32 s32 b32 u64",
)(_make_remote)  # fmt: skip
