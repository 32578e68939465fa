"""Launch on both back ends and hold them against each other: memory, counts, findings, errors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from undertow import emulator as emu
from undertow.emulator.memory.global_memory import host_span

numpy_launch = emu.launch


def launch_on_both(module, description, options=None, observers=(), exact: bool = True) -> emu.Result:
    """Stand in for `emulator.launch`: run on NumPy, run again from the same memory compiled, compare.

    Leaves the memory, the result or the error of the NumPy run. Launches with observers, another back end or
    what only NumPy elects pass.
    exact: compare counts and the words of errors, too, which depend on the order of warps where a kernel races.
    """
    options = options or emu.Options()
    if observers or options.backend != "numpy" or options.elected != "lowest":
        return numpy_launch(module, description, options, observers)
    spans = list(_spans(description))
    before = [_read(span) for span in spans]
    expected, expected_error = _outcome(module, description, options)
    after = [_read(span) for span in spans]
    for span, data in zip(spans, before, strict=True):
        _write(span, data)
    compiled = emu.Options("compiled", options.schedule, options.completion, options.cta_order)
    actual, actual_error = _outcome(module, description, compiled)
    if expected_error is not None:
        _compare_errors(expected_error, actual_error, exact)
        raise expected_error
    assert actual_error is None, f"only the compiled back end refuses: {actual_error}"
    assert expected is not None and actual is not None
    for span, data in zip(spans, after, strict=True):
        assert _read(span) == data, f"{span.name} differs between the back ends"
    assert actual.backend == "compiled"
    if exact:
        _compare_results(expected, actual)
    return expected


def _compare_errors(expected: Exception, actual: Exception | None, exact: bool) -> None:
    assert type(actual) is type(expected), f"NumPy raises {expected!r}, compiled {actual!r}"
    if isinstance(expected, emu.EmulatorError) and isinstance(actual, emu.EmulatorError):
        assert (actual.fact == expected.fact and actual.rule == expected.rule) or not exact
        assert bool(actual.place) == bool(expected.place)


def _compare_results(expected: emu.Result, actual: emu.Result) -> None:
    assert actual.barriers == expected.barriers
    assert actual.instructions == expected.instructions
    np.testing.assert_array_equal(actual.executions, expected.executions)
    assert sorted(map(str, actual.findings)) == sorted(map(str, expected.findings))


def _outcome(module, description, options) -> tuple[emu.Result | None, ValueError | None]:
    try:
        return numpy_launch(module, description, options), None
    except ValueError as error:
        return None, error


def _spans(description: emu.Launch) -> Iterator:
    for place, value in enumerate(description.params):
        if isinstance(value, (emu.Tensor, emu.Pointer, emu.TensorMap)):
            try:
                yield host_span(value.array, f"params[{place}]")
            except emu.LaunchError:
                continue  # refused by the launch itself


def _read(span) -> bytes:
    return ctypes.string_at(span.pointer, span.num_bytes)


def _write(span, data: bytes) -> None:
    if span.writable:
        ctypes.memmove(span.pointer, data, span.num_bytes)
