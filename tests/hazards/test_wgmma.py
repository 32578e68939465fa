"""Asynchronous MMAs of a warpgroup: registers in flight, `wgmma.fence`, operands in shared memory that are reused."""

from __future__ import annotations

import pytest

from tests.hazards.kernels import (
    Outcome,
    arrive,
    assert_twins,
    bulk_load,
    elected,
    expect,
    init,
    loop,
    own_word,
    role,
    wait,
    watch,
)

FENCE = "    wgmma.fence.sync.aligned;\n"
COMMIT = "    wgmma.commit_group.sync.aligned;\n"
PROXY_FENCE = "    fence.proxy.async.shared::cta;\n"
BARRIER = "    bar.sync 0;\n"
READ, WRITE, READ_A, WRITE_A = (
    "    add.u32 %r10, %r20, 1;\n", "    add.u32 %r20, %r10, 1;\n", "    add.u32 %r10, %r36, 1;\n",
    "    add.u32 %r36, %r10, 1;\n",
)  # fmt: skip
WIDTH_8, WIDTH_16 = "{%r20, %r21, %r22, %r23}", "{%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}"
A = "{%r36, %r37, %r38, %r39}"
IN_FLIGHT, UNFENCED = "wgmma-register-in-flight", "wgmma-fence-missing"


def done(groups: int = 0) -> str:
    """Wait until at most this many groups are open."""
    return f"    wgmma.wait_group.sync.aligned {groups};\n"


def operand(number: int, offset: int) -> str:
    """A descriptor in %rd<number>: rows of 16 bytes at an offset of `data`, 128 bytes per eight rows."""
    fields = 128 >> 4 << 16 | 256 >> 4 << 32
    return f"""
    mov.u32 %r50, data;
    add.u32 %r50, %r50, {offset};
    shr.u32 %r50, %r50, 4;
    cvt.u64.u32 %rd{number}, %r50;
    or.b64 %rd{number}, %rd{number}, {fields};
"""


def mma(d: str = WIDTH_8, a: str = A, b: str = "%rd1") -> str:
    """D += A B for a B of 8 or 16 columns."""
    shape = f"m64n{2 * (d.count(',') + 1)}k16"
    transposes = "0, 0" if a.startswith("%") else "0"
    return (
        f"    setp.eq.u32 %p1, 0, 0;\n    wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16 {d}, {a}, {b}, %p1, 1, 1,"
        f" {transposes};\n"
    )


FILL = "".join(f"    mov.b32 %r{i}, 0;\n" for i in (*range(20, 28), *range(36, 40)))
"""Registers of D and A."""
STORE = own_word() + "    st.shared.u32 [%r60], 0;\n"
READY = operand(1, 0) + FILL + STORE + PROXY_FENCE + BARRIER
"""Operands in `data` and in registers, and a descriptor of B."""


def outcome_of(body: str) -> Outcome:
    """What observers say of a kernel of one warpgroup."""
    return watch(body, warps=4, target="sm_90a")


def silent(body: str) -> bool:
    """Whether they find no error."""
    return outcome_of(body).rules == set()


def assert_four(good: str, bad: str, rule: str, warps: int = 4) -> Outcome:
    """`assert_twins` for warpgroups."""
    return assert_twins(good, bad, rule, warps=warps, target="sm_90a")


def test_the_first_mma_needs_a_fence():
    """The registers are those that the kernel begins with: nothing else is wrong."""
    prepare = operand(1, 0) + STORE + PROXY_FENCE + BARRIER
    found = assert_four(prepare + FENCE + mma() + COMMIT + done(), prepare + mma() + COMMIT + done(), UNFENCED)
    assert "before its first" in found.text


@pytest.mark.parametrize("access", [READ, WRITE, WRITE_A])
def test_registers_are_handed_over_by_a_fence(access):
    rest = mma() + COMMIT + done()
    found = assert_four(READY + access + FENCE + rest, READY + FENCE + access + rest, UNFENCED)
    assert "after an ordinary access" in found.text


@pytest.mark.parametrize(
    "move", ["    mov.b32 %r20, %r21;\n", "    mov.b32 %r20, 0;\n", "    mov.b32 %r36, 0;\n", READ_A]
)
def test_moves_behind_the_fence_are_advice(move):
    """Compilers put copies and constants there. Reading a register of A disturbs nothing that only reads it, too."""
    rest = mma() + COMMIT + done()
    outcome = outcome_of(READY + FENCE + move + rest)
    assert outcome.rules == set() and outcome.advice == {UNFENCED}
    assert_four(READY + move + FENCE + rest, READY + FENCE + move + WRITE_A + rest, UNFENCED)


def test_a_fence_of_three_warps_is_none():
    """Every warp hands over its own registers."""
    bad = READY + FENCE + WRITE + "    setp.ne.u32 %p2, %warp, 3;\n    @%p2 wgmma.fence.sync.aligned;\n"
    found = assert_four(READY + WRITE + FENCE + mma() + COMMIT + done(), bad + mma() + COMMIT + done(), UNFENCED)
    assert "warp 3" in found.text and "warp 2" not in found.text


def test_mmas_of_one_shape_follow_each_other_without_a_fence():
    """The ISA orders accesses to one accumulator by MMAs of one shape only."""
    good = READY + FENCE + mma() + mma() + FENCE + mma(WIDTH_16) + COMMIT + done()
    bad = READY + FENCE + mma() + mma() + mma(WIDTH_16) + COMMIT + done()
    found = assert_four(good, bad, UNFENCED)
    assert "in another way" in found.text


@pytest.mark.parametrize("access", [READ, WRITE, WRITE_A])
def test_registers_are_the_mmas_until_the_wait(access):
    before = READY + FENCE + mma() + COMMIT
    found = assert_four(before + done() + access, before + access + done(), IN_FLIGHT)
    assert "wgmma.wait_group" in found.checks[0].errors[0].missing


def test_reading_a_register_of_a_is_advice():
    """It is still undefined by the ISA's letter, but no result can depend on it."""
    outcome = outcome_of(READY + FENCE + mma() + COMMIT + READ_A + done())
    assert outcome.rules == set() and outcome.advice == {IN_FLIGHT}


def test_a_group_that_is_not_committed_is_not_waited_for():
    before = READY + FENCE + mma()
    assert_four(before + COMMIT + done() + READ, before + done() + READ, IN_FLIGHT)


def test_a_wait_that_leaves_the_latest_group_open():
    other = "{%r28, %r29, %r30, %r31}"
    before = READY + "".join(f"    mov.b32 %r{i}, 0;\n" for i in range(28, 32)) + FENCE + mma() + COMMIT
    before += mma(other) + COMMIT + done(1)
    assert_four(before + READ + done(), before + "    mov.b32 %r10, %r28;\n" + done(), IN_FLIGHT)


def test_a_way_that_is_not_taken_is_no_finding():
    """Text order alone would suspect the read: on the way without the wait there is no MMA."""
    body = READY + "    setp.eq.u32 %p3, %r20, 0;\n    setp.ne.u32 %p4, %r20, 0;\n" + FENCE
    body += "    @%p4 bra $NO_MMA;\n" + mma() + COMMIT + "$NO_MMA:\n    @!%p3 bra $NO_WAIT;\n" + done() + "$NO_WAIT:\n"
    assert silent(body + READ)


def test_a_loop_that_reads_one_round_late():
    """The accumulator of a round is read after the wait of the next one."""
    good = loop(3, FENCE + mma() + COMMIT + done() + READ)
    bad = loop(3, FENCE + mma() + COMMIT + READ + done())
    assert_four(READY + good, READY + bad, IN_FLIGHT)


def test_an_operand_that_is_stored_needs_a_proxy_fence():
    rest = FENCE + mma() + COMMIT + done()
    prepare = operand(1, 0) + FILL + STORE
    assert_four(prepare + PROXY_FENCE + BARRIER + rest, prepare + BARRIER + rest, "missing-proxy-fence")


def test_an_operand_that_other_warps_store_needs_a_barrier():
    rest = FENCE + mma() + COMMIT + done()
    prepare = operand(1, 0) + FILL + STORE + PROXY_FENCE
    outcome = outcome_of(prepare + rest)
    assert "race" in outcome.always and outcome.rules <= {"race", "uninitialised-read"}, outcome.text


def test_an_operand_that_one_warp_alone_has_waited_for():
    """All four warps read B: each must know that it is there."""
    copy = init(1) + operand(1, 0) + FILL + role(0, elected(expect(0, 256) + bulk_load(0, 256, 0)))
    rest = FENCE + mma() + COMMIT + done()
    outcome = outcome_of(copy + role(0, wait(0, 0)) + rest)
    assert silent(copy + wait(0, 0) + rest)
    assert "race" in outcome.always and outcome.rules <= {"race", "uninitialised-read"}, outcome.text


def test_an_operand_that_nobody_has_written():
    prepare = operand(1, 0) + operand(2, 8192) + FILL + STORE + PROXY_FENCE + BARRIER + FENCE
    assert_four(prepare + mma() + COMMIT + done(), prepare + mma(b="%rd2") + COMMIT + done(), "uninitialised-read")


@pytest.mark.parametrize("a", [A, "%rd2"])
def test_an_operand_may_be_overwritten_after_the_wait(a):
    """The stores come behind a barrier, but without the wait the MMA may still read."""
    prepare = operand(1, 0) + operand(2, 512) + FILL + own_word()
    prepare += "".join(f"    st.shared.u32 [%r60+{512 * i}], 0;\n" for i in range(5)) + PROXY_FENCE + BARRIER + FENCE
    again = BARRIER + own_word() + "    st.shared.u32 [%r60], 1;\n"
    body = prepare + mma(a=a) + COMMIT
    found = assert_four(body + done() + again, body + again, "race")
    assert "asynchronous MMA" in found.text and "wgmma.wait_group" in found.checks[0].errors[0].missing


def reload(release: str) -> str:
    """Warp 4 copies into B, warps 0 to 3 multiply and release it, warp 4 copies again."""
    fill, refill = (elected(expect(0, 256) + bulk_load(0, 256, 0)) for _ in range(2))
    multiply = wait(0, 0) + FENCE + mma() + COMMIT + release
    skip = f"    setp.ge.u32 %p9, %warp, 4;\n    @%p9 bra $COPIES;\n{multiply}$COPIES:\n"
    return init(1, 1) + operand(1, 0) + FILL + role(4, fill) + skip + role(4, wait(1, 0) + refill) + wait(0, 1)


def test_one_warp_may_release_for_its_warpgroup():
    """An MMA is the warpgroup's: whoever has waited for it knows that all four warps' reads are over."""
    release = role(2, elected(arrive(1)))
    found = assert_four(reload(done() + release), reload(release + done()), "race", warps=8)
    assert "bulk copy" in found.text and "asynchronous MMA" in found.text


def test_two_warpgroups_read_one_operand():
    """Each has to say that it is done."""
    body = operand(1, 0) + FILL + STORE + PROXY_FENCE + BARRIER + FENCE + mma() + COMMIT
    again = BARRIER + own_word() + "    st.shared.u32 [%r60], 1;\n"
    half = "    setp.ge.u32 %p9, %warp, 4;\n    @%p9 bra $SECOND;\n" + done() + "$SECOND:\n"
    assert_four(body + done() + again, body + half + again, "race", warps=8)


def test_words_beside_an_operand_may_be_written():
    """Reads are those of the operand and nothing around it."""
    body = READY + FENCE + mma() + COMMIT + "    st.shared.u32 [%r60+512], %lane;\n" + done()
    assert silent(body)
