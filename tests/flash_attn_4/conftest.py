"""The peer kernels, compiled in child processes once for all rooms and workers that want them, and kept on disk."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from undertow import cache

CHILD = Path(__file__).with_name("compile_child.py")
COMPILERS = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")  # packages that decide what comes out
KERNELS = {"preprocess": "bwd_preprocess", "main": "bwd_sm(100|90)", "postprocess": "bwd_postprocess"}  # in file names


@pytest.fixture(scope="session")
def flash_attn_4_ptx() -> dict[str, str]:
    """PTX of the three SM100 kernels by role."""
    return compile_backward("sm_100")


@pytest.fixture(scope="session")
def flash_attn_4_sm90_ptx() -> dict[str, dict[str, str]]:
    """PTX of the three SM90 kernels by mask (dense, causal) and role."""
    return {mask: compile_backward("sm_90", mask) for mask in ("dense", "causal")}


def compile_backward(*how: str) -> dict[str, str]:
    """PTX of the three kernels by role. Skips where flash-attn-4 is not installed, except in continuous integration."""
    if importlib.util.find_spec("flash_attn") is None:
        message = "flash-attn-4 is not installed: pip install 'undertow[dev]'"
        if os.environ.get("CI") == "true" or os.environ.get("UNDERTOW_CI"):
            pytest.fail(message)
        pytest.skip(message)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in COMPILERS]
    environment = sorted(item for item in os.environ.items() if item[0].startswith(("CUTE_DSL_", "FLASH_ATTENTION_")))
    key = cache.key_of((*versions, repr(environment), *how), [(CHILD.name, CHILD)])
    files = cache.fetch("-".join(("flash-attn-4", *how)), key, lambda: compiled(*how)).files
    return {role: files[role].decode() for role in KERNELS}


def compiled(*how: str) -> cache.Files:
    """What the child leaves, by role."""
    with tempfile.TemporaryDirectory(prefix="flash-attn-4-") as name:
        command = [sys.executable, str(CHILD), name, *how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"flash-attn-4 did not compile:\n{done.stderr[-3000:]}"
        found = {}
        for role, marker in KERNELS.items():
            (path,) = [path for path in Path(name).glob("*.ptx") if re.search(marker, path.name)]
            found[role] = path.read_bytes()
    return found
