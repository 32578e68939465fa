"""Bank conflicts, counted and in closed form (T49)."""

from __future__ import annotations

import numpy as np
import pytest

from undertow.emulator.descriptors import swizzle_address
from undertow.emulator.observers.bank_passes import BankPasses, passes

from .kernels import kernel, run

LANES = np.arange(32)


@pytest.mark.parametrize(
    ("stride_words", "expected"), [(0, 1), (1, 1), (2, 2), (3, 1), (8, 8), (32, 32), (33, 1)], ids=str
)
def test_word_accesses_conflict_by_the_stride_that_they_share_with_the_banks(stride_words, expected):
    assert passes(4 * stride_words * LANES, LANES, 4) == (expected, 1)


def test_vectors_side_by_side_need_no_more_than_their_bytes():
    assert passes(8 * LANES, LANES, 8) == (2, 2)
    assert passes(16 * LANES, LANES, 16) == (4, 4)


def test_a_column_of_a_tile_conflicts_unless_the_tile_is_swizzled():
    """8 rows of 128 bytes, 16 bytes of each: all in the same 4 banks, or spread over all 32."""
    rows = np.arange(8)
    assert passes(128 * rows, rows, 16) == (8, 1)
    assert passes(swizzle_address(128 * rows, 128), rows, 16) == (1, 1)


@pytest.mark.parametrize(("stride_bytes", "expected"), [(4, 1), (128, 32)])
def test_the_observer_counts_what_a_kernel_executes(stride_bytes, expected):
    text = kernel(
        f"""
        mov.u32 %r1, tile; mad.lo.u32 %r1, %t, {stride_bytes}, %r1;
        st.shared.u32 [%r1], %t; bar.sync 0; ld.shared.u32 %r2, [%r1];
        mul.wide.u32 %d1, %t, 4; add.u64 %d1, %p0, %d1; st.global.u32 [%d1], %r2;
        """,
        1,
        ".shared .align 128 .b8 tile[8192];",
    )
    seen, out = BankPasses(), np.zeros(64, np.uint32)
    run(text, out, block=(64,), observers=[seen])
    assert out.tolist() == list(range(64))
    counts = list(seen.instructions.values())
    assert len(counts) == 2  # the store and the load; global memory has no banks
    assert all((c.executions, c.passes, c.fewest) == (2, 2 * expected, 2) for c in counts)
    assert all(c.extra == 2 * expected - 2 for c in counts)
