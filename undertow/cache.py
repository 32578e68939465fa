"""Where compiled things are kept between runs, safely for many processes: kernels, and the emulator's C++ library.

An entry is a folder of files that appears by one rename and holds their checksums, so nobody sees half of one and a
damaged one is made again. Whoever makes an entry holds its lock from the check to the rename: of many ranks that start
cold one compiles and the others wait. Where the file system has no locks each compiles for itself, which is slower
and as right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LOCK_SECONDS = 600.0  # longer than any compilation; whoever has waited that long makes the entry without the lock
POLL_SECONDS = 0.02
MANIFEST = "entry.json"
_HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)  # by someone else; other errors mean that there are no locks
_LOG = logging.getLogger(__name__)

Files = dict[str, bytes]


class CacheError(ValueError):
    """No folder can be written; the message names those that were tried."""


@dataclass(frozen=True)
class Entry:
    """files: name -> verified contents. folder: where they lie; None if they could not be kept."""

    files: Files
    folder: Path | None


def cache_candidates() -> list[Path]:
    """The folders that may hold entries, best first.

    $UNDERTOW_CACHE_DIR alone, or $XDG_CACHE_HOME/undertow, or ~/.cache/undertow; then a temporary one of this user.
    """
    chosen, user = os.environ.get("UNDERTOW_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        first = Path(chosen)
    elif user and Path(user).is_absolute():  # the specification tells to ignore a relative one
        first = Path(user) / "undertow"
    else:
        first = Path("~/.cache/undertow").expanduser()
    temporary = Path(tempfile.gettempdir()) / f"undertow-{os.getuid()}"
    return [first, temporary] if _is_own(temporary) else [first]


def _is_own(folder: Path) -> bool:
    """Whether nobody else has made a folder that anybody may make: what lies in it is loaded and executed."""
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return True  # it does not exist


def cache_folder() -> Path:
    """Return the first of `cache_candidates` that can be written.

    Raises: CacheError if there is none.
    """
    candidates = cache_candidates()
    for candidate in candidates:
        own = candidate is not candidates[0]  # what others could write to, they could make us load
        with contextlib.suppress(OSError):
            candidate.mkdir(mode=0o700 if own else 0o777, parents=True, exist_ok=True)
            if os.access(candidate, os.W_OK):
                return candidate
    raise CacheError(f"no writable cache folder among {[str(c) for c in candidates]}: set UNDERTOW_CACHE_DIR")


def key_of(parts: Iterable[str], sources: Iterable[tuple[str, Path]] = ()) -> str:
    """Return a hash of texts and of source files, each under the name that counts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for name, path in sources:
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def look_up(name: str, key: str) -> Entry | None:
    """Return the entry if some folder has it undamaged; folders that cannot be written are read as well."""
    for root in cache_candidates():
        folder = root / _folder_name(name, key)
        files = _verified(folder, key)
        if files is not None:
            return Entry(files, folder)
    return None


def fetch(name: str, key: str, make: Callable[[], Files], lock_seconds: float = LOCK_SECONDS) -> Entry:
    """Return an entry, made by one process at a time if nobody has it.

    Args:
        name: short name, the visible part of the folder's.
        key: from `key_of`.
        make: returns the files; called at most once.
        lock_seconds: how long another process may take before this one stops waiting for it.
    Raises:
        CacheError if no folder can be written; whatever `make` raises.
    """
    entry = look_up(name, key)
    if entry is not None:
        return entry
    folder = cache_folder() / _folder_name(name, key)
    with locked(folder.parent / f".{folder.name}.lock", lock_seconds):
        entry = look_up(name, key)
        if entry is None:
            files = make()
            entry = Entry(files, folder if _store(folder, files, key) else None)
    return entry


def _folder_name(name: str, key: str) -> str:
    return f"{name}-{key[:24]}"


def _verified(folder: Path, key: str) -> Files | None:
    """The files of an entry, or None if it is absent, damaged or another one's."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {name: (folder / name).read_bytes() for name in manifest["sha256"]}
        undamaged = manifest["sha256"] == _digests(files)
        return files if undamaged and manifest["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digests(files: Files) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _store(folder: Path, files: Files, key: str) -> bool:
    """Keep an entry if it can be kept; what is there already is replaced if it is damaged."""
    try:
        with _scratch_folder(folder) as scratch:
            new = scratch / "new"
            new.mkdir()
            for name, content in files.items():
                (new / name).write_bytes(content)
            (new / MANIFEST).write_text(json.dumps({"key": key, "sha256": _digests(files)}, indent=1))
            if folder.exists() and _verified(folder, key) is None:
                os.replace(folder, scratch / "damaged")
            os.replace(new, folder)
    except OSError as error:  # the disk is full, or another process without locks was faster
        if _verified(folder, key) is None:
            _LOG.warning("%s cannot be kept in the cache: %s", folder.name, error)
            return False
    return True


@contextlib.contextmanager
def _scratch_folder(folder: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock of an entry, or go on without it where that is impossible or takes too long.

    The system drops the lock of a process that dies. The file goes with the lock: whoever still waits for it looks for
    the entry afterwards.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        _LOG.debug("no lock %s: %s", path, error)
        yield
        return
    held = False
    try:
        held = _wait_for(handle, path, seconds)
        yield
    finally:
        with contextlib.suppress(OSError):
            if held:
                path.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a child process may hold a copy of the handle
        os.close(handle)


def _wait_for(handle: int, path: Path, seconds: float) -> bool:
    """Whether the lock was got."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _HELD:
                _LOG.debug("%s has no locks: %s", path.parent, error)
                return False
        if time.monotonic() > end:
            _LOG.warning("%s has been locked for %g s: going on without the lock", path, seconds)
            return False
        time.sleep(POLL_SECONDS)


def discard(entry: Entry) -> None:
    """Take an entry away that turned out to be of no use; where that is not allowed, it stays."""
    if entry.folder is not None:
        with contextlib.suppress(OSError), _scratch_folder(entry.folder) as scratch:
            os.replace(entry.folder, scratch / "discarded")
