"""The peer kernels, compiled once per session in child processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {"preprocess": "bwd_preprocess", "main": "bwd_sm(100|90)", "postprocess": "bwd_postprocess"}  # in file names


@pytest.fixture(scope="session")
def flash_attn_4_ptx(tmp_path_factory) -> dict[str, str]:
    """PTX of the three SM100 kernels by role."""
    return compile_backward(tmp_path_factory.mktemp("flash_attn_4"), "sm_100")


@pytest.fixture(scope="session")
def flash_attn_4_sm90_ptx(tmp_path_factory) -> dict[str, dict[str, str]]:
    """PTX of the three SM90 kernels by mask (dense, causal) and role."""
    return {
        mask: compile_backward(tmp_path_factory.mktemp(f"flash_attn_4_{mask}"), "sm_90", mask)
        for mask in ("dense", "causal")
    }


def compile_backward(folder: Path, *how: str) -> dict[str, str]:
    """PTX of the three kernels by role. Skips where flash-attn-4 is not installed, except in continuous integration."""
    if importlib.util.find_spec("flash_attn") is None:
        message = "flash-attn-4 is not installed: pip install 'undertow[dev]'"
        if os.environ.get("CI") == "true" or os.environ.get("UNDERTOW_CI"):
            pytest.fail(message)
        pytest.skip(message)
    child = Path(__file__).with_name("compile_child.py")
    done = subprocess.run([sys.executable, str(child), str(folder), *how], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"flash-attn-4 did not compile:\n{done.stderr[-3000:]}"
    found = {}
    for role, marker in KERNELS.items():
        (path,) = [path for path in folder.glob("*.ptx") if re.search(marker, path.name)]
        found[role] = path.read_text()
    return found
