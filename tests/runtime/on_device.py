"""What is asked of a compiled call on a real GPU. Plain functions: they also run where only this package and torch are.

The row kernels have closed forms for everything that they write, and run on GPUs that the main kernel does not run on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.runtime.calls import variant
from undertow.kernels.sm100 import call
from undertow.kernels.sm100.launch import DEFAULT
from undertow.kernels.sm100.plan import dq_accumulator_index
from undertow.kernels.sm100.tensors import BackwardTensors, Workspaces, query_tiles

ROWS, HEADS, BATCH = 300, 4, 2
SCALE = 64**-0.5


class RowCall:
    """Random inputs of the two row kernels, and what they must make of them."""

    def __init__(self, device: str = "cuda", seed: int = 0):
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        # heads before rows in memory: strides that nobody bakes in
        rows = [random(BATCH, HEADS, ROWS, 64).transpose(1, 2) for _ in range(8)]
        q, k, v, out, dout, dq, dk, dv = rows
        lse = random(BATCH, HEADS, ROWS, dtype=torch.float32)
        self.tensors = BackwardTensors(q, k, v, out, dout, lse, dq, dk, dv)
        self.variant = variant("dense")
        self.numbers = call.numbers_of(self.variant, self.tensors, DEFAULT, 1)
        self.workspace = random(call.workspace_floats(self.variant, self.tensors), dtype=torch.float32)
        self.expected = self._expected()

    @property
    def arguments(self) -> tuple:
        return call.arguments(self.tensors, self.workspace, self.numbers)

    def buffers(self) -> Workspaces:
        """Views of the workspace."""
        tiles = query_tiles(self.tensors)
        sizes = [BATCH * HEADS * tiles * extent for extent in (128 * 64, 128, 128)]
        accumulator, lse_log2, d = self.workspace.split(sizes)
        rows = (BATCH, HEADS, tiles * 128)
        return Workspaces(lse_log2.view(rows), d.view(rows), accumulator.view(BATCH, HEADS, tiles, 8192))

    def _expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dQ, LSE_log2 and D in float64, padding rows included."""
        t, buffers = self.tensors, self.buffers()
        index = torch.tensor([[dq_accumulator_index(row, column) for column in range(64)] for row in range(128)])
        tiles = buffers.dq_accumulator[..., index.to(t.q.device)]  # batch, heads, tiles, 128, 64
        dq = SCALE * tiles.flatten(2, 3)[:, :, :ROWS].transpose(1, 2).double()
        lse_log2 = torch.full_like(buffers.lse_log2, math.inf, dtype=torch.float64)
        lse_log2[..., :ROWS] = t.lse.double() / math.log(2.0)
        d = torch.zeros_like(buffers.d, dtype=torch.float64)
        d[..., :ROWS] = (t.out.double() * t.dout.double()).sum(-1).transpose(1, 2)
        return dq, lse_log2, d

    def complaints(self) -> list[str]:
        """What is not as expected: one rounding of dQ to bf16, a few of float32 elsewhere, a cleared accumulator."""
        buffers, t = self.buffers(), self.tensors
        dq, lse_log2, d = self.expected
        noise = (t.out.double() * t.dout.double()).abs().sum(-1).transpose(1, 2).amax() * 10 * 2.0**-24
        right = {
            "dq": bool(((t.dq.double() - dq).abs() <= dq.abs() * 2.0**-8 + 2.0**-133).all()),
            "LSE_log2": torch.allclose(buffers.lse_log2.double(), lse_log2, rtol=2.0**-22, atol=0.0),
            "D": bool(((buffers.d.double() - d).abs() <= noise).all()),
            "accumulator": not bool(buffers.dq_accumulator.any()),
        }
        return [name for name, is_right in right.items() if not is_right]


def right_values(function: Callable[..., None]) -> list[str]:
    """On the default stream."""
    row_call = RowCall()
    function(*row_call.arguments)
    return row_call.complaints()


def on_a_side_stream(function: Callable[..., None]) -> list[str]:
    """Public case C01: the inputs arrive late, on the stream that the call has to be on."""
    row_call = RowCall()
    names = ("out", "dout", "lse")
    late = {name: getattr(row_call.tensors, name).clone() for name in names}
    for name in names:
        getattr(row_call.tensors, name).fill_(torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        for name, values in late.items():
            getattr(row_call.tensors, name).copy_(values)
        function(*row_call.arguments)
    torch.cuda.synchronize()
    return row_call.complaints()


def in_a_graph(function: Callable[..., None]) -> list[str]:
    """Public case C05: captured once, replayed on new contents of the same tensors."""
    captured, other = RowCall(seed=1), RowCall(seed=2)
    function(*captured.arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*captured.arguments)
    for name in ("out", "dout", "lse"):
        getattr(captured.tensors, name).copy_(getattr(other.tensors, name))
    captured.workspace.copy_(other.workspace)
    graph.replay()
    torch.cuda.synchronize()
    captured.expected = other.expected
    return captured.complaints()
