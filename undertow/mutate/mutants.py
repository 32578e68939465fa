"""The mutants of a kernel: one for each synchronisation, and one for each named barrier of several roles as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from undertow.cases import Kernel, fresh
from undertow.emulator import Options, launch
from undertow.mutate.profile import EVERYWHERE, Name, Profile, names
from undertow.mutate.sites import Edit, Site, mutated, sites


@dataclass(frozen=True)
class Mutant:
    """A kernel without one synchronisation.

    lines: the PTX lines of the original that change. problems: the numbers of those in which somebody executes one.
    """

    name: Name
    lines: tuple[int, ...]
    edits: tuple[Edit, ...]
    problems: tuple[int, ...]

    def of(self, ptx: str) -> str:
        """The mutant's PTX, from the original's."""
        return mutated(ptx, list(self.edits))


def mutants(problems: Sequence[Kernel]) -> list[Mutant]:
    """Every mutant of a kernel, in text order, barriers as a whole last.

    problems: launches of one PTX, each of which is run once, to see who executes what.
    Raises: EmulatorError if the unmutated kernel does something that is not legal.
    """
    assert len({problem.ptx for problem in problems}) == 1, "the problems are launches of one kernel"
    program, profile = problems[0].program(), Profile()
    found = sites(program)
    for own in fresh(problems):
        launch(program, own.launch, Options(), [profile])
    named = list(zip(names(program, problems[0].launch, profile, found), found))
    single = [_mutant(name, [site], profile) for name, site in named]
    return single + list(_whole_barriers(named, profile))


def _mutant(name: Name, of: Sequence[Site], profile: Profile) -> Mutant:
    executed = set[int]().union(*(profile.launches.get(site.index, ()) for site in of))
    return Mutant(name, tuple(s.line for s in of), tuple(s.edit for s in of), tuple(sorted(executed)))


def _whole_barriers(named: Sequence[tuple[Name, Site]], profile: Profile) -> Iterator[Mutant]:
    """Without one of its sites a barrier of several roles never completes; whether it is needed shows without all."""
    groups: defaultdict[str, list[tuple[Name, Site]]] = defaultdict(list)
    for name, site in named:
        if name.kind == "barrier" and name.about:
            groups[name.about].append((name, site))
    for about, members in groups.items():
        parties = {frozenset(profile.warps[site.index]) for _, site in members}
        if len(parties) < 2:
            continue
        roles = "+".join(dict.fromkeys(name.role for name, _ in members))
        forms = "+".join(dict.fromkeys(name.form for name, _ in members))
        functions = "+".join(dict.fromkeys(name.function for name, _ in members))
        name = Name(roles, functions, "barrier", forms, about, EVERYWHERE)
        yield _mutant(name, [site for _, site in members], profile)
