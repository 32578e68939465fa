"""A reading position over the tokens of one PTX file, with the small grammar that every parser needs."""

import struct

from .lexer import PtxSyntaxError, SourceText, Token, tokenize
from .program import Immediate


class Cursor:
    """The current token and the ways to move past it."""

    def __init__(self, source: SourceText):
        self.source = source
        self.tokens = tokenize(source)
        self.place = 0

    @property
    def token(self) -> Token:
        """The current token; the last one has kind `end` and is never passed."""
        return self.tokens[self.place]

    @property
    def kind(self) -> str:
        """Kind of the current token."""
        return self.tokens[self.place].kind

    @property
    def text(self) -> str:
        """Text of the current token."""
        return self.tokens[self.place].text

    def peek(self, distance: int = 1) -> Token:
        """Look ahead without moving."""
        return self.tokens[min(self.place + distance, len(self.tokens) - 1)]

    def advance(self) -> Token:
        """Return the current token and move to the next."""
        token = self.tokens[self.place]
        if token.kind == "end":
            raise self.error("unexpected end of file")
        self.place += 1
        return token

    def take(self, text: str) -> bool:
        """Move past the current token if it reads `text`; say whether it did."""
        if self.text == text and self.kind != "string":
            self.place += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        """Move past a token that must read `text`."""
        if self.text != text:
            raise self.error(f"expected {text!r}, got {self.text!r}")
        return self.advance()

    def expect_kind(self, kind: str) -> Token:
        """Move past a token that must be of this kind."""
        if self.kind != kind:
            raise self.error(f"expected a {kind}, got {self.text!r}")
        return self.advance()

    def skip_past(self, text: str) -> None:
        """Move behind the next token that reads `text`."""
        while self.advance().text != text:
            pass

    def error(self, message: str) -> PtxSyntaxError:
        """Build the error for the current token."""
        return self.source.error(self.token.offset, message)

    def integer(self) -> int:
        """Read an integer literal with an optional sign."""
        sign = -1 if self.take("-") else 1
        return sign * integer_value(self.expect_kind("integer").text)

    def array_length(self) -> int | None:
        """Read `[12]`, or `[]`, which gives None."""
        self.expect("[")
        length = None if self.text == "]" else self.integer()
        self.expect("]")
        return length

    def literal(self) -> Immediate:
        """Read a signed integer or floating literal.

        A decimal floating literal and 0d... become kind f64, 0f... kind f32, each as its bit pattern.
        """
        negative = False
        while self.text in ("-", "+", "~"):
            if self.text == "~":
                self.advance()
                return Immediate(~self.literal().value)
            negative ^= self.advance().text == "-"
        if self.take("("):
            inner = self.literal()
            self.expect(")")
            return Immediate(-inner.value if negative else inner.value, inner.kind)
        if self.kind == "integer":
            value = integer_value(self.advance().text)
            return Immediate(-value if negative else value)
        text = self.expect_kind("float").text
        if text[:2] in ("0f", "0F"):
            return Immediate(int(text[2:], 16) ^ (0x80000000 if negative else 0), "f32")
        if text[:2] in ("0d", "0D"):
            return Immediate(int(text[2:], 16) ^ ((1 << 63) if negative else 0), "f64")
        bits = struct.unpack("<Q", struct.pack("<d", -float(text) if negative else float(text)))[0]
        return Immediate(bits, "f64")

    def initializer(self) -> tuple:
        """Read the value of a variable: nested braces are flattened; symbols stay as ("symbol", name, offset)."""
        if self.take("{"):
            values: list = []
            while not self.take("}"):
                values.extend(self.initializer())
                self.take(",")
            return tuple(values)
        if self.kind != "word":
            return (self.literal(),)
        name = self.advance().text
        if self.take("("):
            inner = self.initializer()
            self.expect(")")
            return inner
        offset = self.integer() if self.take("+") else 0
        return (("symbol", name, offset),)


def integer_value(text: str) -> int:
    """Return the value of an integer literal: decimal, hex, octal or binary, with or without U."""
    digits = text.rstrip("U")
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    if digits[:2] in ("0b", "0B"):
        return int(digits, 2)
    is_octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    return int(digits, 8 if is_octal else 10)
