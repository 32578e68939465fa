"""Who computes a backward pass besides the kept libraries: our kernels on a GPU or on the emulator, and float64."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.attention.memory import Layout, call_of, layout_of
from undertow.attention.problem import Gradients, LibraryRefusal, Problem
from undertow.kernels.compile import MachineCodeError
from undertow.kernels.sm100.launch import compile_for
from undertow.kernels.sm100.plan import HEAD_DIM, plan
from undertow.kernels.sm100.tensors import TORCH_TYPES, LaunchInputError, check_tensors
from undertow.reference import Scoring, ideal_sums, round_to, row_stats, sink_gradient
from undertow.reference import Sequences as ReferenceSequences

OURS = ("sm100", "sm90")  # backends that run our kernels on a GPU
SCHEDULE = "split"


def outside_kernels(problem: Problem) -> str | None:
    """Why no kernel of ours computes `problem`, on whatever machine; None if one does."""
    if problem.q.shape[-1] != HEAD_DIM:
        return f"head_dim is {problem.q.shape[-1]}: the kernels have {HEAD_DIM}"
    dtype = next((ours for ours, theirs in TORCH_TYPES.items() if theirs == problem.q.dtype), None)
    if dtype is None:
        return f"dtype is {problem.q.dtype}: the kernels have {' and '.join(map(str, TORCH_TYPES.values()))}"
    try:
        check_tensors(plan(SCHEDULE, dtype), call_of(problem, layout_of(problem)).tensors)
    except LaunchInputError as error:
        return str(error)
    return None


def outside_device(arch: str, problem: Problem) -> str | None:
    """Why the kernels for `arch` do not compute `problem` on the GPU that holds it; None if they do."""
    if problem.q.device.type != "cuda":
        return f"q is on {problem.q.device}: the {arch} kernels need a CUDA device"
    reason = outside_kernels(problem)
    if reason:
        return reason
    from undertow.runtime import device

    return device.unsupported(arch, call_of(problem, layout_of(problem)).tensors, problem.settings)


def outside_emulator(problem: Problem) -> str | None:
    """Why the emulator does not compute `problem`; None if it does."""
    if problem.q.device.type != "cpu":
        return f"q is on {problem.q.device}: the emulator has CPU memory"
    return outside_kernels(problem)


def on_device(arch: str, problem: Problem, layout: Layout) -> Gradients:
    """Gradients by the kernels for `arch`, on the current stream of the device of q.

    Raises: LibraryRefusal where the machine code that the compiler makes of them is not used; CompileError.
    """
    from undertow.runtime import device

    call = call_of(problem, layout)
    try:
        device.backward(arch, call.tensors, problem.settings)
    except MachineCodeError as error:
        raise LibraryRefusal(str(error)) from error
    return call.gradients()


def on_emulator(problem: Problem, layout: Layout) -> Gradients:
    """Gradients by the sm100 kernels, every instruction executed by the emulator.

    Results are full of NaN before, so that an element that no kernel writes does not pass for a number.
    """
    from undertow.emulated import execute
    from undertow.emulator import Options

    call = call_of(problem, layout)
    for name in ("dq", "dk", "dv", "dsink"):
        result = getattr(call.tensors, name)
        if result is not None:
            result.fill_(torch.nan)
    compiled = compile_for(SCHEDULE, call.tensors, problem.settings)
    execute(compiled, call.tensors, problem.settings, Options(backend="auto"))
    return call.gradients()


def by_reference(problem: Problem) -> Gradients:
    """Gradients in float64 by explicit formulas, each rounded once to the dtype of its input.

    The given LSE and out are trusted, as the kernels do. Memory: float64 copies of the inputs, and scores of 1024 rows.
    """
    scoring = scoring_of(problem)
    q, k, v, dout = (x.double() for x in (problem.q, problem.k, problem.v, problem.dout))
    stats = row_stats(problem.out, dout, problem.lse, problem.dlse)
    exact = ideal_sums(q, k, v, dout, stats, scoring)  # no operand is rounded, for all are float64
    dq, dk, dv = (stored(grad, x) for grad, x in zip(exact, (problem.q, problem.k, problem.v)))
    sink = problem.sink
    return Gradients(dq, dk, dv, None if sink is None else stored(sink_gradient(q, k, v, stats, scoring), sink))


def nothing_to_see(problem: Problem) -> Gradients:
    """Gradients without a query row or without a key: zeros, but a sink still moves the LSE of rows without keys."""
    dq, dk, dv = (torch.zeros_like(x) for x in (problem.q, problem.k, problem.v))
    if problem.sink is None:
        return Gradients(dq, dk, dv)
    dsink = torch.zeros_like(problem.sink, dtype=torch.float64)
    if problem.dlse is not None and problem.q.numel():
        lse = problem.lse.double()
        of_sink = torch.exp(problem.sink.double()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
        share = of_sink * problem.dlse.double().masked_fill(lse == -torch.inf, 0.0)  # rows of nobody may hold NaN
        dsink = share.movedim(-2, 0).flatten(1).sum(dim=1)
    return Gradients(dq, dk, dv, stored(dsink, problem.sink))


def scoring_of(call) -> Scoring:
    """The same attention as the reference says it."""
    settings, sequences = call.settings, call.sequences
    return Scoring(
        settings.softmax_scale,
        settings.causal,
        settings.window,
        settings.softcap,
        call.sink,
        None if sequences is None else ReferenceSequences(**vars(sequences)),
    )


def stored(exact: Tensor, like: Tensor) -> Tensor:
    """float64 numbers rounded once, in the dtype and the strides of `like`."""
    return torch.empty_like(like).copy_(round_to(exact, like.dtype))
