"""What ptxas says about every variant: nothing spills, and no wgmma is serialized.

ptxas serializes all wgmma of a kernel when one accumulator finds no registers (C7512, C7510, C7514), or waits where the
program does not (C7517); a kernel then is right, and slower by a third or more.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import pytest

from undertow.kernels.compile import CompiledKernel, compile_kernel, parse_ptxas_report
from undertow.kernels.sm90.plan import plan
from undertow.plan.attention import Attention
from undertow.plan.schema import DType

VARIANTS = {
    "dense": Attention(),
    "causal": Attention(right=True),
    "window": Attention(left=True, right=True),
    "left": Attention(left=True),
    "causal-packed": Attention(right=True, packed=True),
    "window-packed": Attention(left=True, right=True, packed=True),
    "dense-deterministic": Attention(deterministic=True),
    "causal-deterministic": Attention(right=True, deterministic=True),
    "dense-split": Attention(split=True),
    "causal-split": Attention(right=True, split=True),
    "window-packed-deterministic-split": Attention(left=True, right=True, packed=True, deterministic=True, split=True),
}
FAST = ("dense", "causal")


@functools.cache
def compiled(name: str, dtype: DType) -> CompiledKernel:
    planned = plan(dtype, VARIANTS[name])

    def build():
        from undertow.kernels.sm90 import kernel

        return kernel.build(planned)

    return compile_kernel("backward-sm90", planned, build, target="sm_90a")


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_nothing_spills_and_nothing_is_serialized(name, dtype):
    resources = compiled(name, dtype).resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert resources.warnings == ()
    assert resources.registers == 168  # 384 threads share 64 K; setmaxnreg moves from there


def test_the_report_is_heard():
    """A warning of ptxas, as it words it, is not lost."""
    report = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to\n"
        "ptxas info    : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 16 barriers\n"
    )
    assert parse_ptxas_report(report).warnings == ("C7512",)


def test_main_loop_waits_for_nothing_but_its_turn():
    """No LSE or D is loaded: what warps read of shared memory is what an item is, and dV and dK on their way out."""
    lines = compiled("dense", DType.BF16).ptx.splitlines()
    named = [match for line in lines if (match := re.match(r'\s*\.file\s+(\d+)\s+"([^"]*)"', line))]
    files: dict[str, str] = {match[1]: match[2] for match in named}
    loads, place = Counter[str](), ""
    for line in lines:
        if match := re.match(r"\s*\.loc\s+(\d+)", line):
            place = Path(files[match[1]]).name
        loads[place] += "ld.shared" in line
    assert any("wgmma.mma_async.sync.aligned.m64n128k16" in line for line in lines)
    assert {name for name, count in loads.items() if count} == {"instructions.py", "work.py"}
    assert loads["instructions.py"] == 16  # 4 vectors of dV and of dK, of the last item and of those before
