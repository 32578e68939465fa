"""Hold the timing model against a GPU: predicted beside measured cycles of main kernels on an H200.

    python tools/timeline_validate.py CYCLES... [--draws N] [--output FILE] [--document FILE] [--predicted FILE]

CYCLES are files of records that `hopper_measure.py FOLDER cycles` has printed. Predicted are our SM90 kernel and
flash-attn-4's, from the constants of the h200 chip alone; no constant knows of these measurements. Prints a table,
writes one JSON record for every measurement, and the table into a document, between `<!-- validation -->` and
`<!-- end -->`. A later record of a launch counts, an earlier one does not. Needs flash-attn-4 and no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.flash_attn_4 import launches_sm90
from tests.flash_attn_4.launches import Buffers, row_scalars, tensor_map
from tests.flash_attn_4.launches import Problem as PeerProblem
from undertow.cases import Kernel
from undertow.commands.recorded import Problem, recorded
from undertow.inputs import Shape
from undertow.plan import description
from undertow.plan.description import Launch, Pointer, Tensor, TensorMap
from undertow.plan.grid import Grid
from undertow.plan.tiles import Band, Tiling
from undertow.pool import cores
from undertow.timing.chip import read_chip
from undertow.timing.grid_time import Work, launch_time, work_of
from undertow.timing.kernel_time import Kernels, Recorded, SampleShape, first_cta, sample_shapes
from undertow.timing.predict import Drawer, draw
from undertow.timing.results import Prediction
from undertow.timing.trace import record

HEADS, TOKENS, GROUP, SHORTEST = 32, 65536, 4, 2048
JUDGED = "launches of 32:32 and 32:8 heads with 2048 rows or more"
BLOCK = re.compile(r"(<!-- validation -->\n).*?(<!-- end -->)", re.DOTALL)
MASKS = {"dense": Band(), "causal": Band(None, 0)}
SHAPES = {
    "dense": ("dense", 1), "causal": ("causal", 1), "gqa": ("dense", GROUP), "gqacausal": ("causal", GROUP),
    "mqa": ("dense", HEADS), "mqacausal": ("causal", HEADS),
}  # fmt: skip
SHAPE = re.compile(r"(\D+)(?:(\d+)(k?))?")
UNKNOWN = ("deterministic", "softcap", "split")  # forms of a kernel that are not predicted here
MAIN = re.compile("bwd_sm90")
CHILD = """
import os, sys
folder, kv_heads, mask = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ.update(CUTE_DSL_ARCH="sm_90a", CUTE_DSL_DUMP_DIR=folder, CUTE_DSL_KEEP="ptx", FLASH_ATTENTION_ARCH="sm_90",
                  FLASH_ATTENTION_NUM_SMS="132")
import torch
from flash_attn.cute.interface import _flash_attn_bwd
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    q, out, dout = (torch.empty(1, 256, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    k, v = (torch.empty(1, 256, kv_heads, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    _flash_attn_bwd(q, k, v, out, dout, torch.empty(1, 4, 256, device="cuda"), causal=mask == "causal")
"""


@dataclass(frozen=True)
class Measured:
    """A record of `hopper_measure.py`: whose kernel, on which of its shapes, in how many cycles."""

    kernel: str
    shape: str
    cycles: float

    @property
    def ours(self) -> bool:
        return not self.kernel.startswith("fa4")

    @property
    def library(self) -> str:
        return "undertow" if self.ours else "flash-attn-4"

    @property
    def form(self) -> tuple[str, int]:
        """Mask, and query heads to a head of keys."""
        return SHAPES[self._parts[0]]

    @property
    def seqlen(self) -> int:
        _, number, thousands = self._parts
        return int(number) * (1024 if thousands else 1) if number else 8192

    @property
    def _parts(self) -> tuple[str, str | None, str | None]:
        found = SHAPE.fullmatch(self.shape)
        assert found is not None, self.shape
        return found[1], found[2], found[3]

    @property
    def is_judged(self) -> bool:
        """Whether the launch is one of those for which errors are promised."""
        return self.seqlen >= SHORTEST and self.form[1] <= GROUP

    @property
    def recorded(self) -> str:
        """The name of the kernel that was recorded. Ours is the same whatever the groups."""
        mask, group = self.form
        return f"{self.library} {mask}{' grouped' if group > 1 and not self.ours else ''}"

    @property
    def work(self) -> Work:
        """Of every CTA, in the order in which they start; flash-attn-4 has CTAs for query heads, one after another."""
        mask, group = self.form
        batch, seqlen = TOKENS // self.seqlen, self.seqlen
        if self.ours:
            return Problem(Shape(batch, seqlen, seqlen, HEADS, HEADS // group), MASKS[mask], arch="sm90").work
        return work_of(Grid(seqlen // 128, HEADS, batch), Tiling(seqlen, seqlen, MASKS[mask]))


def read(paths: Sequence[str]) -> list[Measured]:
    """The measurements of kernels that a replay can say something of: not the deterministic ones."""
    found = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            told = json.loads(line)
            if told["kind"] == "cycles" and not any(form in told["kernel"] for form in UNKNOWN):
                found[told["kernel"], told["shape"]] = Measured(told["kernel"], told["shape"], told["cycles"])
    return list(found.values())


def kernels_of(measured: Sequence[Measured], point: Mapping[str, float]) -> Kernels:
    """Every kernel that was measured, compiled, executed and recorded."""
    made: dict[str, tuple[Recorded, ...]] = {}
    for one in measured:
        mask, group = one.form
        if one.recorded in made:
            continue
        print(f"recording {one.recorded}", file=sys.stderr)
        if one.ours:
            problem = Problem(Shape(1, 1024, 1024, 1), MASKS[mask], arch="sm90")
            made[one.recorded] = recorded("sm90", ["pingpong"], problem, point).recorded["pingpong"]
        else:
            made[one.recorded] = _of_peer(one, mask, min(group, GROUP), point)  # larger groups go the same way
    return Kernels(made)


def _of_peer(one: Measured, mask: str, group: int, point: Mapping[str, float]) -> tuple[Recorded, ...]:
    text = peer_ptx(GROUP // group, mask)
    return tuple(
        Recorded(first_cta(shape, False), record(peer(text, one.recorded, shape, group), point))
        for shape in sample_shapes(MASKS[mask])
    )


def peer_ptx(kv_heads: int, mask: str) -> str:
    """PTX of flash-attn-4's main kernel for four query heads."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CHILD, folder, str(kv_heads), mask]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        (path,) = [path for path in Path(folder).glob("*.ptx") if MAIN.search(path.name)]
        return path.read_text()


def peer(text: str, name: str, shape: SampleShape, group: int) -> Kernel:
    """flash-attn-4's main kernel on one key/value head, its first CTA; what it reads has no meaning."""
    given = _tensors(shape, group)
    launched = launches_sm90.main(given, Buffers.for_problem(given)) if group == 1 else _grouped(given, group)
    return Kernel(name, text, _as_numpy(launched))


def _tensors(shape: SampleShape, group: int) -> PeerProblem:
    def of(seqlen: int, heads: int) -> torch.Tensor:
        return torch.zeros(1, seqlen, heads, 64, dtype=torch.bfloat16)

    q, k = (shape.seqlen_q, group), (shape.seqlen_k, 1)
    lse = torch.zeros(1, group, shape.seqlen_q)
    return PeerProblem(of(*q), of(*k), of(*k), of(*q), of(*q), lse, of(*q), of(*k), of(*k))


def _grouped(problem: PeerProblem, group: int) -> Launch:
    """With several query heads to a head of keys, whose dK and dV are summed in global memory."""
    batch, seqlen_q, seqlen_k, heads = problem.sizes
    buffers, grid = Buffers.for_problem(problem), (seqlen_k // 128, heads, batch)
    query = description.Ints(seqlen_q, 64, heads, batch)
    key = description.Ints(seqlen_k, 64, heads // group, batch)
    sums = [torch.zeros(batch, heads // group, seqlen_k * 64) for _ in range(2)]
    scalars = (buffers.lse_log2, buffers.d, buffers.dq_accumulator)
    scale = 64**-0.5
    return Launch(
        grid=grid,
        block=(384, 1, 1),
        dynamic_smem=launches_sm90.MAIN_DYNAMIC_SMEM,
        params=(
            *(query, key, key, query),
            *(row_scalars(x) for x in sums),
            *(tensor_map(x, box=(64, 128), swizzle=128) for x in (problem.q, problem.k, problem.v, problem.dout)),
            *(row_scalars(x) for x in scalars),
            *(description.Opaque(1) for _ in range(4)),
            *(scale * launches_sm90.LOG2_E, scale, *grid),
            *(description.Ints(1, 1, 0), 1, description.Ints(1, 1, 0), group),
        ),
    )


def _as_numpy(launched: Launch) -> Launch:
    def converted(value: Any) -> Any:
        if not isinstance(value, (Tensor, Pointer, TensorMap)):
            return value
        tensor = value.array
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        return replace(value, array=bits.numpy())

    return replace(launched, params=tuple(converted(value) for value in launched.params))


def predictions(measured: Sequence[Measured], draws: int, jobs: int) -> Iterator[tuple[Measured, Prediction]]:
    """Cycles of every launch that was measured."""
    chip = read_chip("h200")
    drawn = draw(Drawer(chip, 0, kernels_of(measured, chip.point())), draws, jobs)
    for one in measured:
        work = one.work

        def cycles(found: Any, one: Measured = one, work: Work = work) -> float:
            return launch_time(work, found.found[one.recorded].cta, drawn.chip.num_sms, found.constants)

        yield one, drawn.predict(cycles)


def earlier(path: str, measured: Sequence[Measured]) -> Iterator[tuple[Measured, Prediction]]:
    """What an earlier run predicted, beside what is measured now."""
    found = {}
    for line in Path(path).read_text().splitlines():
        told = json.loads(line)
        known = told["predicted"]
        number = Prediction(known["point"], known["median"], tuple(known["band"]), (), told["sensitivity"])
        found[told["kernel"], told["shape"]] = number
    yield from ((one, found[one.kernel, one.shape]) for one in measured)


def told(pairs: Sequence[tuple[Measured, Prediction]]) -> Iterator[str]:
    """A table for the documents, and what it comes to."""
    yield "| kernel | mask | heads | seqlen | measured | predicted | 90% band | error | in the band |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | --- |"
    for one, predicted in pairs:
        mask, group = one.form
        low, high = predicted.band
        yield (
            f"| {one.library} | {mask} | 32:{HEADS // group} | {one.seqlen} | {one.cycles / 1e6:.2f} | "
            f"{predicted.median / 1e6:.2f} | {low / 1e6:.2f} to {high / 1e6:.2f} | {error(one, predicted):+.1%} | "
            f"{'yes' if low <= one.cycles <= high else 'no'} |"
        )
    judged = [pair for pair in pairs if pair[0].is_judged]
    sums = [f"{_summed(judged)} in {JUDGED}"] if judged else []
    yield "; ".join([*sums, *([f"{_summed(pairs)} in all"] if len(judged) < len(pairs) else [])]) + "."


def _summed(pairs: Sequence[tuple[Measured, Prediction]]) -> str:
    errors = [abs(error(*pair)) for pair in pairs]
    inside = [predicted.band[0] <= one.cycles <= predicted.band[1] for one, predicted in pairs]
    mean, worst = np.mean(errors), max(errors)
    return f"mean absolute error {mean:.1%}, worst {worst:.1%}, {sum(inside)} of {len(inside)} in the band"


def filled(document: str, table: Sequence[str], summary: str) -> str:
    """The document with this table.

    Raises: ValueError for one that has no place for it.
    """
    text, count = BLOCK.subn(
        lambda found: "\n".join([found[1] + table[0], *table[1:], "", summary, found[2]]), document
    )
    if count != 1:
        raise ValueError(f"{count} places for the table, between <!-- validation --> and <!-- end -->: must be 1")
    return text


def error(one: Measured, predicted: Prediction) -> float:
    """Of the median, relative to what was measured."""
    return predicted.median / one.cycles - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cycles", nargs="+", metavar="CYCLES")
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--output", metavar="FILE")
    parser.add_argument("--document", metavar="FILE", help="replace the table in it")
    parser.add_argument("--predicted", metavar="FILE", help="of an earlier --output, instead of predicting anew")
    arguments = parser.parse_args()
    measured = read(arguments.cycles)
    if arguments.predicted:
        pairs = list(earlier(arguments.predicted, measured))
    else:
        pairs = list(predictions(measured, arguments.draws, arguments.jobs))
    *table, summary = told(pairs)
    print("\n".join([*table, summary]))
    if arguments.document:
        path = Path(arguments.document)
        path.write_text(filled(path.read_text(), table, summary))
    if arguments.output:
        with Path(arguments.output).open("w") as file:
            for one, predicted in pairs:
                tells = {"median": predicted.median, "band": predicted.band, "point": predicted.point}
                strongest = dict(list(predicted.sensitivity.items())[:5])
                about = {"kernel": one.kernel, "shape": one.shape, "gpu": "NVIDIA H200"}
                record_ = {**about, "measured": one.cycles, "predicted": tells, "sensitivity": strongest}
                file.write(json.dumps(record_) + "\n")


if __name__ == "__main__":
    main()
