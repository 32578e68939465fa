"""Instructions that the DSL's public layer does not offer in the form the roles need, one function each.

Plain Python that is called while a kernel is traced.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def store_matrices(address: Int32, words: list[Int32]) -> None:
    """stmatrix x4: four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l // 8."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def load_words(address: Int32) -> list[Int32]:
    """Four 32-bit words from shared memory."""
    return list(
        cute.arch.inline_ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address],
        )
    )


def opaque(word: int) -> Int32:
    """A constant that is in its register from here on. The compiler moves other constants, also behind a fence."""
    return cute.arch.inline_ptx(f"mov.b32 {{$w0}}, {word:#x};", write_only_types=[Int32])
