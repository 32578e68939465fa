"""Turn PTX text into tokens that remember where they stand.

Modifiers such as `.shared::cta` or `.32x32b` are single tokens, so that the parser never has to guess where a
mnemonic ends; positions are character offsets, turned into line and column only when somebody asks.
"""

import bisect
import re
from typing import NamedTuple


class PtxSyntaxError(ValueError):
    """The text is not PTX that this parser knows; the message carries file, line and column."""


class Token(NamedTuple):
    """One lexical unit: kind is word, modifier, integer, float, string, punctuation or end."""

    kind: str
    text: str
    offset: int


_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
  | (?P<integer>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<modifier>\.[A-Za-z0-9_$]+(?:::[A-Za-z0-9_]+)*)
  | (?P<word>[A-Za-z_$%][A-Za-z0-9_$]*)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<punctuation>[{}()\[\]<>,;:@!|+\-=*~?&^])
    """,
    re.VERBOSE | re.DOTALL,
)


class SourceText:
    """PTX text together with the map from character offsets to lines and columns."""

    def __init__(self, text: str, name: str):
        self.text = text
        self.name = name
        self._starts = [0] + [m.end() for m in re.finditer("\n", text)]

    def position(self, offset: int) -> tuple[int, int]:
        """Return (line, column), both counted from 1."""
        line = bisect.bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """Return the text of one line, counted from 1, without surrounding blanks."""
        start = self._starts[number - 1]
        end = self._starts[number] if number < len(self._starts) else len(self.text)
        return self.text[start:end].strip()

    def error(self, offset: int, message: str) -> PtxSyntaxError:
        """Build (not raise) the error for a place in the text."""
        line, column = self.position(min(offset, max(len(self.text) - 1, 0)))
        return PtxSyntaxError(f"{self.name}:{line}:{column}: {message}\n    {self.line(line)}")


def tokenize(source: SourceText) -> list[Token]:
    """Split the text into tokens, ending with one token of kind `end`.

    Raises: PtxSyntaxError at the first character that starts no token.
    """
    tokens = []
    position, text, match = 0, source.text, _TOKEN.match
    while position < len(text):
        found = match(text, position)
        if found is None:
            if text.startswith("/*", position):
                raise source.error(position, "comment is never closed")
            raise source.error(position, f"unexpected character {text[position]!r}")
        kind = found.lastgroup or "space"
        if kind != "space":
            tokens.append(Token(kind, found.group(), position))
        position = found.end()
    tokens.append(Token("end", "", len(text)))
    return tokens
