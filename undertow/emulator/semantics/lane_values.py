"""Small questions that handlers ask about their operands: arrays over lanes, or 0-d constants."""

from collections.abc import Iterator

import numpy as np


def active_positions(lanes, mask: np.ndarray | None) -> np.ndarray | None:
    """Positions within the lane set that the guard leaves active; None means all of them."""
    return None if mask is None else np.flatnonzero(mask)


def full(values: np.ndarray, n: int) -> np.ndarray:
    """One value per lane."""
    values = np.asarray(values)
    return values if values.ndim and len(values) == n else np.full(n, values)


def common_value(values: np.ndarray) -> int | None:
    """The value that all lanes share, or None."""
    values = np.asarray(values)
    if values.size == 1:
        return int(values.flat[0])
    first = values[0]
    return int(first) if (values == first).all() else None


def distinct(lanes, mask: np.ndarray | None, *operands) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (position of the first lane, operand values) for each distinct tuple of operands among active lanes.

    An asynchronous copy issued by a whole warp with equal operands is one copy: the hardware loops over distinct
    operands (seen in compiled code as a loop around one uniform instruction).
    """
    n = lanes.n
    positions = range(n) if mask is None else np.flatnonzero(mask).tolist()
    if len(positions) == 1:
        position = positions[0]
        yield position, tuple(int(o.flat[position if o.size > 1 else 0]) for o in operands)
        return
    columns = [full(o, n) for o in operands]
    seen = set()
    for position in positions:
        values = (int(lanes.index[position]) // 32, *(int(c[position]) for c in columns))
        if values not in seen:
            seen.add(values)
            yield position, values[1:]
