"""`undertow doctor`: is this machine fit, and what would run on it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from undertow import __version__
from undertow.cli import Outcome
from undertow.health import BAD, Finding, examine, home
from undertow.progress import Progress

DESCRIPTION = """\
Look at Python and the packages, releases of the compiler known to be bad, GPUs and driver, the cache of compiled
kernels, and who would compute a typical call. Exit code 1 if something is wrong; a machine without a GPU is not.
"""
BAD_INPUT: tuple[type[Exception], ...] = ()


def configure(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""
    del parser


def execute(arguments: argparse.Namespace, progress: Progress) -> Outcome:
    """Examine the machine."""
    del arguments
    progress.step("examining packages, GPUs and the cache")
    findings = list(examine())
    ok = all(finding.status != BAD for finding in findings)
    report = {"ok": ok, "version": __version__, "folder": str(home()), "findings": [asdict(f) for f in findings]}
    return Outcome(ok, report, _text(findings, ok))


def _text(findings: list[Finding], ok: bool) -> str:
    width = max(len(finding.subject) for finding in findings)
    lines = [f"undertow {__version__} in {home()}", ""]
    for finding in findings:
        lines.append(f"{finding.status:5}  {finding.subject:{width}}  {finding.found}".rstrip())
        if finding.advice:
            lines.append(f"{'':5}  {'':{width}}  -> {finding.advice}")
    wrong = [finding.subject for finding in findings if finding.status == BAD]
    return "\n".join([*lines, "", "Nothing is wrong." if ok else f"Wrong: {', '.join(wrong)}"])
