"""The picture of a finding shows the lanes and columns that were executed, and nothing that is not about it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from tests.mutate.kernels import SAME_LANES, SAME_LANES_LAUNCH, handover, without_the_wait_for_full
from tools import regen
from undertow import cli
from undertow.campaign import campaign, picture
from undertow.cases import settings
from undertow.hazard_figure import LEFT, STRIP, TOP, WIDTH, sides

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[tuple[float, ...]]:
    """(x, y, width, height) of what the instructions touched."""
    rects = [r.attrib for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.get("rx") == "3"]
    return [tuple(float(r[key]) for key in ("x", "y", "width", "height")) for r in rects]


def hatched(svg: str) -> tuple[float, ...]:
    rects = [r.attrib for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.get("fill") == "url(#hatch)"]
    (rect,) = [tuple(float(r[key]) for key in ("x", "y", "width", "height")) for r in rects]
    return rect


def texts(svg: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.fixture
def drawn(tmp_path, capfd) -> str:
    """What `undertow check --picture` draws of two warps with the same lanes."""
    for name, text in (("k.ptx", SAME_LANES), ("k.toml", SAME_LANES_LAUNCH)):
        (tmp_path / name).write_text(text)
    where = tmp_path / "hazard.svg"
    words = ["--ptx", str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "k.toml"), "--picture", str(where)]
    assert cli.main(["check", *words, "--seeds", "1"]) == 1
    assert "race" in capfd.readouterr().out
    return where.read_text()


def test_the_cells_are_those_of_the_two_instructions(drawn):
    """Columns 0 and 1 read, 1 and 2 written, by lanes 0 to 31; shown is a whole tick of sixteen columns."""
    column = WIDTH / 16
    assert sorted(boxes(drawn)) == [(LEFT, TOP, 2 * column, STRIP), (LEFT + column, TOP + STRIP, 2 * column, STRIP)]
    assert hatched(drawn) == (LEFT + column, TOP, column, 2 * STRIP)


def test_the_words_name_warps_and_roles(drawn):
    said = texts(drawn)
    assert "warp 4 (writer) writes what warp 0 (reader) reads, and nothing orders the two" in said
    assert any(text.startswith("missing: ") for text in said) and "[96, 128)" in said


def test_figure_2_of_the_article_is_found(monkeypatch):
    """Warp 5 stores P where warp 9 loads S: lanes [32, 64), half of the columns of warp 9's load."""
    svg = regen.hazard_found()
    said = texts(svg)
    assert said[0] == "alias-lifetime: P over S"
    assert "warp 5 (compute) writes what warp 9 (compute) reads, and nothing orders the two" in said
    assert "missing: the alias guard of P over S: named barrier compute between the two" in said
    x, y, width, height = hatched(svg)
    assert (x, width) == (LEFT + WIDTH / 2, WIDTH / 4), "columns [32, 48) of [0, 64)"
    assert y > TOP + 2 * STRIP and height == 2 * STRIP
    assert len(boxes(svg)) == 16, "eight warps load, eight store"


def test_text_stays_on_the_paper(drawn):
    for svg in (drawn, regen.hazard_found()):
        root = ElementTree.fromstring(svg)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for text in root.iter(f"{SVG}text"):
            size = float(text.attrib["font-size"])
            long = 0.62 * size * len(text.text or "")
            left = float(text.attrib["x"]) - long * {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]]
            assert left >= 0 and left + long <= width and size <= float(text.attrib["y"]) <= height - 4, text.text


def test_a_finding_in_shared_memory_has_no_picture(tmp_path):
    cases = {"handover": (handover(without_the_wait_for_full()),)}
    (found, *_) = campaign(cases, settings(1, ["late"])).errors
    assert found.finding.rule == "race" and sides(found.finding) is None
    with pytest.raises(ValueError, match="not a read and a write of tensor memory by two warps"):
        picture(cases, found)


def test_where_nothing_can_be_drawn_the_command_says_so(tmp_path, capfd):
    for name, text in (("k.ptx", SAME_LANES.replace("@%p2 bra MEET", "bra MEET")), ("k.toml", SAME_LANES_LAUNCH)):
        (tmp_path / name).write_text(text)
    where = tmp_path / "hazard.svg"
    words = ["--ptx", str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "k.toml"), "--picture", str(where)]
    assert cli.main(["check", *words, "--seeds", "1"]) == 0
    assert not where.exists() and "there is nothing to draw" in capfd.readouterr().err
