"""Comparison routines that the `numpy` column of the semantics table calls."""

import numpy as np

from ..semantics import data_movement
from .rounding import flushed

_UFUNC = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
          "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
          "hs": np.greater_equal}  # fmt: skip
_BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(a, b, cmp: str, ftz: bool) -> np.ndarray:
    """Compare; `u` forms are true and plain float forms false if either side is NaN; num and nan test for NaN."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "u" and cmp in ("lo", "ls", "hi", "hs"):
        return _UFUNC[cmp](a, b)
    if a.dtype.kind != "f":
        return _UFUNC[cmp](a, b)
    if ftz:
        a, b = flushed(a), flushed(b)
    unordered = np.isnan(a) | np.isnan(b)
    if cmp == "num":
        return ~unordered
    if cmp == "nan":
        return unordered
    if len(cmp) == 3:
        return _UFUNC[cmp[:2]](a, b) | unordered
    return _UFUNC[cmp](a, b) & ~unordered


def compare(a, b, d, cmp: str, ftz: bool) -> None:
    """setp with one destination."""
    np.copyto(d, comparison(a, b, cmp, ftz))


def compare_both(a, b, d, e, cmp: str, ftz: bool) -> None:
    """setp with the result and its complement."""
    value = comparison(a, b, cmp, ftz)
    np.copyto(d, value)
    np.copyto(e, ~value)


def compare_combined(a, b, c, d, how: tuple[str, bool, str]) -> None:
    """setp combined with a predicate."""
    cmp, ftz, boolean = how
    np.copyto(d, _BOOLEAN[boolean](comparison(a, b, cmp, ftz), c))


def compare_combined_both(a, b, c, d, e, how: tuple[str, bool, str]) -> None:
    """setp with both destinations, each combined with a predicate."""
    cmp, ftz, boolean = how
    value, c = comparison(a, b, cmp, ftz), np.array(c)
    np.copyto(d, _BOOLEAN[boolean](value, c))
    np.copyto(e, _BOOLEAN[boolean](~value, c))


def set_compare(a, b, d, cmp: str, ftz: bool, as_float: bool) -> None:
    """set: all ones or 1.0 where true."""
    np.copyto(d, np.where(comparison(a, b, cmp, ftz), 1 if as_float else -1, 0), casting="unsafe")


def in_window(a, d, space: str) -> None:
    """isspacep: does a generic address lie in the window of a state space."""
    start = np.uint64(data_movement.WINDOWS[space])
    if space == "const":
        np.copyto(d, False)
    elif space == "global":
        np.copyto(d, np.less(a, np.uint64(data_movement.SHARED_WINDOW)))
    else:
        np.copyto(d, np.subtract(a, start) < np.uint64(data_movement.WINDOW_BYTES))
