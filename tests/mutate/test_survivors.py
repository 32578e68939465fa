"""Reasons are data: complete, of a known category, one per synchronisation, and those of the package can be read."""

from __future__ import annotations

import pytest

from tests.mutate.kernels import SURVIVORS
from undertow.cases import CaseError
from undertow.kernels.backward import SCHEDULES
from undertow.mutate import FOLDER, read_reasons, reasons_for
from undertow.mutate.profile import Name

ENTRY = """\
[[survivor]]
role = "reduce"
function = "_take_stage"
kind = "copy-wait"
form = "cp.async.bulk.wait_group.read"
about = "sdQ"
place = "in"
category = "redundant"
because = "the barrier right in front of it orders the same"
"""


def written(tmp_path, text: str):
    path = tmp_path / "survivors.toml"
    path.write_text(text)
    return path


def test_a_reason_names_its_synchronisations(tmp_path):
    (reason,) = read_reasons(written(tmp_path, ENTRY + "ordinal = [1, 3]\nschedules = ['split']\n"))
    assert [name.ordinal for name in reason.names] == [1, 3] and reason.category == "redundant"
    assert reason.names[0] == Name(
        "reduce", "_take_stage", "copy-wait", "cp.async.bulk.wait_group.read", "sdQ", "in", 1
    )


def test_a_reason_without_schedules_holds_for_all(tmp_path):
    reasons = read_reasons(written(tmp_path, ENTRY + ENTRY.replace('"in"', '"after"') + "schedules = ['split']\n"))
    assert len(reasons_for(reasons, "split")) == 2 and len(reasons_for(reasons, "aliased")) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (ENTRY.replace("redundant", "unclear"), "category='unclear': must be one of first-pass, tail, redundant"),
        (ENTRY.replace('"the barrier right in front of it orders the same"', '"needless"'), "must say why"),
        (ENTRY.replace('role = "reduce"\n', ""), "role=None must be a string"),
        (ENTRY + 'stage = "1"\n', "unknown ['stage']; allowed are about, because, category"),
        (ENTRY + 'ordinal = "2"\n', "ordinal must be whole numbers"),
        (ENTRY + ENTRY, "two reasons for `reduce: copy-wait sdQ (in the loop, _take_stage)`"),
        ("[other]\n", "must hold [[survivor]] tables and nothing else"),
        ("[[survivor\n", "cannot be read"),
    ],
)
def test_a_wrong_reason_is_refused_by_name(tmp_path, text, complaint):
    path = written(tmp_path, text)
    with pytest.raises(CaseError) as refused:
        read_reasons(path)
    assert str(refused.value).startswith(str(path)) and complaint in str(refused.value)


def test_the_reasons_of_the_package_are_complete_and_speak_of_our_schedules():
    files = sorted(FOLDER.glob("*.toml"))
    assert files
    for path in files:
        for reason in read_reasons(path):
            assert set(reason.schedules) <= set(SCHEDULES[path.stem]), reason


def test_the_reasons_of_the_tiny_kernel_are_read(tmp_path):
    reasons = read_reasons(written(tmp_path, SURVIVORS))
    assert [reason.category for reason in reasons] == ["first-pass", "redundant", "tail", "tail"]
