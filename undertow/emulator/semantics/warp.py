"""Warp collectives: PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "elect.sync", "bar.warp.sync".

All work on whole warps at once; with a partial warp the lanes named in the member mask must be exactly those here.
"""

import numpy as np

from ..errors import ProtocolError
from ..events import WarpSynchronised
from ..numpy_backend import floats
from .lane_values import full
from .table import Effect, machine

CHAPTER = "parallel-synchronization-and-communication-instructions"
SHUFFLE = "data-movement-and-conversion-instructions-shfl-sync"
_SYNC = (Effect("acquire", "lanes"), Effect("release", "lanes"))
_LANES = np.arange(32)


def check_members(lanes, mask, members) -> None:
    """Refuse a collective whose member mask names lanes that are not executing it, or that lacks one that is.

    Raises: ProtocolError naming both masks.
    """
    if mask is not None and not mask.all():
        raise ProtocolError(
            "a warp collective is guarded by a predicate that is false in some of its lanes", "partial-warp"
        )
    named = np.asarray(members)
    for warp, present in zip(lanes.warps, lanes.masks, strict=True):
        value = int(named.flat[0]) if named.size == 1 else int(full(named, lanes.n)[lanes.index // 32 == warp][0])
        value &= 0xFFFFFFFF
        if value == 0xFFFFFFFF and present == value:
            continue
        live = lanes.cta.warps[warp].live_mask | present
        if (value & live) & ~present or present & ~value:
            raise ProtocolError(
                f"warp collective with member mask {value:#010x} reached by lanes {present:#010x} of warp {warp} only",
                "partial-warp",
            )


def _collective(decoded, bus, body):
    """Wrap `body(lanes, *sources)` with the member check and the event; the member mask is the last source."""
    sink = bus.sink(WarpSynchronised)

    def handler(lanes, mask, *sources):
        check_members(lanes, mask, sources[-1])
        if sink:
            sink(WarpSynchronised(lanes, decoded))
        return body(lanes, *sources[:-1])

    return handler


def shuffle_source(mode: str, lane: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Source lane and in-range predicate of shfl, by the manual's formula."""
    bval, cval, segment = b & 31, c & 31, (c >> 8) & 31
    max_lane = (lane & segment) | (cval & ~segment)
    min_lane = lane & segment
    if mode == "up":
        source = lane - bval
        valid = source >= max_lane
    elif mode == "down":
        source = lane + bval
        valid = source <= max_lane
    elif mode == "bfly":
        source = lane ^ bval
        valid = source <= max_lane
    else:
        source = min_lane | (bval & ~segment)
        valid = source <= max_lane
    return np.where(valid, source, lane), valid


@machine(
    "shfl.sync.<mode>.b32 d:b32{|e:pred}, a:b32, b:u32, c:u32, members:b32", chapter=SHUFFLE, effects=_SYNC,
    mode="up down bfly idx",
)  # fmt: skip
def _shfl(decoded, bus):
    mode = decoded.mods["mode"]
    wants_predicate = "e" in decoded.operands
    constant: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def body(lanes, a, b, c):
        a = full(a, lanes.n)
        if lanes.full and np.asarray(b).size == 1 and np.asarray(c).size == 1:
            key = (int(b.flat[0]), int(c.flat[0]))
            if key not in constant:
                constant[key] = shuffle_source(mode, _LANES, np.array(key[0]), np.array(key[1]))
            source, valid = constant[key]
            value = np.take(a.reshape(-1, 32), source, axis=1).reshape(-1)
            return (value, np.tile(valid, lanes.num_warps)) if wants_predicate else value
        lane = lanes.index % 32
        source, valid = shuffle_source(mode, lane, full(b, lanes.n).astype(np.int64), full(c, lanes.n).astype(np.int64))
        position = np.full(lanes.cta.num_threads + 32, -1)
        position[lanes.index] = np.arange(lanes.n)
        where = position[lanes.index - lane + source]
        if (where < 0).any():
            raise ProtocolError("shfl.sync reads the register of a lane that does not take part")
        return (a[where], valid) if wants_predicate else a[where]

    return _collective(decoded, bus, body)


@machine(
    "elect.sync d:b32|e:pred, members:b32", chapter=CHAPTER, effects=_SYNC,
)  # fmt: skip
def _elect(decoded, bus):
    """The lowest lane of the member mask is elected, or the highest if the launch says so.

    ASSUMED: the ISA only says that the choice is deterministic.
    """
    sink = bus.sink(WarpSynchronised)
    patterns: dict = {}

    def handler(lanes, mask, members):
        if sink:
            sink(WarpSynchronised(lanes, decoded))
        if mask is None and lanes in patterns:
            return patterns[lanes]
        check_members(lanes, mask, members)
        value = int(np.asarray(members).flat[0]) & 0xFFFFFFFF
        highest = lanes.cta.machine.options.elected == "highest"
        leader = (value if highest else value & -value).bit_length() - 1
        lane = lanes.index % 32
        result = (np.full(lanes.n, leader, np.uint32), lane == leader)
        if lanes.full and np.asarray(members).ndim == 0:
            patterns[lanes] = result
        return result

    return handler


def _per_warp(lanes, values: np.ndarray, function) -> np.ndarray:
    """Apply a function of one warp's values and spread the result over its lanes."""
    warp = lanes.index // 32
    out = None
    for number in lanes.warps:
        chosen = warp == number
        result = function(values[chosen], lanes.index[chosen] % 32)
        if out is None:
            out = np.empty(lanes.n, np.asarray(result).dtype)
        out[chosen] = result
    assert out is not None
    return out


def _ballot(predicate: np.ndarray, lane: np.ndarray) -> np.uint32:
    return np.uint32(sum(1 << int(i) for i in lane[predicate]))


@machine(
    "vote.sync.<mode>.pred d:pred, a:pred, members:b32", chapter=CHAPTER, effects=_SYNC, mode="all any uni",
)  # fmt: skip
def _vote(decoded, bus):
    mode = decoded.mods["mode"]
    function = {"all": np.all, "any": np.any, "uni": lambda p: p.all() or not p.any()}[mode]
    return _collective(
        decoded, bus, lambda lanes, a: _per_warp(lanes, full(a, lanes.n), lambda p, lane: np.bool_(function(p)))
    )


@machine("vote.sync.ballot.b32 d:b32, a:pred, members:b32", chapter=CHAPTER, effects=_SYNC)
def _vote_ballot(decoded, bus):
    return _collective(decoded, bus, lambda lanes, a: _per_warp(lanes, full(a, lanes.n), _ballot))


@machine(
    "match.any.sync.<type> d:b32, a, members:b32", chapter=CHAPTER, effects=_SYNC, type="b32 b64",
)  # fmt: skip
def _match_any(decoded, bus):
    def match(values, lane):
        return np.array([_ballot(values == v, lane) for v in values], np.uint32)

    return _collective(decoded, bus, lambda lanes, a: _per_warp(lanes, full(a, lanes.n), match))


@machine(
    "match.all.sync.<type> d:b32{|e:pred}, a, members:b32", chapter=CHAPTER, effects=_SYNC, type="b32 b64",
)  # fmt: skip
def _match_all(decoded, bus):
    wants_predicate = "e" in decoded.operands

    def match(values, lane):
        return _ballot(np.ones(len(values), bool), lane) if (values == values[0]).all() else np.uint32(0)

    def body(lanes, a):
        value = _per_warp(lanes, full(a, lanes.n), match)
        return (value, value != 0) if wants_predicate else value

    return _collective(decoded, bus, body)


@machine(
    "redux.sync.<op>.<type> d, a, members:b32", chapter=CHAPTER, effects=_SYNC, op="add min max and or xor",
    type="u32 s32 b32",
)  # fmt: skip
def _redux(decoded, bus):
    ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor}[decoded.mods["op"]]  # fmt: skip

    def reduce(values, lane):
        return ufunc.reduce(values, dtype=values.dtype)

    return _collective(decoded, bus, lambda lanes, a: _per_warp(lanes, full(a, lanes.n), reduce).view(np.uint32))


@machine(
    "redux.sync.<op>{.abs}{.NaN}.f32 d:f32, a:f32, members:b32", chapter=CHAPTER, effects=_SYNC, op="min max",
)  # fmt: skip
def _redux_float(decoded, bus):
    """Minimum or maximum of f32: numbers win over NaN unless .NaN; -0 is less than +0."""
    mods = decoded.mods
    extreme = floats.float_min if mods["op"] == "min" else floats.float_max

    def reduce(values, lane):
        values = np.abs(values) if mods["abs"] else values
        result = values[:1].copy()
        for value in values[1:]:
            extreme(result, value[None], result, (False, mods["NaN"], False))
        return result[0]

    return _collective(decoded, bus, lambda lanes, a: _per_warp(lanes, full(a, lanes.n), reduce).view(np.uint32))


@machine("activemask.b32 d:b32", chapter=CHAPTER, effects=(Effect("read", "lanes"),))
def _activemask(decoded, bus):
    def handler(lanes, mask):
        counts = dict(zip(lanes.warps, lanes.masks, strict=True))
        return np.array([counts[int(i) // 32] for i in lanes.index], np.uint32)

    return handler


@machine("bar.warp.sync members:b32", chapter=CHAPTER, effects=_SYNC)
def _bar_warp_sync(decoded, bus):
    return _collective(decoded, bus, lambda lanes: None)
