"""Compiled things find a folder on every machine, and many processes share it: public case C09."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from undertow import cache

ROOT = Path(__file__).resolve().parents[1]
FILES = {"a.bin": b"\0\1" * 500, "b.txt": b"text"}

# Makes an entry slowly and leaves a line for every time that it does. argv: what to do when the files are half written.
CHILD = """
import os, sys, time
from undertow import cache
def make():
    with open(os.path.join(sys.argv[1], "made"), "a") as log:
        log.write("once\\n")
    time.sleep(0.3)
    return {"a.bin": bytes(1000), "b.txt": b"text"}
if sys.argv[2] == "hang":
    def hang(source, target):
        open(os.path.join(sys.argv[1], "hanging"), "w").close()
        time.sleep(600)
    os.replace = hang
print(len(cache.fetch("entry", "k" * 64, make, lock_seconds=60).files["a.bin"]))
"""


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


def key() -> str:
    return cache.key_of(["release 1", "variant"])


def made() -> cache.Files:
    return dict(FILES)


def never() -> cache.Files:
    raise AssertionError("made although it was there")


def child(log: Path, folder: Path, then: str = "store") -> subprocess.Popen:
    environment = {**os.environ, "UNDERTOW_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(log), then]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_chosen_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "deep" / "folder"))
    assert cache.cache_folder() == tmp_path / "deep" / "folder"
    assert cache.cache_folder().is_dir()


@pytest.mark.parametrize("absolute", [True, False])
def test_the_folder_of_the_desktop_specification_is_honoured(tmp_path, monkeypatch, absolute):
    """Relative ones are to be ignored, says the XDG base directory specification."""
    monkeypatch.delenv("UNDERTOW_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg") if absolute else "xdg")
    expected = tmp_path / "xdg" / "undertow" if absolute else tmp_path / "home" / ".cache" / "undertow"
    assert cache.cache_folder() == expected


def test_an_unwritable_folder_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache.cache_folder().parent == tmp_path
    assert cache.cache_folder().stat().st_mode & 0o077 == 0, "others can put objects there for us to load"


def test_a_temporary_folder_that_somebody_else_made_is_not_trusted(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    somebody = os.getuid() + 1
    (tmp_path / f"undertow-{somebody}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    assert cache.cache_candidates() == [tmp_path / "file"]


def test_a_machine_without_any_is_told_which_were_tried(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(cache.CacheError, match=r"file.*set UNDERTOW_CACHE_DIR"):
        cache.cache_folder()


def test_what_was_made_is_found_again(root):
    first = cache.fetch("entry", key(), made)
    assert first.files == FILES and first.folder is not None and first.folder.parent == root
    assert cache.fetch("entry", key(), never) == first == cache.look_up("entry", key())
    assert [path.name for path in root.iterdir()] == [first.folder.name], "a lock or a scratch folder is left"


def test_the_key_follows_texts_and_sources(tmp_path):
    source = tmp_path / "source.py"
    keys = {key(), cache.key_of(["release 2", "variant"]), cache.key_of(["release 1variant"])}
    for content in ("one", "two"):
        source.write_text(content)
        keys.add(cache.key_of(["release 1", "variant"], [("source.py", source)]))
    assert len(keys) == 5


@pytest.mark.parametrize("file", [*FILES, cache.MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_entry_is_made_again(root, file, damage):
    folder = cache.fetch("entry", key(), made).folder
    assert folder is not None
    if damage == "cut":
        (folder / file).write_bytes((folder / file).read_bytes()[:-1])
    else:
        (folder / file).unlink()
    assert cache.look_up("entry", key()) is None
    assert cache.fetch("entry", key(), made).files == FILES
    assert cache.fetch("entry", key(), never).folder == folder
    assert list(root.iterdir()) == [folder]


def test_a_discarded_entry_is_made_again(root):
    cache.discard(cache.fetch("entry", key(), made))
    assert list(root.iterdir()) == []
    assert cache.fetch("entry", key(), lambda: {"new": b""}).files == {"new": b""}


def test_eight_processes_that_start_cold_make_one_entry(tmp_path, root):
    children = [child(tmp_path, root) for _ in range(8)]
    said = [process.communicate(timeout=120) for process in children]
    assert [process.returncode for process in children] == [0] * 8, said
    assert {out for out, _ in said} == {"1000\n"}
    assert (tmp_path / "made").read_text() == "once\n"


def test_a_process_killed_while_it_writes_leaves_the_others_fine(tmp_path, root):
    victim = child(tmp_path, root, "hang")
    end = time.monotonic() + 60
    while not (tmp_path / "hanging").exists() and time.monotonic() < end:
        time.sleep(0.02)
    waiting = child(tmp_path, root)
    time.sleep(0.3)
    assert waiting.poll() is None, "the victim holds the lock, and yet nobody waits for it"
    victim.kill()
    victim.communicate(timeout=60)
    out, errors = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (0, "1000\n"), errors
    assert (tmp_path / "made").read_text() == "once\nonce\n"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_will_do(root, monkeypatch, number):
    def refuse(handle, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert cache.fetch("entry", key(), made).folder is not None
    assert cache.fetch("entry", key(), never).files == FILES


def test_of_two_processes_without_locks_the_slower_one_finds_its_place_taken(root):
    def meanwhile_made_by_another() -> cache.Files:
        cache._store(root / f"entry-{key()[:24]}", FILES, key())
        return dict(FILES)

    assert cache.fetch("entry", key(), meanwhile_made_by_another).folder is not None
    assert cache.fetch("entry", key(), never).files == FILES


def test_a_lock_that_is_never_released_is_waited_for_in_vain_but_not_for_ever(root, caplog):
    root.mkdir()
    with open(root / f".entry-{key()[:24]}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        begin = time.monotonic()
        assert cache.fetch("entry", key(), made, lock_seconds=0.2).files == FILES
        assert 0.2 <= time.monotonic() - begin < 10
    assert "going on without the lock" in caplog.text


def test_a_full_disk_keeps_nothing_and_breaks_nothing(root, monkeypatch, caplog):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert cache.fetch("entry", key(), made) == cache.Entry(FILES, None)
    assert "No space left" in caplog.text
    assert list(root.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_read_all_the_same(root, monkeypatch):
    """As an image of a container has it, filled when it was built."""
    folder = cache.fetch("entry", key(), made).folder
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != root and allowed(path, mode))
    assert cache.cache_folder() != root
    assert cache.fetch("entry", key(), never).folder == folder


def test_what_cannot_be_made_is_nobodys_entry(root):
    def broken() -> cache.Files:
        raise RuntimeError("the compiler says no")

    with pytest.raises(RuntimeError, match="says no"):
        cache.fetch("entry", key(), broken)
    assert list(root.iterdir()) == []
    assert cache.fetch("entry", key(), made).files == FILES
