"""Compiled things find a folder on every machine."""

import tempfile

import pytest

from undertow import cache


def test_the_chosen_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "deep" / "folder"))
    assert cache.cache_folder() == tmp_path / "deep" / "folder"
    assert cache.cache_folder().is_dir()


def test_an_unwritable_folder_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache.cache_folder().parent == tmp_path


def test_a_machine_without_any_is_told_which_were_tried(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(cache.CacheError, match=r"file.*set UNDERTOW_CACHE_DIR"):
        cache.cache_folder()
