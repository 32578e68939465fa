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
    """A kernel without one synchronisation. lines: the PTX lines of the original that change."""

    name: Name
    lines: tuple[int, ...]
    edits: tuple[Edit, ...]

    def of(self, ptx: str) -> str:
        """The mutant's PTX, from the original's."""
        return mutated(ptx, list(self.edits))


def mutants(kernel: Kernel) -> list[Mutant]:
    """Every mutant of a kernel, in text order, barriers as a whole last.

    Runs the kernel once, to see who executes what.
    Raises: EmulatorError if the unmutated kernel does something that is not legal.
    """
    program, profile = kernel.program(), Profile()
    found = sites(program)
    (own,) = fresh([kernel])
    launch(program, own.launch, Options(), [profile])
    named = list(zip(names(program, own.launch, profile, found), found))
    single = [Mutant(name, (site.line,), (site.edit,)) for name, site in named]
    return single + list(_whole_barriers(named, profile))


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
        yield Mutant(name, tuple(s.line for _, s in members), tuple(s.edit for _, s in members))
