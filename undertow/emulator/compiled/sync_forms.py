"""Encode warp collectives, mbarriers, named barriers, fences and forms that change no values."""

from __future__ import annotations

from ..semantics import Decoded
from .encode import Encoder, Fields
from .form_parts import Form, put_address, simple, with_modifier


def _mbarrier(name: str, rest: str = "", target: str = "", **aux: int) -> Form:
    """A form on an mbarrier: address first, then operand rows."""
    base = simple(name, rest, target, **aux)

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = base(encoder, decoded)
        put_address(encoder, fields, decoded.operands["a"])
        return fields

    return build


def _arrive(drop: int, expects: int) -> Form:
    base = _mbarrier("mbarrier_arrive", "count", "d", drop=drop, expects=expects)

    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = base(encoder, decoded)
        fields.aux[2] = int("count" in decoded.operands)
        return fields

    return build


def _barrier_sync(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = simple("barrier_sync", "barrier threads")(encoder, decoded)
    fields.aux = {0: int("threads" in decoded.operands), 1: -1}
    return fields


def _barrier_reduction(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = simple("barrier_sync", "barrier threads c", "d")(encoder, decoded)
    words = ["popc", "and", "or"]
    fields.aux = {0: int("threads" in decoded.operands), 1: words.index(decoded.mods.get("op") or "popc")}
    return fields


def _redux(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = with_modifier("redux", "a members", "d", "op", "add min max and or xor")(encoder, decoded)
    fields.aux[1] = int(decoded.mods["type"][0] == "s")
    return fields


def _redux_float(encoder: Encoder, decoded: Decoded) -> Fields:
    fields = with_modifier("redux_float", "a members", "d", "op", "min max")(encoder, decoded)
    fields.aux.update({1: int(decoded.mods["abs"]), 2: int(decoded.mods["NaN"])})
    return fields


def _match(is_all: int) -> Form:
    def build(encoder: Encoder, decoded: Decoded) -> Fields:
        fields = simple("match", "a members", "d e")(encoder, decoded)
        fields.aux = {0: is_all, 1: int(decoded.mods["type"] == "b64")}
        return fields

    return build


def _policy(encoder: Encoder, decoded: Decoded) -> Fields:
    return Fields(op=encoder.machine_op("zero"), d=[encoder.target(decoded.operands["d"])])


def nothing(encoder: Encoder, decoded: Decoded) -> Fields:
    return Fields(op=encoder.machine_op("nothing"))


FORMS: dict[str, Form] = {
    "shfl.sync.b32": with_modifier("shfl", "a b c members", "d e", "mode", "up down bfly idx"),
    "elect.sync": simple("elect", "members", "d e"),
    "vote.sync.pred": with_modifier("vote", "a members", "d", "mode", "all any uni"),
    "vote.sync.ballot.b32": simple("vote_ballot", "a members", "d"),
    "match.any.sync": _match(0), "match.all.sync": _match(1), "redux.sync": _redux, "redux.sync.f32": _redux_float,
    "activemask.b32": simple("activemask", "", "d"), "bar.warp.sync": simple("bar_warp_sync", "members"),
    "mbarrier.init.b64": _mbarrier("mbarrier_init", "count"), "mbarrier.inval.b64": _mbarrier("mbarrier_inval"),
    "mbarrier.expect_tx.b64": _mbarrier("mbarrier_tx", "count", completes=0),
    "mbarrier.complete_tx.b64": _mbarrier("mbarrier_tx", "count", completes=1),
    "mbarrier.arrive.b64": _arrive(0, 0), "mbarrier.arrive.expect_tx.b64": _arrive(0, 1),
    "mbarrier.arrive.noComplete.b64": _arrive(0, 0), "mbarrier.arrive_drop.b64": _arrive(1, 0),
    "mbarrier.arrive_drop.expect_tx.b64": _arrive(1, 1), "mbarrier.arrive_drop.noComplete.b64": _arrive(1, 0),
    "mbarrier.test_wait.b64": _mbarrier("mbarrier_wait", "key", "d", by_parity=0, may_block=0),
    "mbarrier.test_wait.parity.b64": _mbarrier("mbarrier_wait", "key", "d", by_parity=1, may_block=0),
    "mbarrier.try_wait.b64": _mbarrier("mbarrier_wait", "key", "d", by_parity=0, may_block=1),
    "mbarrier.try_wait.parity.b64": _mbarrier("mbarrier_wait", "key", "d", by_parity=1, may_block=1),
    "mbarrier.pending_count.b64": simple("pending_count", "state", "d"),
    "bar.sync": _barrier_sync, "barrier.sync": _barrier_sync,
    "bar.arrive": simple("barrier_arrive", "barrier threads"),
    "barrier.arrive": simple("barrier_arrive", "barrier threads"),
    "bar.red.popc.u32": _barrier_reduction, "bar.red.pred": _barrier_reduction,
    "barrier.red.popc.u32": _barrier_reduction, "barrier.red.pred": _barrier_reduction,
    "barrier.cluster.arrive": simple("cluster_arrive"), "barrier.cluster.wait": simple("cluster_wait"),
    "setmaxnreg.sync.aligned.u32": simple("setmaxnreg", "count"),
    "createpolicy.fractional.b64": _policy,
}  # fmt: skip
"""How to encode a machine row, by the fixed words of its syntax."""

for _words in (
    "membar", "fence", "fence.mbarrier_init.release.cluster", "fence.proxy", "fence.cluster",
    "fence.proxy.async::generic.cluster", "fence.proxy.tensormap::generic.release",
    "fence.proxy.tensormap::generic.acquire", "prefetch", "prefetch.tensormap", "prefetchu.L1",
    "applypriority.L2::evict_normal", "discard.L2", "nanosleep.u32", "pmevent.mask", "pmevent",
    "griddepcontrol.launch_dependents", "griddepcontrol.wait", "cp.async.bulk.prefetch.L2.global",
    "cp.async.bulk.prefetch.tensor.L2.global", "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
):  # fmt: skip
    FORMS[_words] = nothing
