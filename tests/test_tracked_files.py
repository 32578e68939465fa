"""What is kept in the repository: nothing that a tool left behind, because history keeps it for ever."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 2**20
LEFT_BEHIND = {".tar", ".tgz", ".zip", ".xz", ".so", ".o", ".cubin", ".whl", ".orig", ".rej", ".pyc"}


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name]


def test_no_file_is_large_or_made_by_a_tool():
    files = [path for path in tracked() if path.is_file()]
    assert len(files) > 100
    assert {str(path.relative_to(ROOT)) for path in files if path.suffix in LEFT_BEHIND} == set()
    assert {str(path.relative_to(ROOT)) for path in files if path.stat().st_size > MOST_BYTES} == set()
