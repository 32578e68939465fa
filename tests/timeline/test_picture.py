"""Pictures of timelines, read back: what is drawn where, on which scale, and what is marked as a guess."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from tests.timeline.handmade import timeline
from undertow.plan.drawing import ALARM
from undertow.timeline.looks import RELEASE
from undertow.timeline.picture import LEFT, WIDTH, PictureError, draw
from undertow.timing.results import Prediction

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str, words: str) -> list[dict[str, str]]:
    """Attributes of the boxes whose hint has these words."""
    found = []
    for box in ET.fromstring(svg).iter(f"{SVG}rect"):
        hint = box.find(f"{SVG}title")
        if hint is not None and hint.text and words in hint.text:
            found.append(dict(box.attrib))
    return found


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def barriers(svg: str) -> int:
    """Red lines that begin and end at the same x."""
    lines = [path for path in ET.fromstring(svg).iter(f"{SVG}path") if path.get("stroke") == ALARM]
    upright = re.compile(r"M([\d.]+),[\d.]+ L\1,[\d.]+")
    return sum(1 for line in lines if upright.fullmatch(line.get("d", "")))


def test_a_box_lies_where_its_cycles_are():
    (qk,) = boxes(draw(timeline()), "tensor: QK")
    assert float(qk["x"]) == pytest.approx(LEFT + 0.2 * WIDTH, abs=0.1)
    assert float(qk["width"]) == pytest.approx(0.128 * WIDTH, abs=0.1)


def test_several_schedules_share_a_scale():
    svg = draw([timeline("aliased", tile=1250.0), timeline("split", tile=1000.0)])
    longer, shorter = (float(box["width"]) for box in boxes(svg, "tensor: QK"))
    assert longer / shorter == pytest.approx(1.25, abs=0.01)
    assert {"aliased", "split"} <= set(texts(svg))


def test_only_barriers_of_all_compute_warps_are_red_lines():
    assert [barriers(draw(timeline(barriers=count))) for count in (0, 3)] == [0, 3]


def test_releases_of_s_are_marked_on_every_compute_warp():
    released = [box for box in boxes(draw(timeline()), "mma_compute_s.empty") if box["fill"] == RELEASE]
    assert len(released) == 2


@pytest.mark.parametrize(
    ("assumed", "hatched"),
    [
        ((), 0),
        (("tcgen05_tail",), 5),
        (("mufu_interval",), 7),
        (("tma_load_latency",), 1),
        (("mma_shares_port",), 12),
        (("wake_jitter",), 0),
    ],
)
def test_boxes_whose_length_is_guessed_are_hatched_and_told(assumed, hatched):
    svg = draw(timeline(assumed=assumed))
    patterns = [box for box in ET.fromstring(svg).iter(f"{SVG}rect") if box.get("fill") == "url(#hatch)"]
    assert len(patterns) == hatched + bool(hatched)  # one in the legend
    assert any("rests on assumed constants" in text for text in texts(svg)) == bool(hatched)
    assert any(f"{len(assumed) or 'no'} " in text and "assumed" in text for text in texts(svg))


def test_the_picture_says_that_it_is_predicted_for_which_chip_and_how_sure():
    known = Prediction(1000.0, 1040.0, (900.0, 1210.0), (), {})
    svg = draw(timeline(), predictions={"split": known})
    heading = next(text for text in texts(svg) if text.startswith("predicted for made by hand"))
    assert "1000 cycles per tile" in heading and "1040, 90% in 900 to 1210" in heading
    root = ET.fromstring(svg)
    assert "Predicted timeline of split" in (root.findtext(f"{SVG}title") or "")
    assert "QK t, PdO t, dK t, dQ t, dP t; 0 barriers" in (root.findtext(f"{SVG}desc") or "")


def test_what_was_measured_says_so_beside_what_was_not():
    both = [timeline("split"), timeline("traced")]
    svg = draw(both, measured={"traced": "in steps of 32 ns"})
    assert any(t.startswith("measured on made by hand (in steps of 32 ns): 1000 cycles per tile") for t in texts(svg))
    assert any(t.startswith("predicted for made by hand") for t in texts(svg))
    assert (ET.fromstring(svg).findtext(f"{SVG}title") or "").startswith("Predicted and measured timeline")
    alone = draw(both[1], measured={"traced": "x"})
    assert not any("predicted" in text.lower() for text in texts(alone))


def test_brief_leaves_the_tensor_pipe_and_the_compute_warps():
    names = [text for text in texts(draw(timeline(), brief=True)) if re.fullmatch(r"[a-z ]+\d*", text)]
    assert {"tensor pipe", "compute 4", "compute 5"} <= set(names) and not {"load 13", "tma"} & set(names)


def test_the_same_timeline_gives_the_same_bytes_and_loads_nothing():
    svg = draw([timeline("aliased", barriers=5), timeline()])
    assert svg == draw([timeline("aliased", barriers=5), timeline()])
    assert not re.search(r"(href|src|@import|url\((?!#))", svg)


def test_nothing_to_draw_is_refused():
    with pytest.raises(PictureError, match="none to draw"):
        draw([])
