"""What an instruction is to the engine: a kind, the unit that it takes, and how often it issues.

PTX is not what issues: the assembler drops moves, packs and constant loads, folds an added constant into an address,
and needs two instructions for 64-bit integers. These rules are here; `lower` applies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from undertow import ptx
from undertow.emulator.semantics.table import Decoded

from .errors import TimingError


class Kind(IntEnum):
    """What the engine does with an instruction. The order is that of the engine's enumeration."""

    ARITHMETIC = 0
    BRANCH = 1
    LOAD = 2
    STORE = 3
    GLOBAL = 4
    ARRIVE = 5
    WAIT = 6
    BARRIER_ARRIVE = 7
    BARRIER_SYNC = 8
    WGMMA = 9
    WGMMA_WAIT = 10
    MMA = 11
    COMMIT = 12
    TMEM_LOAD = 13
    TMEM_STORE = 14
    TMEM_WAIT_LOAD = 15
    TMEM_WAIT_STORE = 16
    COPY = 17
    COPY_WAIT = 18
    FENCE = 19
    DEVICE_FENCE = 20
    REALLOCATE = 21
    WARP_SYNC = 22
    ALIAS = 23
    SKIP = 24
    ASK = 25


class Unit(IntEnum):
    """Which pipe an arithmetic instruction takes, and with that its latency."""

    NONE = 0
    FMA = 1
    PACKED_FMA = 2
    ALU = 3
    MULTIPLY = 4
    MUFU = 5
    CONVERT = 6
    SPECIAL = 7
    COLLECTIVE = 8
    UNIFORM = 9
    PREDICATE = 10
    SHUFFLE = 11


@dataclass(frozen=True)
class Form:
    """An instruction as the engine takes it. issues: how many instructions the assembler makes of it."""

    kind: Kind
    unit: Unit = Unit.NONE
    issues: int = 1


_FLOAT = ("f32", "f16", "bf16", "f16x2", "bf16x2", "tf32")
_ALU_OPCODES = frozenset(
    (
        "and", "or", "xor", "not", "shl", "shr", "shf", "lop3", "prmt", "bfe", "bfi", "bfind", "brev", "clz", "popc",
        "cnot", "selp", "slct", "min", "max", "abs", "neg", "sad", "add", "sub", "addc", "subc", "set", "mapa",
        "isspacep", "copysign", "testp",
    )
)  # fmt: skip
_MUFU = frozenset(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"))
_COLLECTIVE = frozenset(("elect", "vote", "match", "activemask", "redux"))
_FREE = frozenset(("cvta", "getctarank"))
_SKIP = frozenset(
    ("griddepcontrol", "nanosleep", "prefetch", "prefetchu", "pmevent", "applypriority", "discard", "createpolicy")
)
_DIVISION_ISSUES = 20  # what ptxas makes of an integer division: a reciprocal, conversions, corrections (read off SASS)


def form_of(decoded: Decoded) -> Form | None:
    """How the engine takes an instruction; None for what issues nothing at all.

    Raises: TimingError for an instruction that it does not know.
    """
    opcode, mnemonic = decoded.instruction.opcode, decoded.instruction.mnemonic
    for prefix, kind in _PREFIXES:
        if mnemonic.startswith(prefix):
            return None if kind is None else Form(kind)
    if opcode in ("ld", "st", "ldu", "atom", "red"):
        return _memory_form(decoded)
    if opcode in ("mov", "cvt"):
        return _move_form(decoded)
    form = _arithmetic_form(decoded)
    if form is None:
        raise TimingError(f"{mnemonic} (line {decoded.instruction.line}): the timing model does not know it")
    return form


_PREFIXES: tuple[tuple[str, Kind | None], ...] = (
    ("mbarrier.try_wait", Kind.ASK), ("mbarrier.test_wait", Kind.ASK), ("mbarrier.arrive", Kind.ARRIVE),
    ("mbarrier.expect_tx", Kind.ARRIVE), ("mbarrier.", Kind.SKIP), ("bar.warp.sync", Kind.WARP_SYNC),
    ("bar.arrive", Kind.BARRIER_ARRIVE), ("bar.cta.arrive", Kind.BARRIER_ARRIVE),
    ("barrier.arrive", Kind.BARRIER_ARRIVE), ("barrier.cta.arrive", Kind.BARRIER_ARRIVE),
    ("barrier.cluster", Kind.SKIP), ("bar", Kind.BARRIER_SYNC), ("wgmma.mma_async", Kind.WGMMA),
    ("wgmma.wait_group", Kind.WGMMA_WAIT), ("wgmma.", Kind.SKIP), ("tcgen05.mma", Kind.MMA),
    ("tcgen05.commit", Kind.COMMIT), ("tcgen05.ld", Kind.TMEM_LOAD), ("tcgen05.st", Kind.TMEM_STORE),
    ("tcgen05.wait::ld", Kind.TMEM_WAIT_LOAD), ("tcgen05.wait::st", Kind.TMEM_WAIT_STORE), ("tcgen05.fence", None),
    ("tcgen05.", Kind.SKIP), ("cp.async.bulk.commit_group", Kind.SKIP), ("cp.async.commit_group", Kind.SKIP),
    ("cp.async.bulk.wait_group", Kind.COPY_WAIT), ("cp.async.wait", Kind.COPY_WAIT),
    ("cp.async.bulk.prefetch", Kind.SKIP), ("cp.async.mbarrier", Kind.ARRIVE), ("cp.", Kind.COPY),
    ("setmaxnreg", Kind.REALLOCATE), ("bra", Kind.BRANCH), ("brx", Kind.BRANCH), ("ret", Kind.BRANCH),
    ("exit", Kind.BRANCH), ("trap", Kind.BRANCH), ("ldmatrix", Kind.LOAD), ("stmatrix", Kind.STORE),
    ("fence.proxy.async.shared", Kind.FENCE), ("fence.mbarrier_init", Kind.FENCE), ("membar.cta", Kind.FENCE),
    ("fence.proxy.async", Kind.DEVICE_FENCE), ("membar", Kind.DEVICE_FENCE), ("fence.proxy", Kind.FENCE),
)  # fmt: skip


def _memory_form(decoded: Decoded) -> Form | None:
    space = (decoded.mods.get("space") or "").partition("::")[0]
    opcode = decoded.instruction.opcode
    if space == "param":
        return None  # an operand from the constant bank
    if space in ("shared", "local"):
        return Form(Kind.STORE if opcode in ("st", "red") else Kind.LOAD)
    return Form(Kind.GLOBAL)


def _move_form(decoded: Decoded) -> Form | None:
    """Moves are register names; those of special registers and conversions are instructions."""
    if decoded.instruction.opcode == "mov":
        sources = [typed.operand for typed in decoded.sources]
        if any(isinstance(operand, ptx.Special) for operand in sources):
            return Form(Kind.ARITHMETIC, Unit.SPECIAL)
        return Form(Kind.ALIAS)
    types = [word for word in decoded.instruction.mnemonic.split(".") if word in ptx.TYPE_BITS]
    target, source = types[0], types[-1]
    if target in ("bf16x2", "f16x2", "e4m3x2", "e5m2x2", "bf16", "f16") and source == "f32":
        return Form(Kind.ARITHMETIC, Unit.CONVERT)
    if target == "f32" and source in _FLOAT:
        return Form(Kind.ARITHMETIC, Unit.ALU)
    if target[0] in "usb" and source[0] in "usb":
        return Form(Kind.ALIAS) if source[0] == "u" or target[1:] == source[1:] else Form(Kind.ARITHMETIC, Unit.ALU)
    return Form(Kind.ARITHMETIC, Unit.MUFU)


def _arithmetic_form(decoded: Decoded) -> Form | None:
    opcode = decoded.instruction.opcode
    if opcode == "fence":
        scope = decoded.mods.get("scope") or ""
        return Form(Kind.DEVICE_FENCE if scope in ("gpu", "sys") else Kind.FENCE)
    types = [word for word in decoded.instruction.mnemonic.split(".") if word in ptx.TYPE_BITS]
    of = types[-1] if types else "b32"
    wide = 2 if ptx.TYPE_BITS[of] == 64 and of != "f32x2" else 1
    if opcode in _FREE:
        return Form(Kind.ALIAS)
    if opcode in _SKIP:
        return Form(Kind.SKIP)
    if of == "pred":
        return Form(Kind.ALIAS) if opcode == "not" else Form(Kind.ARITHMETIC, Unit.PREDICATE)
    if opcode == "setp":
        return Form(Kind.ARITHMETIC, Unit.PREDICATE, wide)
    if opcode in _MUFU:
        return Form(Kind.ARITHMETIC, Unit.MUFU)
    if opcode in _COLLECTIVE:
        return Form(Kind.ARITHMETIC, Unit.COLLECTIVE)
    if opcode == "shfl":
        return Form(Kind.ARITHMETIC, Unit.SHUFFLE)
    if of == "f32x2":
        return Form(Kind.ARITHMETIC, Unit.PACKED_FMA)
    if of in _FLOAT and opcode in ("neg", "abs"):
        return Form(Kind.ALIAS)  # a modifier of the instruction that reads it
    if of in _FLOAT and opcode in ("add", "sub", "mul", "fma", "mad", "div"):
        return Form(Kind.ARITHMETIC, Unit.FMA)
    if opcode in ("div", "rem"):
        return Form(Kind.ARITHMETIC, Unit.MULTIPLY, _DIVISION_ISSUES)
    if opcode in ("mul", "mad", "mul24", "mad24", "dp4a", "fma"):
        return Form(Kind.ARITHMETIC, Unit.MULTIPLY, 1 if ".wide" in decoded.instruction.mnemonic else 2 * wide - 1)
    if opcode in _ALU_OPCODES:
        return Form(Kind.ARITHMETIC, Unit.ALU, wide)
    return None
