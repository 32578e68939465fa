"""Run one backward pass whose main kernel has named spans, for a tracer of in-kernel events.

    run-iket --output-dir FOLDER profile --postprocess json --enabled-cluster 200,0,0 -- \
        python tools/record_events.py --seqlen 4096

needs a GPU that our kernels run on, and `run-iket` of nvidia-cutlass-dsl. Without the tracer it tells what the spans
cost: the times of the pass with and without them. `undertow.calibrate.recorded` reads the trace.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace

import torch

from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.tensors import BackwardTensors
from undertow.runtime import device, objects
from undertow.runtime.architectures import ARCHITECTURES, Architecture

HEAD_DIM = 64
CALLS = 20


def problem(batch: int, seqlen: int, heads: int) -> BackwardTensors:
    """Random inputs in bf16, with the exact output and LSE of them."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(batch, seqlen, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = torch.empty_like(q), torch.empty(batch, heads, seqlen, device="cuda")
    for b in range(batch):
        for h in range(heads):
            scores = q[b, :, h].float() @ k[b, :, h].float().T * HEAD_DIM**-0.5
            lse[b, h] = torch.logsumexp(scores, 1)
            out[b, :, h] = (torch.softmax(scores, 1) @ v[b, :, h].float()).bfloat16()
    return BackwardTensors(q, k, v, out, dout, lse, *(torch.empty_like(q) for _ in range(3)))


def planned(arch: Architecture, tensors: BackwardTensors, schedule: str | None, events: bool) -> device.LaunchPlan:
    """The launch of a call, with spans or without."""
    settings, call = Settings(), arch.call
    variant = replace(call.variant_of(schedule, tensors, settings), events=events)
    sms = device.properties(torch.cuda.current_device()).multiprocessors
    numbers = call.numbers_of(variant, tensors, settings, sms)
    return device.LaunchPlan(
        call, variant, objects.load(arch, variant), call.workspace_floats(variant, tensors), numbers
    )


def milliseconds(plan: device.LaunchPlan, tensors: BackwardTensors) -> float:
    """Median of some calls."""
    found = []
    for _ in range(CALLS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        device.launch(plan, tensors)
        marks[1].record()
        torch.cuda.synchronize()
        found.append(marks[0].elapsed_time(marks[1]))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--schedule", help="the fastest if nobody says")
    parser.add_argument("--times", action="store_true", help="what the spans cost, instead of one call to be traced")
    asked = parser.parse_args()
    capability = device.properties(torch.cuda.current_device()).capability
    arch = next(row for row in ARCHITECTURES.values() if row.capability == capability)
    tensors = problem(asked.batch, asked.seqlen, asked.heads)
    plans = {events: planned(arch, tensors, asked.schedule, events) for events in (True, False)}
    if asked.times:
        with_spans, without = milliseconds(plans[True], tensors), milliseconds(plans[False], tensors)
        print(json.dumps({"with_spans_ms": with_spans, "without_ms": without, "kernel": plans[True].variant.name}))
    else:
        device.launch(plans[True], tensors)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
