"""One HTML page: sections of figures and tables that say what kind of number they hold, where from, and who makes it.

The page loads nothing, has no scripts, and follows the reader's choice of light or dark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from pathlib import Path

STYLE = Path(__file__).resolve().with_name("style.css")


class Label(StrEnum):
    """What kind of number it is."""

    PLAN = "plan"
    EMULATED = "emulated"
    PREDICTED = "predicted"
    MEASURED = "measured"
    PUBLISHED = "published"
    INFERRED = "inferred"
    ASSUMED = "assumed"


MEANINGS = {
    Label.PLAN: "follows from the kernel's plan, which is proved before it is compiled",
    Label.EMULATED: "happened when the compiled PTX was executed on the emulator",
    Label.PREDICTED: "from a model of the units, with a band; nothing was run on that GPU",
    Label.MEASURED: "from a run on the GPU that is named",
    Label.PUBLISHED: "by others, of their kernel or of the hardware; not ours",
    Label.INFERRED: "a constant that follows from what others have measured or published, with a range",
    Label.ASSUMED: "a constant that nobody has measured, with a range; what rests on it is drawn hatched",
}


@dataclass(frozen=True)
class Source:
    """Where numbers come from. command: that makes them, if there is one."""

    label: Label
    text: str
    command: str = ""


@dataclass(frozen=True)
class Figure:
    """An SVG of ours with numbers of one source; mixed: sources of its other numbers."""

    svg: str
    caption: str
    source: Source
    mixed: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Cell:
    """A number of a table whose source is another than its column's."""

    text: str
    source: Source


@dataclass(frozen=True)
class Table:
    """columns: names; sources: of each column, None for words that are no numbers, or for cells with their own."""

    caption: str
    columns: tuple[str, ...]
    sources: tuple[Source | None, ...]
    rows: Sequence[Sequence[str | Cell]]


@dataclass(frozen=True)
class Prose:
    """A paragraph. Numbers in it are written by `number`; source: of all of them."""

    text: str
    source: Source | None = None


@dataclass(frozen=True)
class Missing:
    """What is not there, and what would make it."""

    what: str
    command: str = ""


Part = Figure | Table | Prose | Missing


@dataclass
class Section:
    """A part of the page. key: of its link. command: that makes all of it alone. wrong: what should not be so."""

    key: str
    title: str
    command: str
    parts: list[Part] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        return [part.what for part in self.parts if isinstance(part, Missing)]


def page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The whole file."""
    links = "".join(f'<li><a href="#{section.key}">{escape(section.title)}</a></li>' for section in sections)
    kinds = "".join(f"<li>{badge(label)} {escape(meaning)}</li>" for label, meaning in MEANINGS.items())
    body = "\n".join(_section(section) for section in sections)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            '<meta name="color-scheme" content="light dark"/>',
            f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>",
            f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>",
            f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main>',
            f'<section id="labels"><h2>What the labels say</h2><ul class="labels">{kinds}</ul></section>',
            body,
            "</main>\n</body>\n</html>\n",
        ]
    )


def badge(label: Label) -> str:
    """The label as a word with a colour of its own."""
    return f'<span class="badge {label}">{label}</span>'


def _section(section: Section) -> str:
    made = f'<p class="made">Made by <code>{escape(section.command)}</code></p>' if section.command else ""
    parts = "\n".join(_part(part, f"{section.key}-{index}") for index, part in enumerate(section.parts))
    made += "".join(f'<p class="wrong" role="alert">Wrong: {_inline(wrong)}</p>' for wrong in section.wrong)
    return f'<section id="{section.key}">\n<h2>{escape(section.title)}</h2>\n{made}\n{parts}\n</section>'


def _part(part: Part, key: str) -> str:
    if isinstance(part, Figure):
        return _figure(part, key)
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Prose):
        labelled = _labelled(part.source) if part.source else ""
        mark = f"{badge(part.source.label)} " if part.source else ""
        return f"<p{labelled}>{mark}{_inline(part.text)}</p>"
    command = f" It is made by <code>{escape(part.command)}</code>." if part.command else ""
    return f'<p class="missing" role="note">Not here: {_inline(part.what)}.{command}</p>'


def _figure(figure: Figure, key: str) -> str:
    sources = (figure.source, *figure.mixed)
    badges = " ".join(badge(label) for label in dict.fromkeys(source.label for source in sources))
    told = " ".join(_told(source) for source in sources)
    labels = " ".join(dict.fromkeys(source.label for source in sources))
    texts = "; ".join(source.text for source in sources)
    return (
        f'<figure data-label="{labels}" data-source="{escape(texts)}"><div class="wide" tabindex="0">'
        f"{embedded(figure.svg, key)}</div>"
        f'<figcaption>{badges} {_inline(figure.caption)} <span class="source">{told}</span></figcaption></figure>'
    )


def _table(table: Table) -> str:
    assert all(len(row) == len(table.columns) == len(table.sources) for row in table.rows)
    used = dict.fromkeys(source for source in table.sources if source)
    labels = list(dict.fromkeys(source.label for source in used))
    heads = "".join(_head(table, column, len(labels) > 1) for column in range(len(table.columns)))
    rows = "".join(f"<tr>{_cells(table, row)}</tr>" for row in table.rows)
    told = " ".join(_told(source) for source in used)
    badges = "".join(f"{badge(label)} " for label in labels)
    return (
        f'<div class="wide" tabindex="0"><table><caption>{badges}{_inline(table.caption)} '
        f'<span class="source">{told}</span>'
        f"</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _head(table: Table, column: int, several: bool) -> str:
    """A column's name, above its numbers. several: whether the table has several kinds of them."""
    source = table.sources[column]
    right = bool(table.rows) and column > 0 and all(_is_number(row[column]) for row in table.rows)
    mark = f" {badge(source.label)}" if source and several else ""
    number = ' class="number"' if right else ""
    return f'<th scope="col"{_labelled(source)}{number}>{_inline(table.columns[column])}{mark}</th>'


def _is_number(content: str | Cell) -> bool:
    text = content.text if isinstance(content, Cell) else content
    return bool(re.match(r"[-+]?[\d.]|-$", text))


def _cells(table: Table, row: Sequence[str | Cell]) -> str:
    cells = []
    for index, (content, of_column) in enumerate(zip(row, table.sources, strict=True)):
        text, source = (content.text, content.source) if isinstance(content, Cell) else (content, of_column)
        kind = "td" if index else 'th scope="row"'
        number = ' class="number"' if source and index and _is_number(text) else ""
        told = badge(source.label) if source and text == source.label else _inline(text)
        cells.append(f"<{kind}{_labelled(source)}{number}>{told}</{kind.split()[0]}>")
    return "".join(cells)


def _labelled(source: Source | None) -> str:
    return f' data-label="{source.label}" data-source="{escape(source.text)}"' if source else ""


def _told(source: Source) -> str:
    command = f", made by <code>{escape(source.command)}</code>" if source.command else ""
    return f"{str(source.label).capitalize()}: {_inline(source.text)}{command}."


def _inline(text: str) -> str:
    """Escaped; what stands between backquotes is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def embedded(svg: str, key: str) -> str:
    """An SVG as a part of the page: its ids are made unlike those of all others."""
    names = re.findall(r'\bid="([^"]+)"', svg)
    for name in names:
        svg = svg.replace(f'id="{name}"', f'id="{key}-{name}"').replace(f"url(#{name})", f"url(#{key}-{name})")
    return svg.strip()
