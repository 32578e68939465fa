"""A file of records: one JSON object a line, written as soon as it is known, so that nothing that comes later loses it.

Every record begins with the name of its cell. So a last line that was not written to its end, because somebody stopped
the process, is told from a file of something else, which is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
LINE_START = '{"cell": "'


class RecordError(ValueError):
    """A file that does not hold records, or cannot be written; the message names it, and what is wrong."""


class RecordLines(Generic[T]):
    """The records of a file, read once, and the place for new ones.

    what: whose records they are, for messages: "a sweep". parse: makes a record of the object of a line, or None to
    pass over it; for an object that is no record of its kind it raises KeyError or TypeError. fresh: the records that
    are there are thrown away, and may be of another day.
    Raises: RecordError for a file that holds something else, or a place that cannot be written.
    """

    def __init__(self, path: Path, what: str, parse: Callable[[dict[str, Any]], T | None], fresh: bool = False):
        self.path, self._what = path, what
        lines, torn = self._read()
        found = [self._parsed(number, line, None if fresh else parse) for number, line in enumerate(lines, start=1)]
        self.records = [record for record in found if record is not None]
        if fresh or torn:
            self._write("w", [] if fresh else lines)
        else:
            self._write("a", [])  # that it cannot be written is better known before the work

    def write(self, objects: Iterable[dict[str, Any]]) -> None:
        """Write objects behind those that are there, and have them on disk.

        Raises: RecordError; ValueError for a number that JSON does not have.
        """
        self._write("a", [json.dumps(values, allow_nan=False) for values in objects])

    def _read(self) -> tuple[list[str], bool]:
        """The whole lines, and whether there is one that was not written to its end."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return [], False
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{self.path}: cannot be read: {error}") from error
        *lines, rest = text.split("\n")
        if not LINE_START.startswith(rest[: len(LINE_START)]):
            raise self._foreign(len(lines) + 1)
        return lines, bool(rest)

    def _parsed(self, number: int, line: str, parse: Callable[[dict[str, Any]], T | None] | None) -> T | None:
        try:
            values = json.loads(line)
            if not isinstance(values, dict) or "cell" not in values:
                raise self._foreign(number)
            return None if parse is None else parse(values)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise self._foreign(number) from error

    def _foreign(self, number: int) -> RecordError:
        return RecordError(
            f"{self.path}: line {number} is no record of {self._what}: name a file of such, or a new one"
        )

    def _write(self, mode: str, lines: Iterable[str]) -> None:
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            raise RecordError(f"{self.path}: cannot be written: {error}") from error
