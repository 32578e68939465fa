"""Sphinx directive `command-help`: the help of every `undertow` command, as it prints it, made at build time."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from undertow import cli

WIDTH = "100"  # columns that the help is wrapped to: what a page shows without scrolling


def help_of(name: str) -> str:
    """What `undertow NAME --help` prints."""
    said = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    try:
        with contextlib.redirect_stdout(said):
            code = cli.main([name, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    if code != cli.RIGHT:
        raise RuntimeError(f"undertow {name} --help ended with exit code {code}")
    return said.getvalue().rstrip()


class CommandHelp(SphinxDirective):
    """A section for each command: its line in the overview, then its help."""

    def run(self) -> list[nodes.Node]:
        """Make the sections."""
        return [self._section(name, line) for name, (_, line) in cli.COMMANDS.items()]

    def _section(self, name: str, line: str) -> nodes.section:
        section = nodes.section(ids=[f"undertow-{name}"], names=[f"undertow {name}"])
        title = nodes.title("", "", nodes.literal("", f"undertow {name}"))
        text = help_of(name)
        paragraph = nodes.paragraph("", f"{line[0].upper()}{line[1:]}.")
        section += [title, paragraph, nodes.literal_block(text, text, language="text")]
        return section


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"version": "1", "parallel_read_safe": True}
