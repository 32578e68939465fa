"""Calls that differ in one thing from one that is prepared get what they would get on the long way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.launches import Launches, dense, outcome, packed
from tests.kernels.packings import offsets
from undertow.attention import prepared

BF16 = torch.bfloat16


class Another(torch.Tensor):
    """A tensor with a dispatcher of its own, which may do anything."""


def misplaced(x: Tensor) -> Tensor:
    """`x` two bytes further on."""
    return torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape)


def otherwise(x: Tensor) -> dict[str, Any]:
    """`x` with one thing changed."""
    order = (1, 0, *range(2, x.dim()))
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 4, dtype=x.dtype)[..., : x.shape[-1]]
    return {
        "other strides": x.permute(order).contiguous().permute(order),
        "odd strides": wide,
        "last dimension first": x.transpose(0, -1).contiguous().transpose(0, -1),
        "expanded": x.narrow(0, 0, 1).expand(x.shape),
        "an odd address": misplaced(x),
        "16 bytes on": torch.cat([torch.zeros(16 // x.element_size(), dtype=x.dtype), x.flatten()])[
            16 // x.element_size() :
        ].view(x.shape),
        "half": x.half(),
        "double": x.double(),
        "meta": x.to("meta"),
        "shorter": x.narrow(1, 0, 2),
        "more": torch.cat([x, x]),
        "fewer": x.narrow(0, 0, 1),
        "fewer heads": x.narrow(-2, 0, 1),
        "narrow": x.narrow(-1, 0, 8),
        "flat": x.flatten(0, 1),
        "a subclass": x.as_subclass(Another),
        "a parameter": torch.nn.Parameter(x),
        "differentiable": x.clone().requires_grad_(),
        "sparse": x.to_sparse(),
        "a list": [1.0],
        "an array": x.float().numpy(),
        "none": None,
        "empty": x.narrow(1, 0, 0),
    }


ROWS = ("dout", "q", "k", "v", "out", "lse")
KINDS = tuple(otherwise(torch.zeros(2, 40, 4, 64, dtype=BF16)))
OPTIONS: list[dict[str, Any]] = [
    {"softmax_scale": 2.0},
    {"softmax_scale": True},  # equal to 1.0, and refused
    {"softmax_scale": 1},
    {"softmax_scale": None},
    {"softmax_scale": -1.0},
    {"softmax_scale": 1e30},
    {"softmax_scale": float("nan")},
    {"softmax_scale": torch.tensor(1.0)},
    {"causal": False},
    {"causal": 1},
    {"causal": None},
    {"window_size": [None, None]},
    {"window_size": (5, None)},
    {"window_size": (None, 0)},
    {"window_size": (None, False)},
    {"window_size": (-1, -1)},
    {"window_size": (0, 1, 2)},
    {"window_size": {5, 7}},
    {"window_size": 5},
    {"window_size": None},
    {"window_size": ([], [])},
    {"softcap": 0},
    {"softcap": False},
    {"softcap": None},
    {"softcap": 3.0},
    {"softcap": 1e-30},
    {"deterministic": True},
    {"deterministic": 0},
    {"backend": "reference"},
    {"backend": "sm100"},
    {"backend": "cuda"},
    {"backend": []},
    {"strict": True},
    {"dlse": torch.zeros(2, 4, 40)},
    {"dlse": torch.zeros(2, 4, 8)},
    {"learnable_sink": torch.zeros(4)},
    {"learnable_sink": torch.zeros(4, dtype=BF16)},
    {"learnable_sink": torch.zeros(8)[::2]},
    {"learnable_sink": torch.zeros(3)},
    {"seqused_q": offsets(1, 2)},
    {"cu_seqlens_q": offsets(0, 8)},
    {"max_seqlen_q": 1},
]


def compared(base: dict[str, Any], changed: dict[str, Any], launches: Launches) -> None:
    """The same comes of a changed call whether or not one like the base is prepared."""
    prepared.forget()
    wanted = outcome(changed, launches)
    prepared.forget()
    for _ in range(2):
        outcome(base, launches)
    launches.long_way = 0
    outcome(base, launches)
    assert launches.long_way == 0, "the base is prepared"
    for _ in range(2):  # the second time it may be prepared itself
        assert outcome(changed, launches) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_differs_in_one_thing_gets_what_it_got_before(kind, launches):
    launches.compiled = {"split-bf16-causal"}
    for name in ROWS:
        base = dense()
        compared(base, base | {name: otherwise(base[name])[kind]}, launches)


QUERIES = ("dout", "q", "out")
TOGETHER: dict[str, dict[str, Any]] = {  # tensors of another call, views with the strides of the base where they can be
    "fewer rows": {**dict.fromkeys(QUERIES, lambda x: x.narrow(1, 0, 20)), "lse": lambda x: x.narrow(2, 0, 20)},
    "fewer keys": dict.fromkeys("kv", lambda x: x.narrow(1, 0, 10)),
    "one batch element": dict.fromkeys(ROWS, lambda x: x.narrow(0, 0, 1)),
    "one key head": dict.fromkeys("kv", lambda x: x.narrow(2, 0, 1)),
    "two query heads": {**dict.fromkeys(QUERIES, lambda x: x.narrow(2, 0, 2)), "lse": lambda x: x.narrow(1, 0, 2)},
    "half": dict.fromkeys((*QUERIES, *"kv"), Tensor.half),
    "float": dict.fromkeys((*QUERIES, *"kv"), Tensor.float),
    "half a head": dict.fromkeys((*QUERIES, *"kv"), lambda x: x.narrow(3, 0, 32)),
    "meta": dict.fromkeys(ROWS, lambda x: x.to("meta")),
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_tensors_that_differ_together_get_what_they_got_before(kind, launches):
    launches.compiled = {"split-bf16-causal"}
    base = dense()
    compared(base, base | {name: change(base[name]) for name, change in TOGETHER[kind].items()}, launches)


def test_type_and_device_tell_calls_apart_before_the_compiled_call_does():
    """A plan is of one device: another must not be found for it."""
    rows = tuple(dense()[name] for name in ("q", "k", "v", "out", "dout", "lse"))
    others = (rows, tuple(x.half() for x in rows), tuple(x.to("meta") for x in rows))
    assert len({prepared._key(None, given, None) for given in others}) == 3  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("change", OPTIONS, ids=lambda change: " ".join(change))
def test_an_option_that_differs_gets_what_it_got_before(change, launches):
    compared(dense(), dense(**change), launches)


@pytest.mark.parametrize(
    "kind", ["other strides", "an odd address", "half", "double", "meta", "more", "none", "a list"]
)
def test_a_tensor_that_few_have_and_that_differs_gets_what_it_got_before(kind, launches):
    launches.compiled = {"split-bf16-dense-packed-dlse-sink"}
    changes = {"other strides": lambda x: torch.cat([x, x])[::2], "none": lambda x: None, "a list": lambda x: [1.0]}
    changes |= {"half": Tensor.half, "double": Tensor.double, "meta": lambda x: x.to("meta")}
    changes |= {"more": lambda x: torch.cat([x, x]), "an odd address": misplaced}
    for name in ("dlse", "learnable_sink", "cu_seqlens_q", "cu_seqlens_k"):
        base = packed()
        compared(base, base | {name: changes[kind](base[name])}, launches)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_rows_that_are_not_used_are_not_forgotten(name, launches):
    launches.compiled = {"split-bf16-dense-packed-dlse-sink"}
    compared(packed(), packed(**{name: offsets(5, 4)}), launches)
    compared(packed(**{name: offsets(5, 4)}), packed(), launches)
