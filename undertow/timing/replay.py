"""One replay of a recorded CTA as a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .critical import critical_path
from .results import Timeline
from .run import run
from .spans import meetings, spans
from .steady import phases, steady_state
from .trace import Trace
from .usage import stalls, utilisation


def replay(
    trace: Trace, constants: Mapping[str, float], seed: int = 0, with_spans: bool = True, chip: str = "",
    assumed: Sequence[str] = (),
) -> Timeline:  # fmt: skip
    """Run a recorded CTA with a set of constants and say where its time goes.

    Args:
        trace: of `record`.
        constants: by name, all of `constants_of(trace.arch)`, in their units: `Chip.point()` or `Chip.draw(seed)`.
        seed: of jitter and stalls. The same arguments give the same timeline.
        with_spans: False leaves spans, meetings, stalls and critical path empty, for many draws.
        chip: name of the chip, for the record.
        assumed: names of constants that nobody measured; those that this architecture reads are noted.

    Returns: Timeline; times in SM cycles from the start of the CTA.
    Raises: ConstantError, TimingError (a standstill; fewer than 2 query tiles), CompilerMissing.
    """
    done = run(trace, constants, seed)
    steady = steady_state(trace, done)
    return Timeline(
        trace.kernel, chip, done.cycles, steady.cycles_per_tile, tuple(steady.begins.tolist()),
        spans(trace, done, steady) if with_spans else (),
        meetings(trace, done) if with_spans else (),
        utilisation(trace, done, steady, constants),
        stalls(trace, done, steady) if with_spans else {},
        critical_path(trace, done, steady) if with_spans else (),
        tuple(name for name in assumed if name in constants),
        phases(done, steady),
        trace.assumptions,
    )  # fmt: skip
