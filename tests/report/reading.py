"""A page read back: that it is well formed, loads nothing, and labels its numbers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

from undertow.report.page import Label

SVG = "{http://www.w3.org/2000/svg}"
NUMBER = re.compile(r"[-+]?\d[\d.,]*%?( (to|x) [-+]?[\d.,]+)?( x \S+)?")  # a cell that is a number, a range, a ratio
LOADS = re.compile(
    r"""(src|href)=["'](?!#)|url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)|<script|<link|<iframe"""
)


def tree(html: str) -> ET.Element:
    """The page as XML: fails if a tag is not closed."""
    return ET.fromstring(html.replace("<!DOCTYPE html>", "", 1))


def unlabelled(html: str) -> list[str]:
    """Numbers in cells and pictures that do not say what kind they are and where they come from."""
    found = []
    for element, labelled in _walk(tree(html), False):
        text = (element.text or "").strip()
        number = element.tag in ("td", f"{SVG}text") and NUMBER.fullmatch(text)
        if number and not labelled:
            found.append(text)
    return found


def _walk(element: ET.Element, labelled: bool) -> Iterator[tuple[ET.Element, bool]]:
    labels = element.get("data-label", "").split()
    labelled = labelled or bool(labels and element.get("data-source") and set(labels) <= {*Label})
    yield element, labelled
    for child in element:
        yield from _walk(child, labelled)


def loads(html: str) -> list[str]:
    """What a browser would fetch."""
    return [match.group() for match in LOADS.finditer(html)]


def ids(html: str) -> list[str]:
    return [name for element in tree(html).iter() if (name := element.get("id"))]
