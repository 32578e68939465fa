"""Check and measure compiled SM90 kernels on a GPU: ours and flash-attn-4's, from the folder of `hopper_export.py`.

    python hopper_measure.py FOLDER check            errors against float64, beside an ideal 16-bit pipeline's
    python hopper_measure.py FOLDER cycles PAIR...   the main kernels alone, by Nsight Compute (ncu)
    python hopper_measure.py FOLDER times PAIR...    whole backward passes, interleaved and sustained

A pair is `library@shape`, such as `causal@gqacausal`; the shapes are those of `hopper_shapes`: 65536 tokens in
sequences of 8192, or of another length that the name ends with, as in `dense2k`. A library that splits groups may be
told in how many parts: `causal_split:8@mqacausal`.

Needs torch, apache-tvm-ffi and the DSL's runtime library, whose path UNDERTOW_DSL_RUNTIME gives; of this repository
`hopper_shapes.py` alone. One JSON record a line goes to standard output.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hopper_shapes import BENCH, CHECKS, HEAD_DIM, Shape

TILE = 128
L2_BYTES, ROW_BYTES, WAVE = 18 * 2**20, 520, 128  # as sm90.launch bundles heads
MOST_ROWS, SHORT = {torch.float16: 2**16, torch.bfloat16: 2**19}, 8  # as sm90.parts divides groups
MASKED, MASKED_IN_TURN, DIVIDED_IN_TURN = (8, 2**17), (4, 2**16), (4, 2**14)
LOG2_E = math.log2(math.e)
FOLDER = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path()


@functools.cache
def function(name: str) -> Callable[..., Any]:
    import tvm_ffi

    return tvm_ffi.load_module(str(FOLDER / f"{name}.so")).backward_pass


class Case:
    """Inputs, outputs and workspaces of one problem, and the passes over them."""

    def __init__(self, shape: Shape, seed: int = 0):
        self.shape = shape
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(heads: int) -> torch.Tensor:
            size = (shape.batch, shape.seqlen, heads, HEAD_DIM)
            return torch.randn(*size, device="cuda", generator=generator).to(shape.dtype)

        self.q, self.dout = normal(shape.heads), normal(shape.heads)
        self.k, self.v = normal(shape.kv_heads), normal(shape.kv_heads)
        self.scale = HEAD_DIM**-0.5
        self.group = shape.heads // shape.kv_heads
        ends = [0]
        for length in shape.lengths:
            ends.append(ends[-1] + length)
        self.offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
        self.sink = torch.randn(shape.heads, device="cuda", generator=generator) if shape.extras else None
        self.out, self.lse = self._forward()
        self.dlse = torch.randn(self.lse.shape, device="cuda", generator=generator) if shape.extras else None
        self.dsink = torch.empty_like(self.sink) if self.sink is not None else None
        self.dq, self.dk, self.dv = (torch.full_like(x, math.nan) for x in (self.q, self.k, self.v))
        packed = bool(shape.lengths)
        self.tiles = shape.seqlen // TILE + len(shape.lengths) + 1 if packed else -(-shape.seqlen // TILE)
        floats = shape.batch * shape.heads * self.tiles * (TILE * HEAD_DIM + 9 * TILE + 10) + 4  # as sm90.call
        if self.group > 1:  # partial sums, if groups have as many parts as query heads
            floats += shape.batch * shape.heads * self.tiles * 2 * TILE * HEAD_DIM
        self.workspace = torch.empty(floats, device="cuda")

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        if shape.window == (None, None) and not shape.lengths and not shape.extras:
            k, v = (x.repeat_interleave(self.group, 2).transpose(1, 2) for x in (self.k, self.v))
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            out, lse = flash(self.q.transpose(1, 2), k, v, 0.0, shape.causal, scale=self.scale)[:2]
            return out.transpose(1, 2).contiguous(), lse.float().contiguous()
        out, lse = torch.empty_like(self.q), torch.empty(shape.batch, shape.heads, shape.seqlen, device="cuda")
        for batch in range(shape.batch):
            for head in range(shape.heads):
                p, lse[batch, head] = self._probabilities(batch, head)
                out[batch, :, head] = (p @ self.v[batch, :, head // self.group].double()).to(shape.dtype)
        return out, lse

    def _seen(self) -> torch.Tensor:
        row = torch.arange(self.shape.seqlen, device="cuda")[:, None]
        key = torch.arange(self.shape.seqlen, device="cuda")[None]
        left, right = self.shape.band
        seen = torch.ones(self.shape.seqlen, self.shape.seqlen, device="cuda", dtype=torch.bool)
        if left is not None:
            seen &= key >= row - left
        if right is not None:
            seen &= key <= row + right
        if self.shape.lengths:
            owner = torch.bucketize(row, self.offsets[1:].long(), right=True)
            seen &= owner == owner.T
        return seen

    def _probabilities(self, batch: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = self.q[batch, :, head].double(), self.k[batch, :, head // self.group].double()
        scores = (q @ k.T * self.scale).masked_fill_(~self._seen(), -math.inf)
        lse = torch.logsumexp(scores, 1)
        if self.sink is not None:
            lse = torch.logaddexp(lse, self.sink[head].double())
        return torch.exp(scores - lse[:, None]), lse

    @property
    def average(self) -> int:
        return self.shape.seqlen // max(1, len(self.shape.lengths))

    def parts(self, name: str) -> int:
        """Parts of a group for a library, as sm90.parts says unless its name does."""
        if "split" not in name or ":" in name:
            return int(name.partition(":")[2] or 1)
        items, masked = self.shape.batch * self.tiles * self.shape.kv_heads, self.shape.band != (None, None)
        tiles, wanted = -(-self.average // TILE), WAVE * (2 if masked else 1)
        for parts in (n for n in range(1, self.group + 1) if self.group % n == 0):
            heads, most = self.group // parts, (self.group, MOST_ROWS[self.shape.dtype])
            if masked:
                in_turn = DIVIDED_IN_TURN if parts > 1 else MASKED_IN_TURN
                most = in_turn if "deterministic" in name else MASKED
                most = most[0], most[1] if None in self.shape.band else MASKED[1]
            fits = heads <= most[0] and heads * self.average <= min(most[1], MOST_ROWS[self.shape.dtype])
            if fits and (items * parts >= wanted or heads * tiles <= SHORT):
                return parts
        return self.group

    def bundle(self, parts: int, deterministic: bool) -> int:
        """Heads to a bundle, as sm90.launch says."""
        kv_heads, group = self.shape.kv_heads * parts, self.group // parts
        heads = self.shape.batch * kv_heads
        most = heads if deterministic and group == 1 else kv_heads
        fitting = max(1, min(most, L2_BYTES // (self.average * group * ROW_BYTES)))
        return fitting if deterministic else max(fitting, min(heads, -(-WAVE // self.tiles)))

    def ours(self, name: str) -> tuple[Any, ...]:
        """The arguments of a call of one of our libraries, as sm90.call nests them."""
        shape, parts = self.shape, self.parts(name)
        left, right = shape.band
        numbers = (shape.seqlen, left or 0, right or 0, self.bundle(parts, "deterministic" in name))
        numbers += (self.scale * LOG2_E, self.scale, LOG2_E, self.scale)
        items = shape.batch * self.tiles * shape.kv_heads * parts
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        numbers += (min(items, processors), items, *([parts] if "split" in name else []))
        reads = [self.q, self.k, self.v, self.out, self.dout, self.lse]
        writes = [self.dq, self.dk, self.dv]
        packings = None
        if shape.lengths:
            reads, writes = ([x[0] for x in tensors] for tensors in (reads, writes))
            packings = ((self.offsets, self.offsets[:0]),) * 2
        return self.workspace, (*reads, self.dlse, self.sink, packings), (*writes, self.dsink), numbers

    def peer_preprocess(self) -> None:
        """flash-attn-4's: LSE in base 2, D, and a zero accumulator."""
        rows = -(-self.shape.seqlen // TILE) * TILE
        if not hasattr(self, "peer"):
            of_rows = [torch.empty(self.shape.batch, self.shape.heads, rows * n, device="cuda") for n in (1, 1, 64)]
            keys = [
                torch.zeros(self.shape.batch, self.shape.kv_heads, rows * HEAD_DIM, device="cuda") for _ in range(2)
            ]
            self.peer = (*of_rows, *keys)
        lse, d, sums, *_ = self.peer
        absent = [None] * 5
        function("fa4_preprocess")(self.out, self.dout, d, self.lse, lse, sums, *absent, self.scale, None, None)

    def peer_main(self, name: str) -> None:
        if not hasattr(self, "peer"):
            self.peer_preprocess()
        lse, d, sums, dk, dv = self.peer
        results = (self.dk, self.dv) if self.group == 1 else (dk, dv)
        inputs = (self.q, self.k, self.v, self.dout, lse, d, sums)
        function(name)(*inputs, *results, self.scale, *[None] * 9, (None, None), None, None)

    def peers(self, name: str) -> None:
        """The whole backward pass of flash-attn-4; only without groups, whose sums it keeps apart."""
        self.peer_preprocess()
        self.peer_main(name)
        function("fa4_postprocess")(self.peer[2], self.dq, self.scale, None, None, None, None)

    def run(self, name: str) -> None:
        if name.startswith("fa4"):
            self.peers(name)
        else:
            function(name.partition(":")[0])(*self.ours(name))

    def errors(self, places: list[tuple[int, int]]) -> Iterator[tuple[str, float, float]]:
        """Relative Frobenius errors of dq, dk and dv, and those of an ideal 16-bit pipeline, the worst of `places`."""
        worst = dict.fromkeys(("dq", "dk", "dv"), (0.0, 0.0))
        for batch, kv_head in places:
            heads = slice(kv_head * self.group, (kv_head + 1) * self.group)
            got = {"dq": self.dq[batch, :, heads], "dk": self.dk[batch, :, kv_head], "dv": self.dv[batch, :, kv_head]}
            exact, ideal = self._gradients(batch, kv_head)
            for name in worst:
                norm = exact[name].norm()
                error, best = ((x.double() - exact[name]).norm() / norm for x in (got[name], ideal[name]))
                worst[name] = max(worst[name], (math.inf if error.isnan() else error.item(), best.item()))
        yield from ((name, *pair) for name, pair in worst.items())

    def sink_error(self) -> float:
        """Relative error of dsink against float64 from the same out and LSE."""
        assert self.sink is not None and self.dlse is not None and self.dsink is not None
        d = (self.out.double() * self.dout.double()).sum(-1).transpose(1, 2) - self.dlse
        exact = -(torch.exp(self.sink.double()[:, None] - self.lse.double()) * d).sum((0, 2))
        return ((self.dsink.double() - exact).norm() / exact.norm()).item()

    def _gradients(self, batch: int, kv_head: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Exact gradients, and those with P, dS and the results rounded once; of one group of heads."""
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("dq", "dk", "dv", "dq16", "dk16", "dv16")}
        k, v = self.k[batch, :, kv_head].double(), self.v[batch, :, kv_head].double()
        for head in range(kv_head * self.group, (kv_head + 1) * self.group):
            q, dout = self.q[batch, :, head].double(), self.dout[batch, :, head].double()
            p, _ = self._probabilities(batch, head)
            dp = dout @ v.T
            d = (p * dp).sum(1, keepdim=True)
            if self.dlse is not None:
                d -= self.dlse[batch, head][:, None]
            ds = p * (dp - d)
            del dp
            for suffix, p_used, ds_used in (
                ("", p, ds),
                ("16", p.to(self.shape.dtype).double(), ds.to(self.shape.dtype).double()),
            ):
                parts[f"dq{suffix}"].append(ds_used @ k * self.scale)
                parts[f"dk{suffix}"].append(ds_used.T @ q * self.scale)
                parts[f"dv{suffix}"].append(p_used.T @ dout)
        whole = {name: torch.stack(x, 1) if name[:2] == "dq" else torch.stack(x).sum(0) for name, x in parts.items()}
        exact = {name: whole[name] for name in ("dq", "dk", "dv")}
        return exact, {name: whole[f"{name}16"].to(self.shape.dtype) for name in exact}


def check() -> None:
    for name, shapes in CHECKS.items():
        for shape in shapes:
            case = Case(shape)
            case.run(name)
            torch.cuda.synchronize()
            errors = case.errors([(0, 0), (shape.batch - 1, shape.kv_heads - 1)])
            report = {x: {"error": error, "ideal": ideal, "ratio": error / ideal} for x, error, ideal in errors}
            more: dict[str, Any] = {"equal": repeats(case, name)} if "deterministic" in name else {}
            if shape.extras:
                more["dsink_error"] = case.sink_error()
            say(kind="check", kernel=name, shape=described(shape), errors=report, **more)
            del case
            torch.cuda.empty_cache()


def repeats(case: Case, name: str) -> str:
    """Whether more runs give the same bits: 1000, or 200 of a large problem."""
    count = 200 if case.shape.flops > 1e12 else 1000
    results = case.dq, case.dk, case.dv
    first = [x.clone() for x in results]
    same = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(count):
        for x in results:
            x.fill_(math.nan)
        case.run(name)
        equal = [(a.view(torch.int16) == b.view(torch.int16)).all() for a, b in zip(first, results)]
        same += torch.stack(equal).all()
    return f"{same.item()} of {count} repeats bitwise"


def launch(pairs: list[str]) -> None:
    """Under ncu, which looks at the main kernels: two launches of each."""
    case, of = None, ""
    for pair in pairs:
        name, shape = pair.split("@")
        if case is None or shape != of:
            case, of = None, shape
            torch.cuda.empty_cache()
            case = Case(BENCH[shape])
        for _ in range(2):
            if name.startswith("fa4"):
                case.peer_main(name)
            else:
                case.run(name)
        torch.cuda.synchronize()


METRICS = {
    "cycles": "gpc__cycles_elapsed.max",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
}


def cycles(pairs: list[str]) -> None:
    names = ",".join(METRICS.values())
    kernels = "regex:undertow_backward|flash_bwd_sm90"
    command = ["ncu", "--clock-control", "none", "--csv", "--metrics", names, "-k", kernels]
    command += [sys.executable, __file__, str(FOLDER), "launch", *pairs]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    values: dict[int, dict[str, float]] = {}
    for line in output.splitlines():
        fields = re.findall(r'"([^"]*)"', line)
        for ours, theirs in METRICS.items():
            if theirs in fields:
                values.setdefault(int(fields[0]), {})[ours] = float(fields[-1].replace(",", ""))
    if len(values) != 2 * len(pairs):
        raise SystemExit(f"ncu measured {len(values)} launches, {2 * len(pairs)} were expected:\n{output[-2000:]}")
    measured = [values[identifier] for identifier in sorted(values)]
    for index, pair in enumerate(pairs):
        name, shape = pair.split("@")
        two = measured[2 * index : 2 * index + 2]
        best = min(two, key=lambda x: x["cycles"])
        of = {field: getattr(BENCH[shape], field) for field in ("batch", "seqlen", "heads", "kv_heads", "causal")}
        say(kind="cycles", kernel=name, shape=shape, **of, all=[x["cycles"] for x in two], **best)


def times(pairs: list[str], rounds: int = 3, seconds: float = 0.25) -> None:
    """Blocks of calls of each in turn, in reverse order every second round; the median of all calls."""
    cases: dict[str, Case] = {}
    found: dict[str, list[float]] = {pair: [] for pair in pairs}
    for number in range(rounds):
        for pair in pairs if number % 2 == 0 else pairs[::-1]:
            name, shape = pair.split("@")
            case = cases.setdefault(shape, Case(BENCH[shape])) if shape not in cases else cases[shape]
            for _ in range(2):
                case.run(name)
            torch.cuda.synchronize()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                marks[0].record()
                case.run(name)
                marks[1].record()
                torch.cuda.synchronize()
                found[pair].append(marks[0].elapsed_time(marks[1]))
    for pair, values in found.items():
        name, shape = pair.split("@")
        median = statistics.median(values)
        rate = BENCH[shape].flops / median / 1e9
        spread = [round(x, 3) for x in (min(values), max(values))]
        say(kind="time", kernel=name, shape=shape, ms=median, tflops=rate, calls=len(values), spread_ms=spread)


def described(shape: Shape) -> dict[str, Any]:
    return {**vars(shape), "dtype": str(shape.dtype).removeprefix("torch.")}


def say(**record: Any) -> None:
    print(json.dumps({**record, "gpu": torch.cuda.get_device_name(), "command": " ".join(sys.argv[2:])}), flush=True)


def main() -> None:
    ctypes.CDLL(os.environ["UNDERTOW_DSL_RUNTIME"], mode=ctypes.RTLD_GLOBAL)
    commands = {"check": check, "launch": launch, "cycles": cycles, "times": times}
    commands[sys.argv[2]](*([sys.argv[3:]] if len(sys.argv) > 3 else []))


if __name__ == "__main__":
    main()
