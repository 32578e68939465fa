"""Probes without a GPU: what is measured is in the machine code, and their protocols hold on the emulator."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from undertow import emulator
from undertow.calibrate.benchmark import Launch
from undertow.calibrate.probe import Probe, compile_probe
from undertow.calibrate.units import benchmarks

COUNTS = {  # probe: instruction of the machine, and how many of them its loop has
    "sm_90a": {
        "rate_mufu": ("MUFU.EX2", 128),
        "rate_fma": ("FFMA", 128),
        "rate_convert": ("F2FP", 128),
        "rate_alu": ("PRMT", 128),
        "chain_shuffle": ("SHFL", 128),
        "shared_load_uniform": ("LDS.128", 16),
        "shared_store_lanes": ("STS.128", 16),
        "chase_word_lanes": ("LDS", 64),
        "fence_fences": ("FENCE.VIEW.ASYNC", 8),
        "ready_wait": ("SYNCS.PHASECHK", 16),
        "arrive": ("SYNCS.ARRIVE", 32),
        "barrier_8": ("BAR.SYNC", 64),
        "mma_rate_shared_n128": ("HGMMA.64x128x16", 32),
        "mma_latency_registers_n64_x8": ("HGMMA.64x64x16", 8),
        "stream_reduce": ("UBLKRED", 1),
        "beside_load_lanes_shared_n64": ("LDS.128", 16),
        "beside_store_registers_n128": ("STS.128", 32),
        "copies_load_n128_store": ("STS.128", 32),
        "copies_load_n64_none": ("HGMMA.64x64x16", 32),
        "code_2048": ("FFMA", 2048),
    },
    "sm_100a": {
        "rate_packed_fma": ("FFMA2", 128),
        "mma_rate_shared_n128": ("UTCHMMA", 32),
        "tmem_load_x32": ("LDTM", 1),
    },
}
FAST = {"sm_90a": {"rate_mufu", "shared_load_uniform", "mma_latency_registers_n64_x8"}, "sm_100a": {"tmem_load_x32"}}
CASES = [
    pytest.param(target, name, marks=() if name in FAST[target] else pytest.mark.slow)
    for target, of in COUNTS.items()
    for name in of
]

BODIES = {  # one probe of every body, and of every kind of copy
    "sm_90a": (
        "hand_off_eight_to_one",
        "hand_off_without_hint",
        "hand_off_varied",
        "release",
        "mma_rate_registers_n128",
        "mma_issue_shared_n64",
        "beside_store_shared_n128",
        "copies_load_n128_store",
        "copies_reduce_n0_none",
        "copy_load_512",
        "copy_reduce_512",
        "stream_load_depth4",
    ),
    "sm_100a": (
        "mma_rate_tensor_n128",
        "mma_latency_shared_n64_x4",
        "mma_issue_shared_n64",
        "beside_store_shared_n128",
        "copies_load_n128_store",
        "copies_reduce_n0_none",
        "tmem_loads",
        "tmem_loads_beside",
        "stream_store",
        "global_chase",
    ),
}
TRIPS = 2


def launches(target: str) -> dict[str, Launch]:
    return {launch.probe.name: launch for of in benchmarks(target).values() for launch in of.launches}


def machine_code(cubin: bytes, folder: Path) -> str:
    triton = pytest.importorskip("triton")
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = folder / "probe.cubin"
    path.write_bytes(cubin)
    return subprocess.run([program, "-sass", path], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(("target", "name"), CASES)
def test_the_machine_executes_what_is_measured(target, name, tmp_path):
    kernel = compile_probe(launches(target)[name].probe, target)
    instruction, count = COUNTS[target][name]
    code = machine_code(kernel.cubin, tmp_path)
    assert len(re.findall(rf"\b{re.escape(instruction)}\b", code)) in (count, count + 1)  # one may start an operand
    assert len(re.findall(r"CS2R \w+, SR_CLOCKLO", code)) >= 2  # read in order; S2UR is not
    assert kernel.resources.spill_load_bytes == 0
    assert kernel.resources.warnings == ()


@pytest.mark.parametrize("target", BODIES)
@pytest.mark.slow
def test_protocols_hold_on_the_emulator(target):
    known = launches(target)
    for name in BODIES[target]:
        results = emulated(known[name], target)
        assert results.any(), f"{name} wrote nothing"


def test_an_mbarrier_lets_a_warp_go_after_the_last_arrival():
    launch = launches("sm_90a")["hand_off_eight_to_one"]
    times = emulated(launch, "sm_90a")[: TRIPS * 9].reshape(TRIPS, 9)
    assert (times[:, 8] > times[:, :8].max(1)).all()
    assert (np.diff(times.min(1)) > 0).all()


def emulated(launch: Launch, target: str) -> np.ndarray:
    """What CTA 0 of two writes in two iterations."""
    probe: Probe = launch.probe
    kernel = compile_probe(probe, target)
    out, data = np.zeros(2 * probe.slots, np.int64), np.zeros(2 * launch.floats, np.float32)
    description = emulator.Launch(
        kernel=kernel.entry,
        grid=(2, 1, 1),
        block=(probe.threads, 1, 1),
        dynamic_smem=probe.smem,
        params=(emulator.Tensor(out, out.shape), emulator.Tensor(data, data.shape), TRIPS),
    )
    assert not emulator.launch(kernel.ptx, description).findings
    return out[: probe.slots]
