"""Tiny kernels in PTX for the hazard tests: each is a few lines between a prologue and `ret`.

Registers in every kernel: %thread, %lane, %warp, %one; %r0.., %f0.., %rd0.., %p0..; %x, %y and %z hold the global
addresses of three arrays. Shared memory: `bars` (8 mbarriers of 8 bytes), `word` (one 32-bit word), `data`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from undertow import emulator as emu
from undertow.check import Check, check

SETTINGS = (("fixed", "eager"), ("fixed", "late"), (1, ("seeded", 1)), (2, ("seeded", 2)))
LANE_WORD = "    mov.u32 %r60, data;\n    mad.lo.u32 %r60, %lane, 4, %r60;\n"
"""The address of a word of `data` by lane in %r60."""
_numbers = itertools.count()


def kernel(body: str, target: str = "sm_100a") -> str:
    """PTX of a kernel with these instructions."""
    return f"""
.version 8.8
.target {target}
.address_size 64
.shared .align 8 .b64 bars[8];
.shared .align 4 .b32 word;
.shared .align 1024 .b8 data[16384];
.visible .entry tiny(.param .u64 x, .param .u64 y, .param .u64 z)
{{
    .reg .pred %p<16>;  .reg .b32 %r<64>;  .reg .f32 %f<40>;  .reg .b64 %rd<16>;
    .reg .b32 %thread, %lane, %warp, %one;  .reg .b64 %x, %y, %z;
    mov.u32 %thread, %tid.x;
    and.b32 %lane, %thread, 31;
    shr.u32 %warp, %thread, 5;
    mov.b32 %one, 1;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.u64 %z, [z];
{body}
    ret;
}}
"""


def role(warp: int, body: str) -> str:
    """Only this warp executes the body; the warps meet behind it."""
    label = f"$SKIP{next(_numbers)}"
    return f"""
    setp.ne.u32 %p15, %warp, {warp};
    @%p15 bra {label};
{body}
{label}:
"""


def one_lane(body: str) -> str:
    """Only lane 0 of each warp that comes here executes the body."""
    label = f"$LANE{next(_numbers)}"
    return f"""
    setp.ne.u32 %p14, %lane, 0;
    @%p14 bra {label};
{body}
{label}:
"""


def elected(body: str) -> str:
    """As `one_lane`, by elect.sync, and the warp is together again behind it."""
    label = f"$LANE{next(_numbers)}"
    return f"""
    elect.sync %r63|%p13, -1;
    not.pred %p13, %p13;
    @%p13 bra {label};
{body}
{label}:
"""


def init(*counts: int, fence: str = "fence.mbarrier_init.release.cluster;") -> str:
    """Warp 0 initialises mbarriers 0, 1, ... with these counts; then everybody is at a barrier."""
    lines = "\n".join(f"    mbarrier.init.shared.b64 [bars+{8 * i}], {count};" for i, count in enumerate(counts))
    return role(0, one_lane(f"{lines}\n    {fence}")) + "    bar.sync 0;\n"


def wait(barrier: int, parity: int | str, form: str = "") -> str:
    """Wait for the phase of this parity (a number or a register)."""
    label = f"$WAIT{next(_numbers)}"
    return f"""
{label}:
    mbarrier.try_wait.parity{form}.shared.b64 %p12, [bars+{8 * barrier}], {parity};
    @!%p12 bra {label};
"""


def arrive(barrier: int, form: str = "") -> str:
    """Arrive once per lane that executes it."""
    return f"    mbarrier.arrive{form}.shared.b64 %rd15, [bars+{8 * barrier}];\n"


def signal(barrier: int) -> str:
    """An elected lane arrives for the warp, whose lanes are joined first."""
    return "    bar.warp.sync -1;\n" + elected(arrive(barrier))


def loop(rounds: int, body: str) -> str:
    """Repeat; %r62 counts from 0."""
    label = f"$LOOP{next(_numbers)}"
    return f"""
    mov.b32 %r62, 0;
{label}:
{body}
    add.u32 %r62, %r62, 1;
    setp.lt.u32 %p11, %r62, {rounds};
    @%p11 bra {label};
"""


def bulk_load(offset: int, num_bytes: int, barrier: int) -> str:
    """Copy from x into `data` behind an mbarrier."""
    return (
        f"    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
        f" [data+{offset}], [%x], {num_bytes}, [bars+{8 * barrier}];\n"
    )


def expect(barrier: int, num_bytes: int) -> str:
    """Arrive and announce bytes."""
    return f"    mbarrier.arrive.expect_tx.shared.b64 %rd15, [bars+{8 * barrier}], {num_bytes};\n"


def own_word(register: str = "%r60") -> str:
    """The address of this thread's word of `data` in a register."""
    return f"""
    mov.u32 {register}, data;
    mad.lo.u32 {register}, %thread, 4, {register};
"""


@dataclass
class Outcome:
    """Rules found over all settings, by severity, and the checks themselves."""

    checks: list[Check]

    @property
    def rules(self) -> set[str]:
        """Of errors."""
        return {finding.rule for c in self.checks for finding in c.errors}

    @property
    def advice(self) -> set[str]:
        """Of advice."""
        return {f.rule for c in self.checks for f in c.findings if f.severity == "advice"}

    @property
    def always(self) -> set[str]:
        """Rules of errors that every setting finds."""
        return set.intersection(*({finding.rule for finding in c.errors} for c in self.checks))

    @property
    def text(self) -> str:
        """All findings."""
        return "\n".join(str(finding) for c in self.checks for finding in c.findings)


def watch(body: str, warps: int = 2, grid: int = 1, strict: bool = False, settings=SETTINGS, **how) -> Outcome:
    """Run a kernel of that body under all observers in every setting. how: `target` of the PTX, `cluster` size."""
    program = emu.load_program(kernel(body, how.get("target", "sm_100a")))
    cluster = (how.get("cluster", 1), 1, 1)
    checks = []
    for schedule, completion in settings:
        arrays = [np.arange(8192, dtype=np.float32), np.zeros(8192, np.float32), np.zeros(64, np.uint32)]
        params = [emu.Pointer(a) for a in arrays]
        launch = emu.Launch(grid=(grid, 1, 1), block=(32 * warps, 1, 1), params=params, cluster=cluster)
        checks.append(check(program, launch, emu.Options(schedule=schedule, completion=completion), strict=strict))
    return Outcome(checks)


def assert_twins(good: str, bad: str, rule: str, **how) -> Outcome:
    """The good body is silent in every setting, the bad one gives this rule in every setting and no other error."""
    silent = watch(good, **how)
    assert silent.rules == set(), silent.text
    found = watch(bad, **how)
    assert found.rules == {rule}, found.text
    assert found.always == {rule}, found.text
    return found
