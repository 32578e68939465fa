"""What the documents show runs, and where they point there is something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("undertow/**/*.md"), ROOT / "tests/README.md"]
)


def python_blocks() -> Iterator[tuple[str, str]]:
    """The Python of each document, blocks joined: a later block may use what an earlier one made."""
    for document in DOCUMENTS:
        blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        if blocks:
            yield str(document.relative_to(ROOT)), "\n".join(blocks)


@pytest.mark.parametrize("name, code", list(python_blocks()))
def test_examples_run_as_they_are_printed(name: str, code: str) -> None:
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    result = subprocess.run([sys.executable, "-c", path + code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"{name}: {result.stderr}"


@pytest.mark.parametrize("program", sorted(ROOT.glob("docs/examples/*.py")), ids=lambda path: path.name)
def test_programs_run(program: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def anchors(document: Path) -> set[str]:
    """The heading anchors of a document, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{document.name} links to {target}"
