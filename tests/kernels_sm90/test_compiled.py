"""What the compilers make of all three SM90 kernels: no spills, no warnings, and one PTX wherever it goes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from tests.runtime.test_objects import kernels_of
from undertow.kernels.backward import compile_backward
from undertow.kernels.compile import OBJECT_PTX, CompiledKernel, parse_ptxas_report
from undertow.kernels.sm90 import call
from undertow.plan.schema import DType
from undertow.runtime import objects
from undertow.runtime.architectures import architecture

SM90 = architecture("sm90")
VARIANTS = {
    "dense": DType.BF16,
    "causal": DType.BF16,
    "causal-dlse-sink": DType.F16,
    "window-packed-deterministic": DType.BF16,
    "dense-split": DType.BF16,
}


def compiled(name: str) -> tuple[CompiledKernel, ...]:
    variant = call.variant_named(name, VARIANTS[name])
    made = compile_backward("sm90", variant.plan, variant.rows)
    return tuple(filter(None, (made.preprocess, made.main, made.combine, made.postprocess)))


def ptxas_says(ptx: str, folder: Path) -> str:
    """The verbose report of the ptxas in Triton's wheel, for text that the DSL has not made."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin, "the development extra brings triton"
    ptxas = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [str(ptxas), "-v", "-arch", "sm_90a", str(source), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_spilled_and_ptxas_warns_of_nothing(name):
    for kernel in compiled(name):
        found = kernel.resources
        assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0), kernel.name
        assert found.warnings == (), kernel.name
        assert re.search(r"^\.target\s+sm_90a$", kernel.ptx, re.MULTILINE)


def test_a_missing_wait_is_answered_by_serialised_mmas(tmp_path):
    _, main, _ = compiled("dense")
    waits = [match.span() for match in re.finditer(r"wgmma\.wait_group\.sync\.aligned\s+\d;", main.ptx)]
    start, end = waits[3]
    said = ptxas_says(main.ptx[:start] + main.ptx[end:], tmp_path)
    assert parse_ptxas_report(said).warnings, said
    assert parse_ptxas_report(ptxas_says(main.ptx, tmp_path)).warnings == ()


@pytest.mark.parametrize("name", VARIANTS)
def test_an_object_holds_the_very_kernels_that_are_emulated(name):
    expected = {}
    for kernel in compiled(name):
        expected |= kernels_of(kernel.ptx)
    variant = call.variant_named(name, VARIANTS[name])
    found = kernels_of(objects.precompile(SM90, variant).files[OBJECT_PTX].decode())
    assert list(found) == list(expected) and len(found) == 3 + ("split" in name)
    for entry, lines in expected.items():
        assert found[entry] == lines and len(lines) > 100, entry
