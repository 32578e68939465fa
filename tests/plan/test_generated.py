"""What is drawn and tabulated from the plans is up to date, and shows the numbers of the plan."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools import regen
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan import render_tables as tables
from undertow.plan.order import Order
from undertow.plan.render_schedule import schedule, spread
from undertow.plan.render_svg import LEFT, SCALE, hazard, rows_of, tmem_maps

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def test_committed_documents_and_pictures_are_what_the_plans_give() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tools/regen.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_stale_document_is_named_and_then_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regen.main([str(tmp_path)])
    assert regen.main(["--check", str(tmp_path)]) == 0
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- generated: schedules -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    capsys.readouterr()
    assert regen.main(["--check", str(tmp_path)]) == 1
    assert "stale: README.md" in capsys.readouterr().out
    assert "old" in readme.read_text(encoding="utf-8"), "a check writes nothing"
    assert regen.main([str(tmp_path)]) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "`aliased`" in text


def test_an_unknown_generated_part_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("<!-- generated: nothing --><!-- end -->", encoding="utf-8")
    with pytest.raises(ValueError, match="no generated part 'nothing'; there are schedules"):
        regen.main([str(tmp_path)])


def boxes(svg: str) -> list[tuple[float, float]]:
    """(x, width) of every drawn box but the paper."""
    rects = [r.attrib for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.get("rx") == "3"]
    return [(float(r["x"]), float(r["width"])) for r in rects]


def test_every_tmem_region_is_drawn_at_its_columns() -> None:
    drawn = boxes(tmem_maps([plan(name) for name in SCHEDULES]))
    for p in (plan("aliased"), plan("split")):
        for region in p.tmem:
            x, width = round(LEFT + region.column * SCALE, 1), round(region.columns * SCALE, 1)
            assert (x, width) in drawn, region.name


@pytest.mark.parametrize("name", SCHEDULES)
def test_tiles_in_one_row_of_the_map_do_not_overlap(name: str) -> None:
    rows = rows_of(plan(name))
    assert sorted(r.name for row in rows for r in row) == sorted(r.name for r in plan(name).tmem)
    for row in rows:
        columns = [column for region in row for column in range(region.column, region.end)]
        assert len(columns) == len(set(columns))


def test_the_hazard_picture_is_red_only_where_there_is_a_hazard() -> None:
    assert hazard(plan("aliased"), "P", "S").count("marker-end") == 2
    assert hazard(plan("aliased"), "dS", "dP").count("marker-end") == 2
    assert hazard(plan("split"), "P", "S").count("marker-end") == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_stays_on_the_paper(name: str) -> None:
    """A letter is at most 0.62 em wide on average in the fonts that the pictures ask for."""
    for svg in (schedule(plan(name)), tmem_maps([plan(name)])):
        root = ElementTree.fromstring(svg)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for text in root.iter(f"{SVG}text"):
            size = float(text.attrib["font-size"])
            long = 0.62 * size * len(text.text or "")
            left = float(text.attrib["x"]) - long * {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]]
            assert left >= 0 and left + long <= width and size <= float(text.attrib["y"]) <= height - 4, text.text


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawn_order_is_the_order_of_the_graph(name: str) -> None:
    """Nothing is drawn to begin before what happens before it has ended."""
    order = Order(plan(name), 4)
    spans = spread(order)
    for index, followers in order.edges.items():
        for follower in followers:
            assert spans[index].end <= spans[follower].start


@pytest.mark.parametrize("name", SCHEDULES)
def test_barriers_in_the_program_are_those_that_the_plan_counts(name: str) -> None:
    p = plan(name)
    order = Order(p, 3)
    for tile in range(3):
        assert sum(key[0] == tile for key in order.joins) == p.compute_barriers_per_tile
    assert tables.compute_steps(p).count("| barrier `compute` |") == p.compute_barriers_per_tile


def test_tables_hold_the_derived_numbers() -> None:
    p = plan("split")
    assert "| `sdQ` | 115712 | 32768 | 2 stages of 128 x 32 f32 |" in tables.shared_memory(p)
    assert "| end | 150016 |  | a CTA has 232448 |" in tables.shared_memory(p)
    assert "| `compute` | 4-11 | 256 | 136 | 34816 |" in tables.roles(p)
    assert "| `load_mma_q` | sQ, sK with the first | 2 | 1 from load | 16384, first 32768 | 1 from mma |" in (
        tables.pipelines(p)
    )
    assert "| `P` | [384, 448) | 64 | bf16 | nothing |" in tables.tensor_memory(p)
    assert "| body | `load_mma_q.full` t+1, `mma_compute_s.empty` t | QK t+1 |" in tables.mma_rows(p)
    assert "| `teardown` | 3 | 416 | reduce, compute, mma |" in tables.named_barriers(p)


def test_the_committed_timelines_have_the_barriers_of_the_plans() -> None:
    root = ElementTree.parse(ROOT / "docs" / "images" / "timelines.svg").getroot()
    told = root.findtext(f"{SVG}desc") or ""
    for name in SCHEDULES:
        sentence = next(part for part in told.split(". ") if part.startswith(f"{name}: "))
        assert f"{plan(name).compute_barriers_per_tile} barriers of all compute warps" in sentence
    assert "Predicted timeline" in (root.findtext(f"{SVG}title") or "")
