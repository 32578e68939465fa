"""Good patterns compute the right thing however they are scheduled; each twin differs from its pattern as it claims."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

from tests.patterns.catalogue import PATTERNS, SETTINGS, TWINS, Setting
from tests.patterns.pattern import Pattern, Twin
from undertow import emulator, ptx

ORDERING = {"mbarrier", "bar", "barrier", "fence", "membar", "cp", "tcgen05", "ld", "st", "red", "atom", "setmaxnreg"}
"""Opcodes of memory, synchronisation and engines: what a twin may claim to have more or fewer of."""
every_twin = pytest.mark.parametrize(("pattern", "twin"), TWINS.values(), ids=TWINS)
every_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)


@cache
def program(pattern: Pattern, failure: str | None) -> emulator.Program:
    return emulator.load_program(pattern.compiled(failure).ptx)


def outcome(pattern: Pattern, failure: str | None, setting: Setting) -> str:
    """`right`, `wrong`, or the error that stopped the launch."""
    case = pattern.case()
    try:
        emulator.launch(program(pattern, failure), case.launch, setting.options(case))
    except emulator.EmulatorError as error:
        return type(error).__name__
    return "right" if case.is_right else "wrong"


def ordering_instructions(text: str) -> list[str]:
    """Mnemonics of the instructions that move data or order it, in text order; loads of parameters are left out."""
    (kernel,) = ptx.parse_module(text).functions.values()
    return [
        instruction.mnemonic
        for instruction in kernel.instructions
        if instruction.opcode in ORDERING and not instruction.mnemonic.startswith("ld.param")
    ]


def without_places(text: str) -> str:
    """PTX without its source lines."""
    return re.sub(r"^\s*\.(loc|file)\b.*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@every_pattern
def test_a_pattern_gives_the_right_answer(pattern, setting):
    assert outcome(pattern, None, setting) == "right"


@every_pattern
def test_a_pattern_neither_spills_nor_uses_a_stack(pattern):
    resources = pattern.compiled().resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)


@every_twin
def test_a_twin_differs_in_what_it_claims(pattern: Pattern, twin: Twin):
    good, bad = pattern.compiled().ptx, pattern.compiled(twin.failure).ptx
    assert without_places(good) != without_places(bad)
    before, after = ordering_instructions(good), ordering_instructions(bad)
    for more, fewer, claimed in ((before, after, twin.removed), (after, before, twin.added)):
        mnemonics = sorted((Counter(more) - Counter(fewer)).elements())
        assert len(mnemonics) == len(claimed), (mnemonics, claimed)
        assert all(map(str.startswith, mnemonics, sorted(claimed))), (mnemonics, claimed)
    assert (before == after) == (not twin.removed + twin.added + twin.moved)
    if twin.moved:
        before, after = ([m for m in mnemonics if not m.startswith(twin.moved)] for mnemonics in (before, after))
        assert before == after


@every_twin
def test_a_twin_goes_wrong_where_it_can_be_seen(pattern: Pattern, twin: Twin):
    """What cannot be seen (`visible` is False) needs a detector, and gives right answers in every setting."""
    seen = any(outcome(pattern, twin.failure, setting) != "right" for setting in SETTINGS)
    assert seen == twin.visible


def test_names_are_unique():
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    assert len(TWINS) == sum(len(pattern.twins) for pattern in PATTERNS)
