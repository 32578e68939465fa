"""The page itself: well formed, closed in itself, and honest about what is not there."""

from __future__ import annotations

import pytest

from tests.report.reading import ids, loads, tree, unlabelled
from undertow.plan.drawing import Drawing
from undertow.report.page import Cell, Figure, Label, Missing, Prose, Section, Source, Table, embedded, page

MEASURED = Source(Label.MEASURED, "one run & another", "undertow bench --only 'x'")
PUBLISHED = Source(Label.PUBLISHED, "an article")


def picture() -> str:
    drawing = Drawing(100, 50, "a <title>")
    drawing.text(10, 10, "12.5")
    drawing.hatch(0, 0, 10, 10)
    return drawing.svg()


def made(*parts) -> str:
    return page("Title & more", "below", [Section("one", "One <two>", "undertow check", list(parts))])


def test_everything_is_escaped_and_closed():
    table = Table("a < b", ("name", "x", "y"), (None, MEASURED, PUBLISHED), [("`a<b`", "1", "2"), ("c", "3", "-")])
    html = made(
        Figure(picture(), "two & three", MEASURED), table, Prose("4 < 5", PUBLISHED), Missing("b & c", "undertow x")
    )
    root = tree(html)
    assert [heading.text for heading in root.iter("h2")] == ["What the labels say", "One <two>"]
    assert [cell.text for cell in root.iter("td")] == ["1", "2", "3", "-"]
    assert not unlabelled(html) and not loads(html)


def test_a_label_stands_once_if_it_holds_for_all_and_at_every_column_otherwise():
    same = Table("same", ("n", "x", "y"), (None, MEASURED, MEASURED), [("a", "1", "2")])
    mixed = Table("mixed", ("n", "x", "y"), (None, MEASURED, PUBLISHED), [("a", "1", "2")])
    (of_same,), (of_mixed,) = (list(tree(made(table)).iter("thead")) for table in (same, mixed))
    assert not list(of_same.iter("span"))
    assert [badge.text for badge in of_mixed.iter("span")] == ["measured", "published"]


def test_a_cell_may_have_a_source_of_its_own():
    html = made(Table("t", ("n", "x"), (None, None), [("a", Cell("7", PUBLISHED)), ("b", Cell("8", MEASURED))]))
    assert [cell.get("data-label") for cell in tree(html).iter("td")] == ["published", "measured"]
    assert not unlabelled(html)


def test_the_reader_of_these_tests_sees_a_number_without_a_label():
    html = made(Table("t", ("n", "x"), (None, None), [("a", "7.5"), ("b", "word")]))
    assert unlabelled(html) == ["7.5"]


@pytest.mark.parametrize(
    "loading", ['<img src="x.png"/>', "<script>x</script>", "url(http://a.b/c)", 'href="https://a"']
)
def test_the_reader_of_these_tests_sees_what_would_be_loaded(loading):
    assert loads(loading)


def test_pictures_keep_their_hatching_apart():
    html = made(Figure(picture(), "a", MEASURED), Figure(picture(), "b", MEASURED))
    assert len(ids(html)) == len(set(ids(html)))
    assert 'fill="url(#one-0-hatch)"' in html and 'fill="url(#one-1-hatch)"' in html
    assert "url(#hatch)" not in embedded(picture(), "k")


def test_what_is_missing_is_said_with_the_command_that_makes_it():
    section = Section("one", "One", "undertow x", [Missing("the numbers", "undertow x --all"), Prose("there")])
    (note,) = (p for p in tree(page("t", "s", [section])).iter("p") if p.get("class") == "missing")
    assert "Not here: the numbers." in "".join(note.itertext()) and "undertow x --all" in "".join(note.itertext())
    assert section.missing == ["the numbers"]


def test_a_row_with_too_few_cells_is_an_error_of_ours():
    with pytest.raises(AssertionError):
        made(Table("t", ("n", "x"), (None, MEASURED), [("a",)]))
