"""The synchronisations of a kernel, and the PTX that stands in a mutant where one of them stood.

A mutant is a program of its own: a wait becomes a predicate that is true, so that its loop falls through; an arrival
disappears, its state token becomes 0; an arrival that expects bytes loses the one or the other; a named barrier
disappears, and in a second mutant becomes a join of each warp's lanes; everything else disappears. `setmaxnreg` moves
registers and orders nothing, so it stays.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from undertow import ptx
from undertow.emulator.program import Program
from undertow.ptx.lexer import tokenize

KINDS = {  # kind: what a mutant of this kind lacks
    "wait": "a wait for a phase of an mbarrier",
    "arrive": "an arrival at an mbarrier, by a warp or by tcgen05.commit",
    "expect": "the bytes that a phase of an mbarrier expects",
    "barrier": "a named barrier",
    "narrowed": "a named barrier, of which only the join of each warp's own lanes is left",
    "warp-sync": "a join of a warp's lanes",
    "fence": "a fence within one proxy",
    "proxy-fence": "a fence between the generic and the async proxy",
    "init-fence": "the fence behind mbarrier.init",
    "tmem-wait": "a wait for tensor-memory loads or stores",
    "copy-group": "the end of a group of asynchronous copies",
    "copy-wait": "a wait for groups of asynchronous copies",
    "mma-group": "the end of a group of asynchronous MMAs",
    "mma-wait": "a wait for groups of asynchronous MMAs",
    "mma-fence": "a fence that hands registers to asynchronous MMAs",
    "order": "acquire or release of a memory access",
}


@dataclass(frozen=True)
class Edit:
    """Characters [start, end) of a PTX text, and what stands there in the mutant."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Site:
    """One synchronisation at one instruction: `form` is its mnemonic, `edit` takes it away."""

    index: int
    kind: str
    form: str
    line: int
    edit: Edit


@dataclass(frozen=True)
class _Statement:
    """An instruction as text: `guard` is empty or ends with a blank, operands are without blanks."""

    start: int
    end: int
    guard: str
    mnemonic: str
    operands: tuple[str, ...]


Neutral = Callable[[_Statement], list[str]]


def _nothing(_: _Statement) -> list[str]:
    return []


def _true(statement: _Statement) -> list[str]:
    return [f"setp.eq.u32 {statement.operands[0]}, 0, 0"]


def _no_token(statement: _Statement) -> list[str]:
    """Nothing, but a token that somebody might read is 0."""
    first = statement.operands[0]
    return [] if first == "_" or first.startswith("[") else [f"mov.b64 {first}, 0"]


def _joined(_: _Statement) -> list[str]:
    return ["bar.warp.sync -1"]


def _expect_alone(statement: _Statement) -> list[str]:
    address, size = statement.operands[-2:]
    space = "shared::cluster" if ".shared::cluster" in statement.mnemonic else "shared::cta"
    return [f"mbarrier.expect_tx.relaxed.cta.{space}.b64 {address}, {size}", *_no_token(statement)]


def _arrive_alone(statement: _Statement) -> list[str]:
    operands = ", ".join(statement.operands[:-1])
    return [f"{statement.mnemonic.replace('.expect_tx', '')} {operands}"]


def _relaxed(statement: _Statement) -> list[str]:
    mnemonic = re.sub(r"\.(acquire|release|acq_rel)\b", ".relaxed", statement.mnemonic)
    return [f"{mnemonic} {', '.join(statement.operands)}"]


RULES: tuple[tuple[re.Pattern[str], str, Neutral], ...] = tuple(
    (re.compile(pattern), kind, neutral)
    for pattern, kind, neutral in (
        (r"mbarrier\.(try|test)_wait\b", "wait", _true),
        (r"mbarrier\.arrive(_drop)?\.expect_tx\b", "arrive", _expect_alone),
        (r"mbarrier\.arrive(_drop)?\.expect_tx\b", "expect", _arrive_alone),
        (r"mbarrier\.arrive(_drop)?(?!\.expect_tx)\b", "arrive", _no_token),
        (r"mbarrier\.(expect|complete)_tx\b", "expect", _nothing),
        (r"tcgen05\.commit\b", "arrive", _nothing),
        (r"cp\.async\.mbarrier\.arrive\b", "arrive", _nothing),
        (r"(bar|barrier)(\.cta)?\.(sync|arrive)\b", "barrier", _nothing),
        (r"(bar|barrier)(\.cta)?\.sync\b", "narrowed", _joined),
        (r"barrier\.cluster\.(arrive|wait)\b", "barrier", _nothing),
        (r"bar\.warp\.sync\b", "warp-sync", _nothing),
        (r"fence\.mbarrier_init\b", "init-fence", _nothing),
        (r"fence\.proxy\b", "proxy-fence", _nothing),
        (r"fence(?!\.proxy|\.mbarrier_init)\b|membar\b|tcgen05\.fence\b", "fence", _nothing),
        (r"tcgen05\.wait::(ld|st)\b", "tmem-wait", _nothing),
        (r"cp\.async(\.bulk)?\.commit_group\b", "copy-group", _nothing),
        (r"cp\.async(\.bulk)?\.wait_(group|all)\b", "copy-wait", _nothing),
        (r"wgmma\.commit_group\b", "mma-group", _nothing),
        (r"wgmma\.wait_group\b", "mma-wait", _nothing),
        (r"wgmma\.fence\b", "mma-fence", _nothing),
        (r"(ld|st|red|atom)\b.*\.(acquire|release|acq_rel)\b", "order", _relaxed),
    )
)


def sites(program: Program) -> list[Site]:
    """Every synchronisation of the program's kernel, in text order; an instruction may be two (arrival and bytes)."""
    text = _Text(program.module.source)
    found = []
    for instruction in program.kernel.instructions:
        for pattern, kind, neutral in RULES:
            if pattern.match(instruction.mnemonic):
                statement = text.statement(instruction)
                edit = Edit(statement.start, statement.end, _replacement(text.of(statement), statement, neutral))
                found.append(Site(instruction.index, kind, instruction.mnemonic, instruction.line, edit))
    return found


def mutated(text: str, edits: list[Edit]) -> str:
    """The PTX text after the edits; every other instruction stays on its line."""
    for edit in sorted(edits, key=lambda e: e.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _replacement(text: str, statement: _Statement, neutral: Neutral) -> str:
    statements = (f"{statement.guard}{line};" for line in neutral(statement))
    return " ".join(statements) + "\n" * text.count("\n")


class _Text:
    """A PTX text in which instructions can be found again."""

    def __init__(self, source: ptx.SourceText):
        self._text = source.text
        self._lines = [0, *(match.end() for match in re.finditer("\n", source.text))]
        self._tokens = tokenize(source)
        self._offsets = [token.offset for token in self._tokens]

    def of(self, statement: _Statement) -> str:
        """The characters of a statement."""
        return self._text[statement.start : statement.end]

    def statement(self, instruction: ptx.Instruction) -> _Statement:
        """The instruction's text, from its guard to its semicolon."""
        first = bisect_left(self._offsets, self._lines[instruction.line - 1] + instruction.column - 1)
        words = []
        end = first
        while self._tokens[end].text != ";":
            words.append(self._tokens[end])
            end += 1
        guard = ""
        if words[0].text == "@":
            count = 3 if words[1].text == "!" else 2
            guard, words = "".join(word.text for word in words[:count]) + " ", words[count:]
        rest = next((i for i, word in enumerate(words) if i and word.kind != "modifier"), len(words))
        operands = tuple(_operands(word.text for word in words[rest:]))
        assert "".join(word.text for word in words[:rest]) == instruction.mnemonic, "the text is the instruction's"
        close = self._offsets[end] + 1
        return _Statement(self._offsets[first], close, guard, instruction.mnemonic, operands)


def _operands(words: Iterator[str]) -> Iterator[str]:
    """Split at the commas that stand in no bracket."""
    depth, operand = 0, ""
    for word in words:
        depth += (word in "[{(") - (word in "]})")
        if word == "," and depth == 0:
            yield operand
            operand = ""
        else:
            operand += word
    if operand:
        yield operand
