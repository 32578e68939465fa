"""Charts and maps, read back: bars as high as their values, buffers as wide as their bytes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from tests.report.reading import SVG
from undertow.kernels.sm90.plan import plan as hopper_plan
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan.schema import SMEM_BYTES_PER_CTA
from undertow.report.bars import Axis, Bar, Look, bars
from undertow.report.smem_map import WIDTH, smem_maps

LOOKS = {"a": Look("#111111"), "b": Look("#222222", hatched=True)}


def of(svg: str, words: str) -> tuple[float, float]:
    """Top and height of the bar with these words."""
    for box in ET.fromstring(svg).iter(f"{SVG}rect"):
        if (box.findtext(f"{SVG}title") or "").startswith(words):
            return float(box.get("y", "")), float(box.get("height", ""))
    raise AssertionError(f"no bar {words}")


def test_bars_are_as_high_as_their_values():
    svg = bars("t", Axis("x"), LOOKS, [Bar("g", "a", 100.0), Bar("g", "b", 50.0), Bar("h", "a", 25.0)])
    heights = [of(svg, words)[1] for words in ("g, a", "g, b", "h, a")]
    assert heights[0] / heights[1] == pytest.approx(2, rel=0.01) and heights[1] / heights[2] == pytest.approx(
        2, rel=0.01
    )


def test_bars_hang_from_a_base_where_they_are_below_it():
    svg = bars("t", Axis("x", base=1.0, digits=2), LOOKS, [Bar("g", "a", 1.1), Bar("g", "b", 0.9)])
    (top_a, high_a), (top_b, high_b) = of(svg, "g, a"), of(svg, "g, b")
    assert top_a + high_a == pytest.approx(top_b, abs=0.2) and high_a == pytest.approx(high_b, abs=0.2)


def test_bands_are_told_and_within_the_picture():
    svg = bars("t", Axis("x", base=1.0, digits=2), LOOKS, [Bar("g", "b", 1.1, (0.8, 1.6))])
    assert "g, b: 1.10, 0.80 to 1.60" in (ET.fromstring(svg).findtext(f"{SVG}desc") or "")
    height = float(ET.fromstring(svg).get("height", ""))
    for number in re.findall(r"M[\d.]+,([-\d.]+) L[\d.]+,([-\d.]+)", svg):
        assert all(0 < float(y) < height for y in number)


def test_only_hatched_series_are_hatched():
    given = [Bar("g", "a", 1.0), Bar("g", "b", 2.0)]
    count = bars("t", Axis("x"), LOOKS, given).count("url(#hatch)")
    assert count == 2  # the bar and its legend
    assert not bars("t", Axis("x"), LOOKS, given[:1]).count("url(#hatch)")


def test_buffers_are_as_wide_as_their_bytes():
    svg = smem_maps([plan(name) for name in SCHEDULES])
    boxes = [box for box in ET.fromstring(svg).iter(f"{SVG}rect") if box.get("rx") == "3" and box.get("fill") != "none"]
    regions = plan("split").smem
    assert len(boxes) == len(regions), "all schedules share one map"
    for box, region in zip(boxes, regions):
        assert float(box.get("width", "")) == pytest.approx(region.bytes / SMEM_BYTES_PER_CTA * WIDTH, abs=0.1)


def test_kernels_with_other_maps_have_panels_of_their_own():
    svg = smem_maps([plan("split"), hopper_plan()])
    texts = [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert sum(f"of {SMEM_BYTES_PER_CTA} bytes" in text for text in texts) == 2
    assert {"sQ[0]", "sQ[1]", "sdS[1]"} <= set(texts)
