"""Guarded collectives: in a gang some warps take part and some do not, so each is asked for itself."""

import numpy as np

from undertow import ptx

from ..semantics import Decoded
from ..semantics.mbarrier import SPLIT


def warp_by_warp(decoded: Decoded, handler):
    """Wrap the handler of a guarded collective so that it sees only warps whose guard is true in some lane.

    Where the warps of a gang disagree, the handler runs once per warp (a blocking one through SPLIT, which asks the
    machine to do that). Warps without an active lane take no part; their destinations stay, by the guard.
    """
    blanks = [
        np.zeros(1, bool if d.type == "pred" else f"u{ptx.TYPE_BITS.get(d.type, 32) // 8}")
        for d in decoded.destinations
    ]
    nothing = None if not blanks else blanks[0] if len(blanks) == 1 else tuple(blanks)

    def wrapped(lanes, mask, *sources):
        if mask.all():
            return handler(lanes, None, *sources)
        if not mask.any():
            return nothing
        if lanes.num_warps == 1:
            return handler(lanes, mask, *sources)
        if decoded.row.blocking:
            return SPLIT
        results = []
        for place, warp in enumerate(lanes.warps):
            part = slice(32 * place, 32 * place + 32)
            values = (_columns(source, part, lanes.n) for source in sources)
            results.append(wrapped(lanes.cta.gang(warp, 1), mask[part], *values))
        return _join(results)

    return wrapped


def _columns(source, part: slice, n: int):
    """The lanes of one warp of an operand: an array, a list of them, a constant or nothing."""
    if isinstance(source, list):
        return [_columns(item, part, n) for item in source]
    return source[part] if source is not None and source.ndim and len(source) == n else source


def _join(results: list):
    """Put the warps' results side by side."""
    if results[0] is None:
        return None
    if isinstance(results[0], tuple):
        return tuple(_join([result[i] for result in results]) for i in range(len(results[0])))
    rows = max(np.ndim(result) for result in results)
    shape = (max(len(r) for r in results if np.ndim(r) == rows), 32) if rows == 2 else (32,)
    return np.concatenate([np.broadcast_to(result, shape) for result in results], axis=-1)
