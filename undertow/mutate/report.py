"""What a mutation run says: a row per mutant, counts, and which reasons are missing or stale."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from undertow.mutate.mutants import Mutant
from undertow.mutate.profile import Name
from undertow.mutate.survivors import Reason
from undertow.mutate.trial import SURVIVED, Verdict


@dataclass(frozen=True)
class Row:
    """One mutant, what became of it, and the reason for it if somebody has given one."""

    mutant: Mutant
    verdict: Verdict
    reason: Reason | None

    @property
    def survived(self) -> bool:
        return self.verdict.how == SURVIVED

    @property
    def record(self) -> dict[str, object]:
        """The row for JSON."""
        return {
            **asdict(self.mutant.name),
            "lines": list(self.mutant.lines),
            "verdict": self.verdict.how,
            "rules": list(self.verdict.rules),
            "strict": self.verdict.strict,
            "protocol_only": self.verdict.protocol_only,
            "problem": self.verdict.problem,
            "setting": self.verdict.setting,
            "shown": self.verdict.shown,
            "runs": self.verdict.runs,
            "category": self.reason.category if self.survived and self.reason else None,
            "because": self.reason.because if self.survived and self.reason else None,
        }


@dataclass(frozen=True)
class Report:
    """A whole run. `unmatched`: reasons that speak of no synchronisation of the kernel."""

    rows: tuple[Row, ...]
    unmatched: tuple[Name, ...] = ()
    seconds: float = 0.0

    @property
    def survivors(self) -> list[Row]:
        return [row for row in self.rows if row.survived]

    @property
    def unexplained(self) -> list[Row]:
        return [row for row in self.survivors if row.reason is None]

    @property
    def redundant(self) -> list[Row]:
        """Survivors that cost time and order nothing: what a faster kernel could leave out."""
        return [row for row in self.survivors if row.reason and row.reason.category == "redundant"]

    @property
    def protocol_only(self) -> list[Row]:
        """Waits that only the protocol of their mbarrier misses: other edges order all accesses."""
        return [row for row in self.rows if row.verdict.protocol_only]

    @property
    def stale(self) -> list[str]:
        """Reasons that are not true any more."""
        killed = [f"{row.mutant.name}: has a reason, but {row.verdict.how}" for row in self.rows if _refuted(row)]
        return killed + [f"{name}: there is no such synchronisation" for name in self.unmatched]

    @property
    def ok(self) -> bool:
        return not self.unexplained and not self.stale

    @property
    def record(self) -> dict[str, object]:
        """The object for JSON."""
        return {
            "mutants": len(self.rows),
            "killed": len(self.rows) - len(self.survivors),
            "explained": len(self.survivors) - len(self.unexplained),
            "unexplained": len(self.unexplained),
            "redundant": len(self.redundant),
            "protocol_only": len(self.protocol_only),
            "stale": self.stale,
            "runs": sum(row.verdict.runs for row in self.rows),
            "seconds": round(self.seconds, 3),
            "rows": [row.record for row in self.rows],
        }


def _refuted(row: Row) -> bool:
    return row.reason is not None and not row.survived
