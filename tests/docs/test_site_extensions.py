"""What the site makes of docstrings and commands."""

from __future__ import annotations

from pathlib import Path

import pytest

import undertow
from tools.sphinx_commands import help_of
from tools.sphinx_docstrings import parts, to_rst
from undertow.cli import COMMANDS


def test_parts_begin_with_names_and_known_words():
    text = "Softened. q: (batch, 64). k, v: (batch; see q: no), any. Returns out like q. Raises: ValueError."
    assert parts(text, ["q", "k", "v"]) == (
        "Softened.",
        [
            ("q", "(batch, 64)."),
            ("k, v", "(batch; see q: no), any."),
            ("Returns", "out like q."),
            ("Raises", "ValueError."),
        ],
    )


def test_names_within_a_sentence_begin_nothing():
    assert parts("They are like q: contiguous.", ["q"]) == ("They are like q: contiguous.", [])


def test_markup_stays_the_characters_that_it_is():
    summary, _, term, item, _ = to_rst(["Add |x| to *all*.", "", "x_: see `f(x)`, x: y."], ["x_"])
    assert summary == r"Add \|x\| to \*all\*."
    assert (term, item) == ("``x_``", r"    see ``f(x)``, x\: y.")


def test_formulas_and_examples_are_kept_as_they_are():
    lines = ["Sum.", "", "With", "    a = b  |c|", "", ">>> f(1)  # *", "2"]
    formula = [".. code-block:: text", "", "    With", "        a = b  |c|", ""]
    assert to_rst(lines, []) == ["Sum.", "", *formula, ">>> f(1)  # *", "2", ""]


def test_arguments_below_a_heading_are_the_same_as_without_one():
    lines = ["Run.", "", "Args:", "    module: text,", "        or a program.", "    options: which."]
    listed = ["``module``", "    text, or a program.", "", "``options``", "    which.", ""]
    assert to_rst(lines, ["module", "options"]) == ["Run.", "", *listed]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name):
    text = help_of(name)
    assert text.startswith(f"usage: undertow {name} ") and "--json" in text


@pytest.mark.parametrize("name", undertow.__all__)
def test_what_a_user_calls_is_in_the_api(name):
    api = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    assert f".. autofunction:: undertow.{name}\n" in api
