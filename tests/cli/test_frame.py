"""What every subcommand owes its callers: exit codes, one JSON object on stdout, nothing else there."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import types
import warnings

import pytest

from undertow import cli
from undertow.cli import Outcome
from undertow.progress import Progress


class Refused(ValueError):
    pass


def command(execute) -> types.ModuleType:
    """A subcommand `probe` whose work is `execute(arguments)`."""
    module = types.ModuleType("undertow_probe")
    module.__dict__.update(
        DESCRIPTION="Probe of the frame.",
        BAD_INPUT=(Refused,),
        configure=lambda parser: parser.add_argument("--count", type=int, default=1),
        execute=lambda arguments, progress: execute(arguments),
    )
    return module


@pytest.fixture
def run(monkeypatch, capfd):
    """run(execute, *words) -> (exit code, stdout, stderr) of `undertow probe`."""

    def run_probe(execute, *words: str):
        module = command(execute)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "probe", (module.__name__, "probe of the frame"))
        code = cli.main(["probe", *words])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run_probe


def outcome(ok: bool) -> Outcome:
    return Outcome(ok, {"ok": ok}, "a table")


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_is_the_verdict(run, ok, code):
    assert run(lambda arguments: outcome(ok)) == (code, "a table\n", "")


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_json_is_one_object_alone_on_stdout(run, ok, code):
    def noisy(arguments) -> Outcome:
        print("printed by Python")
        os.write(1, b"written by a compiler\n")
        subprocess.run(["echo", "said by a child"], check=True)
        return outcome(ok)

    got, out, err = run(noisy, "--json")
    assert got == code and out.count("\n") == 1 and json.loads(out) == {"ok": ok}
    assert all(text in err for text in ("printed by Python", "written by a compiler", "said by a child"))


def test_a_warning_is_one_line_on_stderr(run):
    def warn(arguments) -> Outcome:
        for _ in range(3):
            warnings.warn("no C++ compiler; running on NumPy", stacklevel=1)
        return outcome(True)

    assert run(warn, "--json") == (0, '{"ok": true}\n', "undertow probe: no C++ compiler; running on NumPy\n")


def test_bad_input_is_exit_code_2_with_one_line(run):
    def refuse(arguments) -> Outcome:
        raise Refused("count=-1: must be at least 0")

    for words in ((), ("--json",)):
        assert run(refuse, *words) == (2, "", "undertow probe: count=-1: must be at least 0\n")


def test_an_internal_error_is_neither_a_verdict_nor_json(run):
    def fail(arguments) -> Outcome:
        raise KeyError("lost")

    code, out, err = run(fail, "--json")
    assert code == 3 and out == "" and "Traceback" in err and "undertow probe: not judged" in err


def test_what_json_cannot_say_is_not_printed(run):
    with pytest.raises(ValueError, match="Out of range float values"):
        run(lambda arguments: Outcome(True, {"error": float("nan")}, ""), "--json")


def test_an_interrupt_is_exit_code_130(run):
    def interrupt(arguments) -> Outcome:
        raise KeyboardInterrupt

    assert run(interrupt) == (130, "", "undertow probe: interrupted\n")


@pytest.mark.parametrize("words", [("--count", "many"), ("--unknown",)], ids=" ".join)
def test_usage_errors_are_exit_code_2(run, words):
    code, out, err = run(lambda arguments: outcome(True), *words)
    assert code == 2 and out == "" and "usage: undertow" in err


@pytest.mark.parametrize("words", [[], ["nothing"]], ids=["none", "unknown"])
def test_a_missing_or_unknown_command_is_exit_code_2_and_lists_them(capfd, words):
    assert cli.main(words) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and ("verify" in captured.err or "COMMAND" in captured.err)


@pytest.mark.parametrize("words", [["--help"], ["verify", "--help"], ["--version"]], ids=" ".join)
def test_help_and_version_are_exit_code_0(capfd, words):
    assert cli.main(words) == 0
    assert "undertow" in capfd.readouterr().out


def test_every_command_has_a_help_line_and_json(capfd):
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0
        assert "--json" in capfd.readouterr().out


def test_a_closed_pipe_keeps_the_verdict():
    """`undertow ... | true`: the reader is gone before the table is printed."""
    program = "import sys; from undertow import cli; sys.stdin.readline(); sys.exit(cli._print('x' * 100000, 1))"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdout.close()
    child.stdin.write(b"go\n")
    child.stdin.close()
    assert child.wait(timeout=60) == 1


class Stream(io.StringIO):
    """A text stream that claims to be a terminal or not."""

    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    @property
    def text(self) -> str:
        return self.getvalue()


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr("undertow.progress.QUIET_SECONDS", 0.02)
    monkeypatch.setattr("undertow.progress.TICK_SECONDS", 0.02)


def wait_for(condition) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen within 5 s")


def test_short_work_is_silent():
    stream = Stream(terminal=True)
    with Progress("undertow probe", stream) as progress:
        progress.step("quick")
    assert stream.text == ""


def test_long_work_says_each_step_once_in_a_log(fast):
    stream = Stream(terminal=False)
    with Progress("undertow probe", stream) as progress:
        for step in ("first", "second"):
            progress.step(step)
            wait_for(lambda step=step: step in stream.text)
    lines = stream.text.splitlines()
    assert [line.rpartition(" (")[0] for line in lines] == ["undertow probe: first", "undertow probe: second"]


def test_a_terminal_line_is_wiped_at_the_end(fast):
    stream = Stream(terminal=True)
    with Progress("undertow probe", stream) as progress:
        progress.step("long")
        wait_for(lambda: "long" in stream.text)
    assert "\n" not in stream.text and stream.text.endswith("\r\x1b[K")
