"""Runs PTX kernels on the CPU, from PTX text and a launch description; see `launch`."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from undertow import ptx
from undertow.plan.description import Ints, Launch, NumberLabels, Opaque, Pointer, Tensor, TensorMap

from .description import resolve
from .errors import Deadlock, EmulatorError, LaunchError, MemoryFault, ProtocolError, UnsupportedPtx
from .events import EventBus
from .machine import Machine
from .observers.base import Finding, Observer
from .observers.failure import findings_after
from .program import Program, load_program, remembered_program

__all__ = [
    "Deadlock", "EmulatorError", "Finding", "Ints", "Launch", "LaunchError", "MemoryFault", "NumberLabels", "Observer",
    "Opaque", "Options", "Pointer", "Program", "ProtocolError", "Result", "Tensor", "TensorMap", "UnsupportedPtx",
    "launch", "load_program", "remembered_program",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How to run.

    backend:    "numpy", "compiled" (needs a C++ compiler) or "auto" (compiled if possible; observers need numpy)
    schedule:   "fixed" (round robin, neighbouring warps together) or an int, the seed of a random order
    completion: when asynchronous operations happen: "eager" (at issue), "late" (only when no warp can run) or
                ("seeded", seed)
    cta_order:  linear CTA numbers (x fastest) in the order in which they run; None: ascending
    elected:    which lane of the member mask elect.sync chooses: "lowest", or on the NumPy back end "highest"
    """

    backend: str = "numpy"
    schedule: str | int = "fixed"
    completion: str | tuple[str, int] = "eager"
    cta_order: Sequence[int] | None = None
    elected: str = "lowest"


@dataclass
class Result:
    """What a launch did.

    instructions: warp instructions executed. executions: int64 per PTX instruction, how many warps executed it (lanes
    of one warp that execute it apart count apart; a false guard counts, a wait counts once, when it succeeds).
    barriers: named barrier id -> completed executions, summed over CTAs. seconds: run time without decoding.
    """

    instructions: int
    executions: np.ndarray
    barriers: dict[int, int]
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    backend: str = "numpy"


def launch(
    module: str | ptx.Module | Program, description: Launch, options: Options | None = None,
    observers: Sequence[Observer] = (),
) -> Result:  # fmt: skip
    """Run a kernel; it reads and writes the arrays of the description in place.

    Args:
        module: PTX text, which is decoded once while it is remembered; a parsed module; or a Program of `load_program`.
        description: the launch: grid, block, dynamic shared memory, one value per `.param`.
        options: back end, schedule, completion; see Options.
        observers: objects that watch events and return findings; results are the same with and without them.

    Returns: Result.
    Raises: ptx.PtxSyntaxError; UnsupportedPtx, LaunchError, MemoryFault, ProtocolError, Deadlock (all EmulatorError,
        all ValueError); the message names kernel, CTA, warps, PTX line and source line.

    Example: y[i] = a * x[i] for i < n, in blocks of 64 threads.

    >>> import numpy as np
    >>> from undertow import emulator as emu
    >>> text = '''
    ... .version 8.8
    ... .target sm_100a
    ... .address_size 64
    ... .visible .entry scale(.param .u64 y, .param .u64 x, .param .f32 a, .param .u32 n)
    ... {
    ...     .reg .pred %p;  .reg .b32 %r<5>;  .reg .f32 %f<4>;  .reg .b64 %rd<6>;
    ...     mov.u32 %r1, %ctaid.x;
    ...     mov.u32 %r2, %ntid.x;
    ...     mov.u32 %r3, %tid.x;
    ...     mad.lo.s32 %r4, %r1, %r2, %r3;
    ...     ld.param.u32 %r1, [n];
    ...     setp.ge.s32 %p, %r4, %r1;
    ...     @%p ret;
    ...     ld.param.u64 %rd1, [x];
    ...     ld.param.u64 %rd2, [y];
    ...     mul.wide.s32 %rd3, %r4, 4;
    ...     add.s64 %rd4, %rd1, %rd3;
    ...     add.s64 %rd5, %rd2, %rd3;
    ...     ld.global.f32 %f1, [%rd4];
    ...     ld.param.f32 %f2, [a];
    ...     mul.f32 %f3, %f1, %f2;
    ...     st.global.f32 [%rd5], %f3;
    ...     ret;
    ... }'''
    >>> x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    >>> description = emu.Launch(grid=(2,), block=(64,), params=[emu.Pointer(y), emu.Pointer(x), 0.5, 100])
    >>> result = emu.launch(text, description)
    >>> y[:4].tolist(), y[99].item(), result.instructions
    ([0.0, 0.5, 1.0, 1.5], 49.5, 68)
    """
    options = options or Options()
    _check_options(options, observers)
    if isinstance(module, str):
        program = remembered_program(module, description.kernel)
    else:
        program = module if isinstance(module, Program) else load_program(module, description.kernel)
    if options.backend != "numpy" and not observers and options.elected == "lowest":
        compiled = _compiled_result(program, description, options)
        if compiled is not None:
            return compiled
    bus = EventBus(observers)
    machine = Machine(resolve(program, description), options, bus)
    for observer in observers:
        observer.start(program, description)
    start = time.perf_counter()
    try:
        machine.run()
    except EmulatorError as error:
        error.findings = machine.tally.findings + findings_after(error, observers)
        raise
    seconds = time.perf_counter() - start
    executions = np.zeros(len(program.code), np.int64)
    for block_start, count in machine.executor.counts.items():
        executions[block_start : program.blocks[block_start].end] += count
    findings = machine.tally.findings + [f for o in observers for f in o.finish()]
    return Result(int(executions.sum()), executions, machine.tally.barriers, findings, seconds, "numpy")


def _check_options(options: Options, observers: Sequence[Observer]) -> None:
    if options.backend not in ("numpy", "compiled", "auto"):
        raise LaunchError(f"backend: {options.backend!r}; allowed are numpy, compiled, auto")
    if options.backend == "compiled" and observers:
        raise LaunchError("backend: 'compiled' publishes no events; observers need 'numpy' or 'auto'")
    if options.schedule != "fixed" and not isinstance(options.schedule, (int, np.integer)):
        raise LaunchError(f"schedule: {options.schedule!r}; allowed are 'fixed' and an integer seed")
    if options.elected not in ("lowest", "highest"):
        raise LaunchError(f"elected: {options.elected!r}; allowed are 'lowest' and 'highest'")
    if options.backend == "compiled" and options.elected != "lowest":
        raise LaunchError(f"elected: {options.elected!r} is for the NumPy back end; 'compiled' elects the lowest lane")
    seeded = (
        isinstance(options.completion, tuple) and len(options.completion) == 2 and options.completion[0] == "seeded"
    )
    if options.completion not in ("eager", "late") and not seeded:
        raise LaunchError(f"completion: {options.completion!r}; allowed are 'eager', 'late', ('seeded', seed)")


def _compiled_result(program: Program, description: Launch, options: Options) -> Result | None:
    """Run on the compiled back end, or say in one line why NumPy takes over."""
    try:
        from . import compiled
    except ImportError as error:
        warnings.warn(f"emulator: no compiled back end ({error}); running on NumPy", stacklevel=3)
        return None
    try:
        return compiled.run(program, description, options)
    except compiled.NotCompiled as error:
        if options.backend == "compiled":
            raise
        warnings.warn(f"emulator: {error.fact}; running on NumPy", stacklevel=3)
        return None
    except compiled.CompilerMissing as error:
        warnings.warn(f"emulator: {error}; running on NumPy", stacklevel=3)
        return None
