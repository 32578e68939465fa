"""Every pattern is clean; every twin is found by its rule, in every setting, and nothing unrelated is said."""

from __future__ import annotations

from functools import cache

import pytest

from tests.patterns.catalogue import PATTERNS, SETTINGS, TWINS, Setting
from tests.patterns.pattern import Pattern, Twin
from undertow import emulator
from undertow.emulator.observers import all_observers

SOME_SETTINGS = SETTINGS[:2] + SETTINGS[3:4]


@cache
def program(pattern: Pattern, failure: str | None) -> emulator.Program:
    return emulator.load_program(pattern.compiled(failure).ptx)


@cache
def findings(pattern: Pattern, failure: str | None, setting: Setting) -> list[emulator.Finding]:
    """What all observers say about one launch, which an error may have cut short; the same every time."""
    case = pattern.case()
    observers = all_observers()
    try:
        return emulator.launch(program(pattern, failure), case.launch, setting.options(case), observers).findings
    except emulator.EmulatorError as error:
        return error.findings


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_is_clean(pattern: Pattern, setting: Setting):
    assert not [str(finding) for finding in findings(pattern, None, setting)]


@pytest.mark.parametrize("setting", SOME_SETTINGS, ids=str)
@pytest.mark.parametrize(("pattern", "twin"), TWINS.values(), ids=TWINS)
def test_a_twin_is_found(pattern: Pattern, twin: Twin, setting: Setting):
    found = findings(pattern, twin.failure, setting)
    assert found
    assert {finding.rule for finding in found} <= {*twin.rules, *twin.also}, [str(finding) for finding in found]
    for finding in found:
        assert finding.rule == "deadlock" or ".py:" in f"{finding.where} {finding.other}", str(finding)


@pytest.mark.parametrize(("pattern", "twin"), TWINS.values(), ids=TWINS)
def test_all_rules_of_a_twin_are_found(pattern: Pattern, twin: Twin):
    """In one setting or another: an error may end a launch before the access that would race."""
    found = (findings(pattern, twin.failure, setting) for setting in SOME_SETTINGS)
    assert {finding.rule for some in found for finding in some} >= set(twin.rules)
