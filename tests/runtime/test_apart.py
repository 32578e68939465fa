"""What another library does to the compiler of its process does not reach our kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from tests.runtime.test_objects import SMALL, Named
from undertow.kernels import compile as compiling
from undertow.kernels.compile import OBJECT, CompileError, MachineCodeError
from undertow.runtime import apart, objects


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """A process whose compiler somebody has changed: here it does nothing but fail."""

    def changed(*_):
        raise CompileError("the compiler of this process is not as it was")

    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setattr(compiling, "_traced", changed)
    objects.forget()
    yield
    objects.forget()


def test_variants_are_compiled_in_an_interpreter_of_their_own(patched):
    entry = objects.precompile(SMALL, Named("fine"))
    assert entry.folder is not None and (entry.folder / OBJECT).read_bytes() == entry.files[OBJECT]
    assert callable(objects.load(SMALL, Named("fine")).function)


def test_what_the_compiler_says_there_is_said_here(patched):
    with pytest.raises(CompileError, match=r"refused for sm_100a in a process of its own failed: .*no such kernel"):
        objects.precompile(SMALL, Named("refused"))


def test_a_refusal_of_machine_code_stays_one(patched, monkeypatch):
    """It makes calls fall back, whichever interpreter it was found in. The other one is this one, one call deeper."""
    here = objects.precompile

    def refuse(*_):
        raise MachineCodeError("awaits a fence too late")

    def run(command, **_):
        monkeypatch.setattr(objects, "precompile", refuse)
        apart.main(*command[-2:])

    monkeypatch.setattr(apart.subprocess, "run", run)
    with pytest.raises(MachineCodeError, match=r"^awaits a fence too late$"):
        here(SMALL, Named("fine"))
    assert objects.refusal(SMALL, Named("fine")) == "awaits a fence too late"


def test_an_interpreter_that_dies_or_hangs_is_told(patched):
    with pytest.raises(CompileError, match="its process died"):
        objects.precompile(SMALL, Named("crashing"))
    with pytest.raises(CompileError, match="hanging for sm_100a: no end in 5 s"):
        apart.precompile_apart(SMALL, Named("hanging"), seconds=5)


def test_flash_attn_4_in_the_process_is_no_obstacle(tmp_path):
    """nvidia-cutlass-dsl 4.8.1 and quack 0.6.5: in this process the compiler would refuse every kernel of ours."""
    script = (
        "import flash_attn.cute, sys\n"
        "from tests.runtime.test_objects import SMALL, Named\n"
        "from undertow.runtime import apart, objects\n"
        "assert apart.is_patched(), 'flash-attn-4 no longer imports a package that changes the compiler'\n"
        "print(callable(objects.load(SMALL, Named('fine')).function))\n"
    )
    environment = os.environ | {"UNDERTOW_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True"]
