"""The commands that docs/hazards.md shows on its example do what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from undertow import cli
from undertow.mutate.survivors import CATEGORIES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/hazards.md").read_text(encoding="utf-8")
COMMANDS = [line.split()[1:] for line in re.findall(r"^    undertow .*$", DOCUMENT, re.MULTILINE)]
ON_THE_EXAMPLE = [words for words in COMMANDS if any("docs/examples" in word for word in words)]


@pytest.mark.parametrize("words", ON_THE_EXAMPLE, ids=lambda words: words[0])
def test_a_printed_command_finds_the_example_in_order(words, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    assert cli.main(words) == 0
    assert "scale.ptx" in capfd.readouterr().out


def test_the_example_shows_both_commands():
    assert sorted(words[0] for words in ON_THE_EXAMPLE) == ["check", "mutate"]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_printed_command_line_is_one_that_exists(words):
    """Whatever stands behind two blanks is a comment."""
    parser, _ = cli._parser(words)
    shown = [word for word in words if word.startswith("-") or "/" in word]
    assert parser.parse_args([words[0], *shown] if "all" in words else words).command == words[0]


def test_every_category_is_explained():
    rows = re.findall(r"^\| `([\w-]+)` \|", DOCUMENT.partition("| category |")[2], re.MULTILINE)
    assert rows[: len(CATEGORIES)] == list(CATEGORIES)
