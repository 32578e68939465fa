"""Where compiled things are kept between runs: kernels, and the emulator's C++ library."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


class CacheError(ValueError):
    """No folder can be written; the message names those that were tried."""


def cache_folder() -> Path:
    """Return a writable folder: $UNDERTOW_CACHE_DIR, else ~/.cache/undertow, else a temporary one.

    Raises: CacheError if there is none.
    """
    chosen = os.environ.get("UNDERTOW_CACHE_DIR")
    candidates = [Path(chosen)] if chosen else [Path("~/.cache/undertow").expanduser()]
    candidates.append(Path(tempfile.gettempdir()) / f"undertow-{os.getuid()}")
    for candidate in candidates:
        with contextlib.suppress(OSError):
            candidate.mkdir(parents=True, exist_ok=True)
            if os.access(candidate, os.W_OK):
                return candidate
    raise CacheError(f"no writable cache folder among {[str(c) for c in candidates]}: set UNDERTOW_CACHE_DIR")
