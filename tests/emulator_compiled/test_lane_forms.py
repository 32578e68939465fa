"""Every lane form: the compiled back end computes what the NumPy back end computes, bit for bit.

The two columns of the semantics table were written apart, so this judges both. Where a float result is a NaN, its
payload is left open: processors and compilers choose which operand's payload survives.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator_compiled import lane_kernels
from undertow import emulator as emu
from undertow.emulator import semantics
from undertow.ptx import TYPE_BITS

ROWS = [row for rows in semantics.ROWS.values() for row in rows if row.make is None]
BATCH = 200


def results(text: str, num_bytes: int, backend: str) -> np.ndarray:
    out = np.zeros(num_bytes // 8, np.uint64)
    launch = emu.Launch(
        grid=(1, 1, 1), block=(lane_kernels.THREADS, 1, 1),
        params=(emu.Pointer(out), emu.Pointer(lane_kernels.source_array())),
    )  # fmt: skip
    emu.launch(text, launch, emu.Options(backend=backend))
    return out.reshape(-1, lane_kernels.THREADS)


def as_elements(words: np.ndarray, type_name: str) -> np.ndarray:
    """The values in each thread's word: one, or two for packed types; floats as floats, the rest as bits."""
    element = {"f32x2": "f32", "f16x2": "f16", "bf16x2": "bf16"}.get(type_name, type_name)
    dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16}.get(element)
    bits = 32 if type_name == "pred" else max(TYPE_BITS[element], 16)
    values = np.ascontiguousarray(words).view(f"u{bits // 8}").reshape(len(words), -1)
    values = values[:, : 1 if element == type_name else 2]
    if element == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values).view(dtype) if dtype else values


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.syntax.partition(" ")[0])
def test_back_ends_agree_on_every_lane_form(row):
    forms = list(lane_kernels.variants(row))
    for first in range(0, len(forms), BATCH):
        some = forms[first : first + BATCH]
        text, num_bytes = lane_kernels.kernel(row, some)
        expected, actual = (results(text, num_bytes, backend) for backend in ("numpy", "compiled"))
        place = 0
        for form in some:
            kinds = [*form.results.values(), *(["pred"] if ".cc" in form.mnemonic else [])]
            for kind in kinds:
                a, b = as_elements(expected[place], kind), as_elements(actual[place], kind)
                place += 1
                same = (a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")) | ((a != a) & (b != b))
                if not same.all():
                    lane, half = np.argwhere(~same)[0]
                    inputs = ", ".join(
                        f"{n}={lane_kernels.value_of(t, c, lane, half)}"
                        for c, (n, t) in enumerate(form.sources.items())
                    )
                    pytest.fail(
                        f"{form.mnemonic}{' guarded' if form.guarded else ''} differs in {(~same).sum()} of {same.size}"
                        f" values; lane {lane}: {inputs} gives {a[lane, half]!r} on NumPy, {b[lane, half]!r} compiled"
                    )
