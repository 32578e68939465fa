"""What the CTAs of a launch do: they stay, and take one key/value tile after another until none is left.

An item is a key/value tile of a head, as `undertow.plan.grid` numbers them. The schedule warp claims items in order and
works out what they are, ahead of everybody else, into a ring in shared memory. Between two items nothing drains: the
first scores of the next are computed in the burst that adds up the last of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from undertow.kernels.sm90.plan import ITEM_STAGES
from undertow.kernels.sm100.bind import Channel, SharedMemory, channels
from undertow.kernels.sm100.sequences import Rows, dense_rows
from undertow.kernels.sm100.work import Scalars, Work

DENSE_WORDS = ("kv_tile", "kv_head", "batch", "group", "first_tile", "end_tile", "first_unmasked", "end_unmasked")
PACKED_WORDS = (*DENSE_WORDS, "workspace_tile", "q_first", "q_used", "k_first", "k_kept", "k_used")
EXISTS = len(PACKED_WORDS)  # the word that says whether there is an item
KEY_WORDS = ("key_head", "key_tile")  # behind that, where groups are split


@dataclass(frozen=True)
class LaunchScalars(Scalars):
    """The run-time numbers of a launch. ctas: of the launch. most_items: how many of them a CTA may claim."""

    ctas: Int32
    most_items: Int32


@dataclass(frozen=True)
class SplitScalars(LaunchScalars):
    """Those of a launch whose groups are split. parts: of a group; a key/value head of the tensors is as many here."""

    parts: Int32


def parts_of(scalars: LaunchScalars) -> Int32:
    """Parts of a group, in kernels that split groups."""
    assert isinstance(scalars, SplitScalars)
    return scalars.parts


def any_scalars(split: bool) -> LaunchScalars:
    """Numbers to compile with: all of them are parameters of the kernel."""
    numbers = [*[Int32(1)] * 4, *[Float32(1.0)] * 4, *[Int32(1)] * (3 if split else 2)]
    return SplitScalars(*numbers) if split else LaunchScalars(*numbers)


@dataclass(frozen=True)
class Share(Work):
    """What an item is. Where groups are split, kv_head counts their parts as heads, in tensors of query heads too.

    key_head: of the tensors of keys. key_tile: in the workspace of partial sums, None where there is none.
    """

    key_head: Int32
    key_tile: Int32 | None


@dataclass(frozen=True)
class Items:
    """The items of a CTA, counted from 0, as one role sees them.

    extents: rows of the tensors of query rows, and of those of keys.
    """

    plan: cutlass.Constexpr
    channel: Channel
    smem: SharedMemory
    scalars: LaunchScalars
    extents: tuple[Int32, Int32]

    def wait(self, item: Int32) -> Int32:
        """Wait until it is known whether there is such an item, and say so: 1 or 0."""
        self.channel.wait("full", item)
        return words_of(self.smem, item)[EXISTS]

    def work(self, item: Int32) -> Share:
        """What an item is."""
        packed, words = self.plan.attention.packed, words_of(self.smem, item)
        of = {name: words[index] for index, name in enumerate(PACKED_WORDS if packed else DENSE_WORDS)}
        queries, keys = self.extents
        q, k = dense_rows(queries), dense_rows(keys)
        if packed:
            q = Rows(of["q_first"], of["q_used"], of["q_used"], queries)  # how many are kept no role asks
            k = Rows(of["k_first"], of["k_kept"], of["k_used"], keys)
        bounds = (self.scalars.left, self.scalars.right)
        place, tiles = ([of[name] for name in part] for part in (DENSE_WORDS[:4], DENSE_WORDS[4:]))
        whole = [self.plan, *place, q, k, of.get("workspace_tile", Int32(0)), *bounds, *tiles]
        key_head, key_tile = of["kv_head"], None
        if self.plan.attention.split:
            key_head, key_tile = (words[EXISTS + 1 + index] for index in range(len(KEY_WORDS)))
        whole += [key_head, key_tile]
        return Share(*whole)

    def release(self, item: Int32) -> None:
        """The warp does not read what the item is again."""
        cute.arch.sync_warp()
        self.channel.arrive("empty", item)


def items_of(smem: SharedMemory, role: str, scalars: LaunchScalars, extents: tuple[Int32, Int32]) -> Items:
    """The items of the CTA for a role."""
    return Items(smem.plan, channels(smem, role)[f"schedule_{role}_item"], smem, scalars, extents)


def described(work: Work) -> list[Any]:
    """The words that say what an item is."""
    words = [getattr(work, name) for name in DENSE_WORDS]
    if work.plan.attention.packed:
        words += [work.workspace_tile, work.q.first, work.q.used, work.k.first, work.k.kept, work.k.used]
    return words


def words_of(smem: SharedMemory, item: Int32) -> cute.Tensor:
    """Where the words of an item are."""
    pointer = cute.recast_ptr(smem.pointer("sItems", item & (ITEM_STAGES - 1)), dtype=Int32)
    return cute.make_tensor(pointer, cute.make_layout(smem.plan.smem_region("sItems").columns))
