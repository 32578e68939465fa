"""A compiled call without the main kernel, for any GPU that the two row kernels can be compiled for.

Postprocess goes first, on whatever the accumulator holds, so that both leave something to look at.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr

from undertow.kernels.sm100 import entry, postprocess, preprocess
from undertow.kernels.sm100.call import Variant
from undertow.kernels.sm100.work import Scalars


def build(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    _, arguments = entry.build(variant)
    return row_kernels, arguments


@cute.jit
def row_kernels(
    variant: Constexpr,
    workspace: cute.Tensor,
    reads: entry.Reads,
    writes: entry.Writes,
    scalars: Scalars,
    stream: Any,
):
    packed = variant.rows.packed
    mO, mdO, mdQ = (entry.batched(x, packed) for x in (reads.mO, reads.mdO, writes.mdQ))
    batch, seqlen_q, heads, _ = mO.shape
    buffers = entry.cut(variant.rows, workspace, (batch, heads, entry.query_tiles(seqlen_q, reads.packings)))
    packing = entry.query_side(reads.packings)
    sums, results = postprocess.Sums(buffers[2], buffers[4]), postprocess.Results(mdQ, writes.mdSink)
    postprocess.postprocess_on(sums, results, packing, scalars.softmax_scale, stream)
    lse, dlse = entry.batched(reads.mLSE, packed), entry.batched(reads.mdLSE, packed)
    inputs = preprocess.RowInputs(mO, mdO, lse, dlse, reads.mSink)
    preprocess.preprocess_on(inputs, preprocess.RowOutputs(*buffers), packing, stream)
