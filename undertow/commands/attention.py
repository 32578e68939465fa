"""The options that say which attention is meant, and the random batch they ask for: shared by the commands."""

from __future__ import annotations

import argparse

import torch

from undertow.inputs import DTYPES, Batch, InputError, Shape, random_batch
from undertow.reference import Scoring, Sequences

NO_BOUND = "none"
SINKS_FROM, SINKS_TO = -2.0, 4.0  # from a sink that takes little of a row to one that takes most


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--dtype", choices=DTYPES, help="of a random batch (default: bf16)")
    parser.add_argument("--causal", action="store_true", help="rows see no key behind the diagonal; last row, last key")
    parser.add_argument(
        "--window",
        nargs=2,
        type=_bound,
        default=(None, None),
        metavar=("LEFT", "RIGHT"),
        help=f"keys a row sees on both sides of the diagonal, inclusive; '{NO_BOUND}' for no bound",
    )
    parser.add_argument("--softmax-scale", type=float, metavar="S", help="factor on q.k (default: 1/8)")
    parser.add_argument("--softcap", type=float, metavar="C", help="scores are kept below it by tanh")
    parser.add_argument("--sinks", action="store_true", help="of a random batch: a learnable score for every head")
    parser.add_argument("--dlse", action="store_true", help="of a random batch: a gradient flows into LSE as well")
    for side, default in (("q", "no packing"), ("k", "as for q")):
        parser.add_argument(
            f"--cu-seqlens-{side}",
            type=_offsets,
            metavar="0,N,...",
            help=f"packed sequences: the row at which each begins, and where the last one ends (default: {default})",
        )
    parser.add_argument("--deterministic", action="store_true", help="add to dQ in a fixed order")


def _bound(word: str) -> int | None:
    return None if word == NO_BOUND else int(word)


def _offsets(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def scoring_of(arguments: argparse.Namespace) -> Scoring:
    """Scale, mask and cap, as they also apply to a batch from a file."""
    return Scoring(arguments.softmax_scale, arguments.causal, tuple(arguments.window), arguments.softcap)


def only_random(arguments: argparse.Namespace) -> list[str]:
    """The options given that make sense for a random batch only."""
    names = ("dtype", "sinks", "dlse", "cu_seqlens_q", "cu_seqlens_k")
    return [name for name in names if getattr(arguments, name) not in (None, False)]


def random_batch_of(arguments: argparse.Namespace, default: Shape) -> Batch:
    """The random batch that the command line asks for.

    Raises: InputError, ProblemError for what is no batch.
    """
    given = {name: getattr(arguments, name) for name in Shape._fields if getattr(arguments, name) is not None}
    scoring, shape, seed = scoring_of(arguments), default._replace(**given), arguments.seed or 0
    extra: dict[str, object] = {}
    if arguments.cu_seqlens_q is None and arguments.cu_seqlens_k is not None:
        raise InputError("--cu-seqlens-k: needs --cu-seqlens-q, too")
    if arguments.cu_seqlens_q is not None:
        shape, extra["sequences"] = _packed(arguments, shape, given)
    if arguments.sinks:
        extra["sink"] = torch.linspace(SINKS_FROM, SINKS_TO, shape.heads)
    scoring = Scoring(**{**vars(scoring), **extra})
    batch = random_batch(shape, seed, scoring, DTYPES[arguments.dtype or "bf16"])
    if arguments.dlse:
        dlse = torch.randn(batch.lse.shape, generator=torch.Generator().manual_seed(seed + 1))
        batch = Batch(**{**vars(batch), "dlse": dlse})
    return batch


def _packed(arguments: argparse.Namespace, shape: Shape, given: dict[str, int]) -> tuple[Shape, Sequences]:
    """The sequences, and a shape with as many rows as they have, or as many as are asked for."""
    offsets = {"q": arguments.cu_seqlens_q, "k": arguments.cu_seqlens_k or arguments.cu_seqlens_q}
    for side, values in offsets.items():
        if len(values) < 2 or values[0] != 0 or sorted(values) != values:
            raise InputError(
                f"--cu-seqlens-{side}={','.join(map(str, values))}: must ascend from 0, two numbers or more"
            )
    if len(offsets["q"]) != len(offsets["k"]):
        raise InputError(
            f"--cu-seqlens-k has {len(offsets['k'])} numbers, --cu-seqlens-q has {len(offsets['q'])}: must be as many"
        )
    rows = {f"seqlen_{side}": given.get(f"seqlen_{side}", values[-1]) for side, values in offsets.items()}
    for side, values in offsets.items():
        if rows[f"seqlen_{side}"] < values[-1]:
            raise InputError(
                f"--seqlen-{side}={rows[f'seqlen_{side}']}: must be at least {values[-1]}, the last offset"
            )
    tensors = (torch.tensor(values, dtype=torch.int32) for values in offsets.values())
    return shape._replace(batch=len(offsets["q"]) - 1, **rows), Sequences(*tensors)
