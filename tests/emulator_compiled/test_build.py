"""Building the library: without a compiler, with a bad one, twice, and from the cache."""

from __future__ import annotations

import tomllib
import warnings

import numpy as np
import pytest

from tests.emulator.kernels import kernel
from undertow import emulator as emu
from undertow.emulator.compiled import build, encode_machine, library

BODY = "mul.wide.u32 %d0, %t, 4; add.s64 %d1, %p0, %d0; st.global.u32 [%d1], %t;"
TINY = {"tiny.cpp": 'extern "C" int answer() { return 42; }\n'}


def launch(backend: str) -> tuple[emu.Result, np.ndarray]:
    out = np.zeros(32, np.uint32)
    description = emu.Launch(grid=(1, 1, 1), block=(32, 1, 1), params=(emu.Pointer(out),))
    return emu.launch(kernel(BODY, 1), description, emu.Options(backend=backend)), out


@pytest.fixture
def unloaded():
    """The library is looked up afresh in the test, and again by whoever comes after it."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """Make $CXX a shell script with this body; "$@" are the compiler's arguments."""

    def install(body: str):
        script = tmp_path / "compiler"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    return install


@pytest.mark.parametrize("backend", ["compiled", "auto"])
def test_without_a_compiler_numpy_takes_over_and_says_so_in_one_line(monkeypatch, unloaded, backend):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, out = launch(backend)
    assert result.backend == "numpy"
    assert out.tolist() == list(range(32))
    assert [str(w.message) for w in caught] == ["emulator: no C++ compiler: tried g++, clang++, c++; running on NumPy"]


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(monkeypatch, tmp_path, fake_compiler):
    fake_compiler('echo "error: the sun is in my eyes" >&2; exit 1')
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(build.CompilerMissing, match="the sun is in my eyes"):
        build.library()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_stumbles_over_its_vectoriser_gets_a_second_chance(tmp_path, fake_compiler):
    real = build.find_compiler()
    script = fake_compiler(
        f'case "$*" in *-fno-tree-vectorize*|*-shared*) exec {real} "$@";; *) echo "internal error" >&2; exit 1;; esac'
    )
    build._build(str(script), TINY, tmp_path / "library")
    assert (tmp_path / "library" / build.LIBRARY).exists()


def test_whoever_builds_second_uses_what_the_first_has_built(tmp_path):
    folder = tmp_path / "library"
    build._build(build.find_compiler(), TINY, folder)
    first = (folder / build.LIBRARY).stat().st_ino
    build._build(build.find_compiler(), TINY, folder)
    assert (folder / build.LIBRARY).stat().st_ino == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["library"]


def test_a_built_library_is_found_again(monkeypatch):
    path = build.library()

    def refuse(*arguments):
        raise AssertionError("built although it was there")

    monkeypatch.setattr(build, "_build", refuse)
    assert build.library() == path


def test_the_key_depends_on_sources_compiler_and_flags(monkeypatch, fake_compiler):
    compiler, files = build.find_compiler(), dict(TINY)
    key = build._key(compiler, files)
    assert build._key(compiler, files) == key
    assert build._key(compiler, {**files, "tiny.cpp": "int other;"}) != key
    assert build._key(str(fake_compiler("echo version 2")), files) != key
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build._key(compiler, files) != key


def test_a_form_without_compiled_code_runs_on_numpy_under_auto_only(monkeypatch):
    monkeypatch.delitem(encode_machine.FORMS, "activemask.b32")
    text = kernel(f"activemask.b32 %r1; {BODY}", 1)
    out = np.zeros(32, np.uint32)
    description = emu.Launch(grid=(1, 1, 1), block=(32, 1, 1), params=(emu.Pointer(out),))
    with pytest.raises(emu.UnsupportedPtx, match=r"activemask\.b32: no compiled form"):
        emu.launch(text, description, emu.Options(backend="compiled"))
    with pytest.warns(UserWarning, match=r"activemask\.b32: no compiled form; running on NumPy"):
        assert emu.launch(text, description, emu.Options(backend="auto")).backend == "numpy"
    assert out.tolist() == list(range(32))


def test_wheels_carry_the_sources():
    root = build.RUNTIME.parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["undertow"]
    carried = {path for pattern in patterns for path in (root / "undertow").glob(pattern)}
    sources = set(build.RUNTIME.iterdir())
    assert sources and sources <= carried
