"""Sphinx extension: links from pages to files of the repository that are no pages lead to their highlighted source."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "source"  # of the site, where the files are shown
PAGES = {"undertow/kernels/sm100/README.md": "sm100-kernel"}  # files that a page includes whole


class RepositoryLinks(SphinxTransform):
    """Turns links to files into links to their pages, before they are taken for downloads."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Replace the links of one document."""
        here = Path(self.env.srcdir) / posixpath.dirname(self.env.docname)
        for link in list(self.document.findall(addnodes.download_reference)):
            self._replace(link, (here / link["reftarget"]).resolve())
        for link in list(self.document.findall(addnodes.pending_xref)):
            file = Path(f"{link.get('reftarget')}.md")  # documents outside of the sources are named by whole paths
            if link.get("refdomain") == "doc" and file.is_absolute() and file.is_file():
                self._replace(link, file)

    def _replace(self, link: nodes.Element, file: Path) -> None:
        if not file.is_relative_to(ROOT) or not file.is_file():
            return
        name = file.relative_to(ROOT).as_posix()
        here = posixpath.dirname(self.env.docname) or "."
        uri = posixpath.relpath(PAGES.get(name, f"{FOLDER}/{name}"), here) + ".html"
        link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))
        if name not in PAGES:
            shown_files(self.env).add(name)


def shown_files(env: Any) -> set[str]:
    """Paths of the files that some page links to."""
    if not hasattr(env, "repository_files"):
        env.repository_files = set()
    return env.repository_files


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each of them, as `html-collect-pages` asks."""
    highlighter = getattr(app.builder, "highlighter", None)
    if highlighter is None:
        return
    for name in sorted(shown_files(app.env)):
        language = _language(name)
        code = highlighter.highlight_block((ROOT / name).read_text(encoding="utf-8"), language, linenos="inline")
        title = f"<code>{name}</code>"
        yield f"{FOLDER}/{name}", {"title": name, "body": f"<h1>{title}</h1>{code}"}, "page.html"


def _language(name: str) -> str:
    """What to highlight a file as. The lexer of PTX does not know guards."""
    try:
        return "text" if name.endswith(".ptx") else get_lexer_for_filename(name).aliases[0]
    except ClassNotFound:
        return "text"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform and the pages."""
    app.add_transform(RepositoryLinks)
    app.connect("html-collect-pages", pages)
    return {"version": "1", "parallel_read_safe": False, "env_version": 1}
