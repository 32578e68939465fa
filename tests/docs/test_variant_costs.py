"""The costs that docs/variants.md prints are those of the installed compiler, if it is the one that they name."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from tools.variant_costs import report

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "variants.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_instruction_counts_are_what_is_executed():
    named = re.search(r"nvidia-cutlass-dsl\s+([\d.]+\d)", DOCUMENT)
    assert named is not None
    if importlib.metadata.version("nvidia-cutlass-dsl") != named[1]:
        pytest.skip(f"the document speaks of nvidia-cutlass-dsl {named[1]}")
    for line in filter(None, report().splitlines()):
        assert line in DOCUMENT, "python tools/variant_costs.py prints something else"
