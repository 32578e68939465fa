"""What goes straight to the launch the second time, what never does, and that every way computes the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import undertow
from tests.attention.launches import dense, outcome
from undertow.attention import prepared
from undertow.integrations.flash_operators import Options
from undertow.integrations.sdpa import enable_with


def test_lists_of_two_bounds_are_prepared_like_tuples(launches):
    for _ in range(2):
        outcome(dense(window_size=[5, 0]), launches)
    assert launches.long_way == 1


@pytest.mark.parametrize("warn_only", [False, True])
def test_determinism_asked_of_torch_is_another_call(warn_only, launches):
    outcome(dense(), launches)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        for _ in range(2):
            assert outcome(dense(), launches)[2][0][0] == "split-bf16-causal-deterministic"
    finally:
        torch.use_deterministic_algorithms(False)
    assert outcome(dense(), launches)[2][0][0] == "split-bf16-causal"
    assert launches.long_way == 2


class Listens(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


def test_whoever_listens_to_the_dispatcher_hears_an_operator(launches):
    outcome(dense(), launches)
    with Listens() as mode:
        outcome(dense(), launches)
    assert "undertow.backward.default" in mode.heard
    assert launches.long_way == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_transform_of_torch_func_maps_over_launches(launches):
    base = dense()
    outcome(base, launches)
    made = torch.func.vmap(lambda q: undertow.attention_backward(**base | {"q": q})[1])(torch.stack([base["q"]] * 3))
    assert made.shape == (3, *base["k"].shape) and len(launches.given) == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_nothing_is_recorded_in_any_mode(mode, launches):
    outcome(dense(), launches)
    with mode():
        call = dense()
        call["q"].requires_grad_()
        (_, who, _) = told = outcome(call, launches)
    assert who == {"sm100": 1} and launches.long_way == 1
    assert all(not kind[-1] for kind in told[0])


def test_another_current_device_is_left_as_it_was(launches, monkeypatch):
    outcome(dense(), launches)
    entered: list[Any] = []

    class On:
        def __init__(self, index: Any) -> None:
            entered.append(index)

        __enter__ = __exit__ = lambda self, *given: None

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", On)
    outcome(dense(), launches)
    assert entered == [None] and launches.long_way == 1, "that of q, which on the CPU has no index"


def leaves(base: dict[str, Any], names: tuple[str, ...] = ("q", "k", "v")) -> list[Tensor]:
    return [base[name].clone().requires_grad_(name in names) for name in ("q", "k", "v")]


def test_the_second_backward_pass_of_autograd_goes_straight(launches):
    base = dense()
    for _ in range(3):
        q, k, v = leaves(base)
        undertow.flash_attn_func(q, k, v, causal=True).backward(base["dout"])
        assert all(x.grad is not None and x.grad.stride() == x.stride() for x in (q, k, v))
    assert launches.long_way == 1 and len(launches.given) == 3
    (_, _, first, _, numbers), *others = launches.given
    assert all(given[-1] == numbers and given[2][0].shape == first[0].shape for given in others)


def test_only_gradients_that_are_needed_are_returned(launches):
    base = dense()
    for names in (("k",), ("q", "v"), ("k",)):
        given = leaves(base, names)
        undertow.flash_attn_func(*given, causal=True).backward(base["dout"])
        assert [x.grad is not None for x in given] == [name in names for name in ("q", "k", "v")]
    assert launches.long_way == 1


def test_a_gradient_of_lse_or_of_a_sink_is_another_call(launches):
    base = dense()
    sink = torch.zeros(4, requires_grad=True)
    for _ in range(2):
        q, k, v = leaves(base)
        out, lse = undertow.flash_attn_func(q, k, v, return_lse=True, learnable_sink=sink)
        torch.autograd.grad((out, lse), (q, k, v, sink), (base["dout"], torch.ones_like(lse)), retain_graph=True)
        torch.autograd.grad(lse, (q, k, v, sink), torch.ones_like(lse), retain_graph=True)
        torch.autograd.grad(out, (q, k, v, sink), base["dout"])
    names = [name for name, *_ in launches.given]
    assert names == 2 * ["split-bf16-dense-dlse-sink", "split-bf16-dense-dlse-sink", "split-bf16-dense-sink"]
    assert launches.long_way == 2


def test_a_second_derivative_is_refused_on_either_way(launches):
    base = dense()
    for _ in range(2):
        q, k, v = leaves(base)
        out = undertow.flash_attn_func(q, k, v)
        (dq,) = torch.autograd.grad(out, q, base["dout"].requires_grad_(), create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            dq.sum().backward()


def test_the_operator_of_torch_goes_straight_the_second_time(launches):
    base = dense()
    given = [base[name].transpose(1, 2) for name in ("dout", "q", "k", "v", "out")]
    seeds = torch.zeros(2, dtype=torch.uint64)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
    with enable_with(Options(dispatch_key="CPU", forward="reference", strict=True), prefer_flash=False):
        for causal, scale in ((True, 0.5), (True, 0.5), (False, 0.5), (True, 0.25), (True, 0.5)):
            made = operator(*given, base["lse"], None, None, 40, 24, 0.0, causal, seeds, seeds, scale=scale)
            assert [x.stride() for x in made] == [x.stride() for x in given[1:4]]
    assert launches.long_way == 3
    assert [(name, numbers[5]) for name, *_, numbers in launches.given] == [
        ("split-bf16-causal", 0.5),
        ("split-bf16-causal", 0.5),
        ("split-bf16-dense", 0.5),
        ("split-bf16-causal", 0.25),
        ("split-bf16-causal", 0.5),
    ]


def test_the_operator_of_a_graph_goes_straight_the_second_time(launches):
    base = dense()
    function = torch.compile(lambda q: undertow.attention_backward(**base | {"q": q}), backend="eager", fullgraph=True)
    for _ in range(3):
        function(base["q"])
    assert len(launches.given) == 3 and launches.long_way == 1


def test_what_a_call_needs_besides_a_launch_is_never_prepared(launches):
    wide = dense()["q"].transpose(-1, -2).contiguous().transpose(-1, -2)
    for changes in ({"q": wide}, {"learnable_sink": torch.zeros(4, dtype=torch.bfloat16)}, {"backend": "reference"}):
        kinds, who, _ = outcome(dense(**changes), launches)
        assert len(kinds) >= 3 and sum(who.values()) == 1
    assert prepared._prepared == {}


def test_on_the_cpu_nothing_is_prepared_where_no_kernel_runs(launches, monkeypatch):
    monkeypatch.setattr(prepared, "DEVICES", ("cuda",))
    outcome(dense(), launches)
    assert prepared._prepared == {}


def test_the_oldest_are_forgotten_and_no_tensor_is_kept(launches, monkeypatch):
    monkeypatch.setattr(prepared, "MOST_PLANS", 3)
    for scale in range(1, 9):
        outcome(dense(softmax_scale=float(scale)), launches)
    assert len(prepared._prepared) == 3

    def parts(x: Any) -> Iterator[Any]:
        yield from (part for y in x for part in parts(y)) if isinstance(x, tuple) else (x,)

    assert not any(isinstance(part, Tensor) for key in prepared._prepared for part in parts(key))


def test_threads_that_come_all_at_once_launch_each_their_own(launches):
    calls = [dense(softmax_scale=1.0 + index % 3) for index in range(12)]
    start = threading.Barrier(12)

    def work(call: dict[str, Any]) -> None:
        start.wait()
        for _ in range(20):
            undertow.attention_backward(**call)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launches.given) == 240
    scales = {id(call["q"]): call["softmax_scale"] for call in calls}
    assert all(scales[id(reads[0])] == numbers[5] for _, _, reads, _, numbers in launches.given)
