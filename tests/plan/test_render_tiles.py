"""The picture of tiles and turns shows the tiles and turns of the integer functions."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter

from tools.regen import BANDS
from undertow.plan.render_tiles import SKIPPED, TILES, VISITED, tile_turns
from undertow.plan.tiles import EVERYTHING, Band

SVG = "{http://www.w3.org/2000/svg}"


def fills(svg: str) -> Counter:
    return Counter(rect.get("fill") for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"))


def numbers(svg: str) -> list[int]:
    """The ranks in the tiles, row by row of each column."""
    bold = [text for text in ElementTree.fromstring(svg).iter(f"{SVG}text") if text.get("font-weight")]
    return [int(text.text) for text in bold if text.text and text.text.isdigit()]


def test_tiles_are_visited_or_skipped():
    assert fills(tile_turns([("dense", EVERYTHING)]))[VISITED] == TILES**2
    causal = fills(tile_turns([("causal", Band(None, 0))]))
    assert (causal[VISITED], causal[SKIPPED]) == (15, 10)
    assert causal["url(#hatch)"] == TILES, "the diagonal"


def test_turns_of_a_causal_mask_are_the_steps_of_the_loop():
    steps = [step for key in range(TILES) for step in range(TILES - key)]
    assert numbers(tile_turns([("causal", Band(None, 0))])) == steps


def test_text_stays_on_the_paper():
    root = ElementTree.fromstring(tile_turns(BANDS))
    for text in root.iter(f"{SVG}text"):
        long = 0.62 * float(text.attrib["font-size"]) * len(text.text or "")
        left = float(text.attrib["x"]) - long * {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]]
        assert left >= 0 and left + long <= float(root.attrib["width"]), text.text
