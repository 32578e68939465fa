"""The line budget sees what is over it, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import size

ROLE, ROOM = Path("undertow/kernels/sm100/roles/mma.py"), Path("undertow/verify.py")
SIGNATURES = Path("undertow/attention/signatures.py")


def function(lines: int, parameters: str = "") -> str:
    return f"def f({parameters}):\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        (ROOM, "x = 1\n" * 400, None),
        (ROOM, "x = 1\n" * 401, "401 lines, at most 400"),
        (ROLE, "x = 1\n" * 351, "351 lines, at most 350"),
        (ROOM, function(80), None),
        (ROOM, function(81), ":1: f has 81 lines, at most 80"),
        (ROLE, function(150), None),
        (ROLE, function(151), ":1: f has 151 lines, at most 150"),
        (ROOM, function(2, "a, b, c, /, d, *, e, f"), None),
        (ROOM, function(2, "a, b, c, /, d, *args, e, f"), ":1: f has 7 parameters, at most 6"),
        (SIGNATURES, function(2, ", ".join(f"p{n}" for n in range(24))), None),
        (SIGNATURES, function(2, ", ".join(f"p{n}" for n in range(25))), ":1: f has 25 parameters, at most 24"),
        (SIGNATURES, function(81), ":1: f has 81 lines, at most 80"),
        (ROOM, "class C:\n    def f(self, a, b, c, d, e, g): pass\n", None),
        (ROOM, "class C:\n    async def f(self, a, b, c, d, e, g, **h): pass\n", ":2: f has 7 parameters, at most 6"),
    ],
)
def test_offences(path, text, complaint):
    assert list(size.offences(path, text)) == ([] if complaint is None else [f"{path}{_joined(complaint)}"])


def _joined(complaint: str) -> str:
    return complaint if complaint.startswith(":") else f": {complaint}"


def test_the_tool_prints_offenders_and_fails(tmp_path, capsys):
    (tmp_path / "undertow").mkdir()
    (tmp_path / "undertow" / "long.py").write_text(function(90), encoding="utf-8")
    assert size.main([str(tmp_path)]) == 1
    assert "undertow/long.py:1: f has 90 lines, at most 80" in capsys.readouterr().out
    (tmp_path / "undertow" / "long.py").write_text(function(10), encoding="utf-8")
    assert size.main([str(tmp_path)]) == 0


def test_a_folder_without_rooms_is_not_within_budget(tmp_path):
    assert size.main([str(tmp_path)]) == 2
