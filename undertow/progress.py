"""Signs of life on stderr for work that takes longer than a person likes to wait in silence."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

QUIET_SECONDS = 2.0  # nothing is printed before
TICK_SECONDS = 1.0  # how often the line is renewed on a terminal
LOG_SECONDS = 15.0  # how often an unchanged step is repeated where stderr is not a terminal


class Progress:
    """Prints the current step and the seconds since the start, from a thread, while the `with` block runs.

    On a terminal one line is renewed and wiped at the end; elsewhere each step is a line of its own.
    """

    def __init__(self, name: str, stream: TextIO | None = None):
        self._name, self._stream = name, stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._step = "starting"
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._shown: tuple[str, float] | None = None  # what was printed last, and when
        self._begin = time.monotonic()

    def step(self, text: str) -> None:
        """Say what is being done from now on."""
        self._step = text

    def __enter__(self) -> Progress:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        if self._terminal and self._shown is not None:
            self._write("\r\x1b[K")

    def _run(self) -> None:
        wait = QUIET_SECONDS
        while not self._done.wait(wait):
            self._show()
            wait = TICK_SECONDS

    def _show(self) -> None:
        now, step = time.monotonic(), self._step
        line = f"{self._name}: {step} ({now - self._begin:.0f} s)"
        if self._terminal:
            self._write(f"\r\x1b[K{line}")
        elif self._shown is None or self._shown[0] != step or now - self._shown[1] >= LOG_SECONDS:
            self._write(f"{line}\n")
        else:
            return
        self._shown = (step, now)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
