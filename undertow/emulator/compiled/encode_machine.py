"""Find the encoder of a machine form by the fixed words of its syntax line.

Modifier classes and optional words are left out of the key. A new row of the table needs an entry in one of the three
files of forms, or is refused by name.
"""

from __future__ import annotations

import re
from functools import cache

from ..semantics import Decoded
from ..semantics.table import Row
from . import async_forms, memory_forms, sync_forms
from .encode import Encoder, Fields
from .form_parts import Form

FORMS: dict[str, Form] = {**memory_forms.FORMS, **sync_forms.FORMS, **async_forms.FORMS}


@cache
def fixed_words(syntax: str) -> str:
    """The words of a syntax line's mnemonic that must stand there: `ld{.weak}.<type> d, [a]` gives `ld`."""
    mnemonic = syntax.partition(" ")[0]
    return re.sub(r"\{[^}]*\}|\.<\w+>", "", mnemonic)


def encode_machine(encoder: Encoder, decoded: Decoded) -> Fields:
    """Encode one machine form.

    Raises: NotCompiled for a row without an entry.
    """
    form = FORMS.get(fixed_words(decoded.row.syntax))
    if form is None:
        raise encoder.unsupported("no compiled form")
    return form(encoder, decoded)


def knows(row: Row) -> bool:
    """Whether a machine row has a compiled form."""
    return fixed_words(row.syntax) in FORMS
