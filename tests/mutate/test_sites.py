"""Every synchronisation is found, and what stands in its place is a program without it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mutate.kernels import HANDOVER
from undertow.emulator import load_program
from undertow.mutate.sites import KINDS, mutated, sites

FRAME = """\
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 y)
{{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    .shared .align 8 .b8 bar[16];
    ld.param.u64 %rd2, [y];
    {0}
    ret;
}}
"""
SHARED = "shared.b64"
CASES = [  # an instruction, and what stands in its place by kind
    ("mbarrier.try_wait.parity.shared.b64 %p1, [bar], %r1, 1000;", {"wait": "setp.eq.u32 %p1, 0, 0;"}),
    ("@!%p2 mbarrier.test_wait.shared.b64 %p1, [bar], %rd1;", {"wait": "@!%p2 setp.eq.u32 %p1, 0, 0;"}),
    ("mbarrier.arrive.shared.b64 %rd1, [bar+8], 2;", {"arrive": "mov.b64 %rd1, 0;"}),
    ("@%p1 mbarrier.arrive.shared.b64 _, [bar];", {"arrive": ""}),
    ("mbarrier.arrive.release.cta.shared::cta.b64 %rd1, [bar];", {"arrive": "mov.b64 %rd1, 0;"}),
    (
        "@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd1, [bar], %r1;",
        {
            "arrive": "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], %r1; @%p1 mov.b64 %rd1, 0;",
            "expect": "@%p1 mbarrier.arrive.shared.b64 %rd1, [bar];",
        },
    ),
    ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 64;", {"expect": ""}),
    ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];", {"arrive": ""}),
    ("bar.sync 0;", {"barrier": "", "narrowed": "bar.warp.sync -1;"}),
    ("@%p1 barrier.sync.aligned 1, 64;", {"barrier": "", "narrowed": "@%p1 bar.warp.sync -1;"}),
    ("bar.arrive 1, 64;", {"barrier": ""}),
    ("bar.warp.sync -1;", {"warp-sync": ""}),
    ("fence.acq_rel.gpu;", {"fence": ""}),
    ("membar.cta;", {"fence": ""}),
    ("fence.proxy.async.shared::cta;", {"proxy-fence": ""}),
    ("fence.mbarrier_init.release.cluster;", {"init-fence": ""}),
    ("tcgen05.wait::ld.sync.aligned;", {"tmem-wait": ""}),
    ("tcgen05.wait::st.sync.aligned;", {"tmem-wait": ""}),
    ("cp.async.bulk.commit_group;", {"copy-group": ""}),
    ("cp.async.bulk.wait_group.read 1;", {"copy-wait": ""}),
    ("cp.async.wait_group 0;", {"copy-wait": ""}),
    ("wgmma.fence.sync.aligned;", {"mma-fence": ""}),
    ("wgmma.commit_group.sync.aligned;", {"mma-group": ""}),
    ("wgmma.wait_group.sync.aligned 1;", {"mma-wait": ""}),
    ("ld.acquire.gpu.global.b32 %r1, [%rd2];", {"order": "ld.relaxed.gpu.global.b32 %r1, [%rd2];"}),
    ("red.release.gpu.global.add.u32 [%rd2], 1;", {"order": "red.relaxed.gpu.global.add.u32 [%rd2], 1;"}),
]
NOT_SYNCHRONISATIONS = [
    "setmaxnreg.inc.sync.aligned.u32 152;",
    "mbarrier.init.shared.b64 [bar], 1;",
    "elect.sync %r1|%p1, -1;",
    "ld.relaxed.gpu.global.b32 %r1, [%rd2];",
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
]


@pytest.mark.parametrize(("instruction", "wanted"), CASES, ids=[case[0].split(" [")[0] for case in CASES])
def test_a_synchronisation_is_replaced_as_a_whole_and_nothing_else(instruction, wanted):
    text = FRAME.format(instruction)
    found = sites(load_program(text))
    assert {site.kind: site.edit.text for site in found} == wanted
    for site in found:
        mutant = mutated(text, [site.edit])
        assert mutant == FRAME.format(site.edit.text)
        load_program(mutant)


@pytest.mark.parametrize("instruction", NOT_SYNCHRONISATIONS)
def test_what_orders_nothing_stays(instruction):
    assert not sites(load_program(FRAME.format(instruction)))


def test_every_kind_has_a_case():
    assert {kind for _, wanted in CASES for kind in wanted} == set(KINDS)


def test_lines_behind_a_synchronisation_of_several_lines_do_not_move():
    text = FRAME.format("cp.async.bulk.wait_group // all but one\n        1;\n    bar.sync 0; bar.sync 1;")
    first, second, third = (site for site in sites(load_program(text)) if site.kind != "narrowed")
    assert first.line == 11 and second.line == third.line == 13
    after = sites(load_program(mutated(text, [first.edit, third.edit])))
    assert {(site.form, site.line) for site in after} == {("bar.sync", 13)}


@pytest.fixture(scope="session")
def assembler() -> Path:
    triton = pytest.importorskip("triton")
    found = sorted(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")) or [shutil.which("ptxas")]
    if found[-1] is None:
        pytest.skip("no ptxas on this machine")
    return Path(found[-1])


def test_mutants_are_programs_that_the_assembler_takes(assembler, tmp_path):
    for number, site in enumerate(sites(load_program(HANDOVER))):
        path = tmp_path / f"{number}.ptx"
        path.write_text(mutated(HANDOVER, [site.edit]))
        command = [str(assembler), "-arch=sm_100a", str(path), "-o", str(tmp_path / "out.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{site}: {done.stderr}"
