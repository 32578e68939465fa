"""Hold the emulator against a GPU: the same kernels on the same inputs, gradient by gradient.

    python tools/cross_check.py               prints one JSON record a case
    python tools/cross_check.py --seeds 3     on three batches a case

Needs a GPU that has kernels here. Both sides run the deterministic mode, so that sums have one order, and every
difference is one of arithmetic: how the tensor cores add up, and what ex2.approx gives.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from undertow import emulated
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.sm100.tensors import BackwardTensors, Sequences
from undertow.reference import Gradients, Scoring, blocks, probabilities, row_stats
from undertow.reference import Sequences as ReferenceSequences
from undertow.runtime import device
from undertow.runtime.architectures import ARCHITECTURES
from undertow.tolerance import yardstick


def _packed() -> Scoring:
    offsets = torch.tensor([0, 100, 101, 400], dtype=torch.int32)
    return Scoring(causal=True, sequences=ReferenceSequences(offsets, offsets))


FP32_SUM = 64 * 2.0**-24  # what a sum of 64 products loses at most, of what they come to
CASES = {
    "one-tile": (Shape(1, 128, 128, 1), Scoring(), torch.bfloat16),
    "dense": (Shape(1, 300, 200, 2), Scoring(), torch.bfloat16),
    "causal": (Shape(1, 512, 512, 2), Scoring(causal=True), torch.bfloat16),
    "causal-gqa": (Shape(2, 300, 333, 4, 2), Scoring(causal=True), torch.bfloat16),
    "window": (Shape(1, 500, 450, 2), Scoring(window=(100, 20)), torch.bfloat16),
    "causal-packed": (Shape(1, 400, 400, 2), _packed(), torch.bfloat16),
    "dense-f16": (Shape(1, 300, 200, 2), Scoring(), torch.float16),
    "causal-softcap": (Shape(1, 300, 333, 2), Scoring(causal=True, softcap=1.5), torch.bfloat16),
    "wide-softcap-f16": (Shape(1, 300, 200, 2), Scoring(softcap=1e3), torch.float16),
}


def tensors_on(given: BackwardTensors, where: str) -> BackwardTensors:
    """The same tensors on a device."""

    def there(value: Any) -> Any:
        if isinstance(value, Sequences):
            return Sequences(**{name: there(x) for name, x in vars(value).items()})
        return value.to(where) if isinstance(value, Tensor) else value

    return replace(given, **{field.name: there(getattr(given, field.name)) for field in fields(given) if field.init})


def on_gpu(batch: Batch, arch: str) -> tuple[Tensor, ...]:
    """dq, dk, dv by the kernels on the GPU, in deterministic mode."""
    tensors = tensors_on(emulated.tensors_of(batch), "cuda")
    device.backward(arch, tensors, emulated.settings_of(batch.scoring, deterministic=True))
    return tuple(x.cpu() for x in (tensors.dq, tensors.dk, tensors.dv))


def largest_terms(batch: Batch) -> Gradients:
    """Of every element of dq, dk and dv the largest of the products that it is the sum of, as float64.

    Where dP and D nearly cancel, dS is what fp32 leaves of them, and what it may lose counts as large as its place.
    """
    q, k, v, dout, scoring = batch.q, batch.k, batch.v, batch.dout.double(), batch.scoring
    scale, d = scoring.scale(q.shape[-1]), row_stats(batch.out, batch.dout, batch.lse).d
    lost = FP32_SUM / torch.finfo(q.dtype).eps
    largest = Gradients(*(torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)))
    for block in blocks(q, k, v, scoring):
        p = probabilities(block.scores, batch.lse[block.row_index].double())
        dp, of_row = dout[block.where] @ block.v.T, d[block.row_index][:, None]
        ds = scale * block.sloped(p * ((dp - of_row).abs() + lost * (dp.abs() + of_row.abs())))
        largest.dq[block.where] = _largest(ds, block.k)
        for sums, weights, rows in ((largest.dk, ds.T, block.q), (largest.dv, p.T, dout[block.where])):
            sums[block.kv] = torch.maximum(sums[block.kv], _largest(weights, rows))
    return largest


def _largest(weights: Tensor, rows: Tensor) -> Tensor:
    """As weights @ rows, with the largest product in the place of their sum."""
    return torch.stack([(row[:, None] * rows).abs().amax(0) for row in weights])


def difference(ours: Tensor, theirs: Tensor, terms: Tensor) -> dict[str, float]:
    """How far two gradients are apart.

    equal: share of elements with the same bits. relative: Frobenius. roundings: the largest difference, in units of
    a last place of the element and one of its largest term, which is what it takes to round the sum another way, and a
    P or dS.
    """
    exact, apart = ours.double(), ours.double() - theirs.double()
    places = torch.finfo(ours.dtype).eps * (2.0 ** torch.floor(torch.log2(exact.abs())) + terms)
    return {
        "equal": float((ours == theirs).double().mean()),
        "relative": float(apart.norm() / exact.norm()),
        "roundings": float(torch.where(apart == 0, 0.0, apart.abs() / places).max()),  # NaN stays NaN
    }


def records(arch: str, seeds: int) -> Iterator[dict[str, Any]]:
    """One record a case and seed."""
    for name, (shape, scoring, dtype) in CASES.items():
        for seed in range(seeds):
            batch = random_batch(shape, seed, scoring, dtype)
            there = on_gpu(batch, arch)
            here = emulated.backward(batch, deterministic=True, arch=arch).gradients
            measure, terms = yardstick(batch, scoring), largest_terms(batch)
            errors = {"gpu": measure.errors(emulated.Gradients(*there)), "emulator": measure.errors(here)}
            yield {
                "case": name,
                "seed": seed,
                "arch": arch,
                "gpu": torch.cuda.get_device_name(),
                **{which: dict(zip(("dq", "dk", "dv"), found)) for which, found in errors.items()},
                "ideal": dict(zip(("dq", "dk", "dv"), measure.ideal)),
                "apart": {n: difference(*of) for n, *of in zip(("dq", "dk", "dv"), here, there, terms)},
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="batches a case (default: %(default)s)")
    arguments = parser.parse_args()
    capability = torch.cuda.get_device_capability()
    arch = next(row.name for row in ARCHITECTURES.values() if row.capability == capability)
    for record in records(arch, arguments.seeds):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
