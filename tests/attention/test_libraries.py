"""Kept libraries are asked in their own words, and only for what they answer rightly.

Neither runs without a GPU, so their functions are stood in for by the reference behind their real signatures.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.attention.places import inputs
from tests.flash_attn_4.interface import signature
from tests.kernels.packings import offsets
from undertow.attention import (
    Choice,
    Gradients,
    Inputs,
    Problem,
    backends,
    choose_forward,
    forward_counts,
    libraries,
    run_forward,
    settings_from,
)
from undertow.attention import forward as forward_module
from undertow.attention.forward import MAKERS
from undertow.attention.problem import sequences_from

CU = {"cu_seqlens_q": offsets(0, 3, 8, 8), "cu_seqlens_k": offsets(0, 4, 4, 9)}
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "far window": {"window_size": (10**6, 2)},
    "scale": {"softmax_scale": 0.3},
}


def call_of(packed: bool, dtype: torch.dtype = torch.bfloat16, **settings) -> tuple[Inputs, torch.Tensor]:
    q, k, v, dout = inputs((11, 11), (4, 2), None if packed else 1, dtype)
    sequences = sequences_from(**CU) if packed else None
    return Inputs(q, k, v, settings=settings_from(64, **settings), sequences=sequences), dout


def problem_of(call: Inputs, dout: torch.Tensor) -> Problem:
    out, lse = run_forward(call)
    return Problem(**vars(call), out=out, lse=lse, dout=dout)


def same_gradients(got: Gradients, want: Gradients) -> None:
    for a, b in zip(got, want):
        assert (a is None) == (b is None)
        assert a is None or b is None or (torch.equal(a, b) and a.stride() == b.stride())


@pytest.fixture
def flash_attn_4(monkeypatch):
    """A module with the signatures of the installed flash-attn-4, computing by the reference; `arity` of results."""
    signatures = {name: signature(name) for name in ("_flash_attn_fwd", "_flash_attn_bwd")}
    module = ModuleType("stand-in")
    module.arity, module.asked = 5, []  # pyright: ignore[reportAttributeAccessIssue]

    def inputs_of(given) -> Inputs:
        window = (given["window_size_left"], given["window_size_right"])
        settings = settings_from(64, given["softmax_scale"], given["causal"], window, given["softcap"])
        packing = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")}
        sequences = sequences_from(**packing) if packing["cu_seqlens_q"] is not None else None
        return Inputs(
            given["q"], given["k"], given["v"], settings=settings, sink=given["learnable_sink"], sequences=sequences
        )

    def forward(*arguments, **named):
        given = signatures["_flash_attn_fwd"].bind(*arguments, **named)
        given.apply_defaults()
        module.asked.append(given.arguments)  # pyright: ignore[reportAttributeAccessIssue]
        assert given.arguments["return_lse"]
        out, lse = backends_forward(inputs_of(given.arguments))
        if given.arguments["out"] is not None:  # it writes only rows that sequences use
            used = ~libraries.unused_rows(CU["cu_seqlens_q"], None, 11)
            given.arguments["out"][used], given.arguments["lse"][:, used] = out[used], lse[:, used]
            out, lse = given.arguments["out"], given.arguments["lse"]
        return (out, lse, None, None, None)[: module.arity]  # pyright: ignore[reportAttributeAccessIssue]

    def backward(*arguments, **named):
        given = signatures["_flash_attn_bwd"].bind(*arguments, **named)
        given.apply_defaults()
        asked = given.arguments
        module.asked.append(asked)  # pyright: ignore[reportAttributeAccessIssue]
        stored = {name: asked[name] for name in ("out", "lse", "dout", "dlse")}
        made = backends.by_reference(Problem(**vars(inputs_of(asked)), **stored))
        return tuple(x for x in made if x is not None)

    module._flash_attn_fwd, module._flash_attn_bwd = forward, backward  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(libraries, "flash_attn_4_module", lambda: module)
    parameters = {name: frozenset(found.parameters) for name, found in signatures.items()}
    monkeypatch.setattr(libraries, "_parameters", parameters.__getitem__)
    return module


def backends_forward(call: Inputs):
    return MAKERS["reference"].run(call)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("settings", CALLS.values(), ids=CALLS.keys())
def test_flash_attn_4_is_asked_for_the_same_attention(flash_attn_4, settings, packed):
    call, dout = call_of(packed, **settings)
    call = replace(call, sink=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    got, want = MAKERS["flash-attn-4"].run(call), backends_forward(call)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    problem = replace(problem_of(call, dout), dlse=torch.ones_like(got.lse))
    same_gradients(libraries.flash_attn_4(problem), backends.by_reference(problem))
    forward, backward = flash_attn_4.asked
    assert forward["causal"] == backward["causal"] == (settings == {"causal": True})


@pytest.mark.parametrize("arity", [2, 4, 5])
def test_results_of_every_release_of_flash_attn_4_are_understood(flash_attn_4, arity):
    """Its forward pass returned (out, lse), then two and then three more."""
    flash_attn_4.arity = arity
    call, _ = call_of(packed=False)
    assert torch.equal(MAKERS["flash-attn-4"].run(call).out, backends_forward(call).out)


def test_flash_attn_4_without_results_to_write_to_is_cleared(flash_attn_4, monkeypatch):
    """A release without `out`: rows that no sequence uses hold anything, and are cleared."""
    monkeypatch.setattr(libraries, "flash_attn_4_writes_into_given", lambda: False)
    real = flash_attn_4._flash_attn_fwd

    def dirty(*arguments, **named):
        out, lse, *rest = real(*arguments, **named)
        out[8:], lse[:, 8:] = torch.nan, torch.nan
        return (out, lse, *rest)

    flash_attn_4._flash_attn_fwd = dirty
    call, _ = call_of(packed=True)
    got = MAKERS["flash-attn-4"].run(call)
    assert not got.out[8:].any() and (got.lse[:, 8:] == -torch.inf).all()


def test_a_forward_pass_that_is_refused_is_computed_by_the_next(flash_attn_4, monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("head dims are unsupported today")

    flash_attn_4._flash_attn_fwd = refuse
    call, _ = call_of(packed=False)
    monkeypatch.setattr(forward_module, "_choose", chosen_as_on_a_gpu)
    monkeypatch.setattr(forward_module, "_plans", {})
    got, want = run_forward(call), backends_forward(call)
    assert torch.equal(got.out, want.out) and forward_counts() == {"reference": 1}
    assert "head dims are unsupported today" in choose_forward(call).rejected["flash-attn-4"]


def chosen_as_on_a_gpu(call: Inputs, refused: dict[str, str]) -> Choice:
    name = "reference" if refused else "flash-attn-4"
    return Choice(name, "a stand-in", refused)


@pytest.fixture
def aten():
    """CPU kernels for torch's flash operators, computing by the reference; rows of nobody hold NaN.

    As torch's they say +inf, where we say -inf, for the LSE of a row that sees nothing.
    """

    def inputs_of(tensors, causal, options) -> Inputs:
        q, k, v, cu_q, cu_k = tensors
        window = tuple(options[f"window_size_{side}"] for side in ("left", "right"))
        settings = settings_from(64, options["scale"], causal, window)  # pyright: ignore[reportArgumentType]
        sequences = None if cu_q is None else sequences_from(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        return Inputs(q, k, v, settings=settings, sequences=sequences)

    def forward(*arguments, **options):
        *tensors, max_q, max_k, dropout, causal, _ = arguments
        assert dropout == 0 and max_q >= 5 and max_k >= 5
        out, lse = backends_forward(inputs_of(tensors, causal, options))
        if tensors[3] is not None:
            out[8:], lse[:, 8:] = torch.nan, torch.nan
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        nothing = torch.empty(0)
        return out, lse, nothing, nothing.clone(), nothing.clone()

    def backward(*arguments, **options):
        dout, q, k, v, out, lse, cu_q, cu_k, *rest = arguments
        call = inputs_of((q, k, v, cu_q, cu_k), rest[3], options)
        assert not (lse == -torch.inf).any()
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        dq, dk, dv, _ = backends.by_reference(Problem(**vars(call), out=out, lse=lse, dout=dout))
        if cu_q is not None:
            dq[8:], dk[9:], dv[9:] = torch.nan, torch.nan, torch.nan
        return dq, dk, dv

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU", allow_override=True)
    library.impl("_flash_attention_backward", backward, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("settings", CALLS.values(), ids=CALLS.keys())
def test_torch_is_asked_for_the_same_attention(aten, settings, packed):
    call, dout = call_of(packed, **settings)
    got, want = MAKERS["torch"].run(call), backends_forward(call)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    problem = problem_of(call, dout.as_strided(dout.shape, (0,) * dout.dim()))
    same_gradients(libraries.torch_flash(problem), backends.by_reference(problem))


def test_rows_that_see_nothing_have_the_lse_of_the_contract_from_torch_too(aten):
    q, k, v, dout = inputs((11, 6), (4, 2))
    call = Inputs(q, k, v, settings=settings_from(64, causal=True))
    got, want = MAKERS["torch"].run(call), backends_forward(call)
    assert (got.lse[..., :5] == -torch.inf).all() and torch.equal(got.lse, want.lse)
    problem = problem_of(call, dout)
    same_gradients(libraries.torch_flash(problem), backends.by_reference(problem))


def on_a_fake_gpu(call: Inputs) -> Inputs:
    def there(x):
        return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    tensors = {name: there(getattr(call, name)) for name in ("q", "k", "v", "sink")}
    sequences = (
        None if call.sequences is None else sequences_from(**{n: there(x) for n, x in vars(call.sequences).items()})
    )
    return replace(call, **tensors, sequences=sequences)


REFUSED = {
    "float32": ({"dtype": torch.float32}, {}, r"dtype is torch\.float32", True),
    "negative scale": ({"softmax_scale": -0.1}, {}, "softmax_scale is -0.1: needs a positive one", True),
    "negative bound": ({"window_size": (5, -2)}, {}, r"\(5, -2\) hold a negative one", True),
    "empty band": ({"window_size": (2, -7)}, {}, "hold a negative one", True),
    "softcap": ({"softcap": 2.0}, {}, "neither a softcap nor a sink", False),
    "sink": ({}, {"sink": torch.zeros(4)}, "neither a softcap nor a sink", False),
    "unequal lengths under a mask": (
        {"causal": True},
        {"k": torch.zeros(1, 12, 2, 64), "v": torch.zeros(1, 12, 2, 64)},
        "another corner",
        False,
    ),
}


@pytest.mark.parametrize(("settings", "change", "said", "both"), REFUSED.values(), ids=REFUSED.keys())
def test_libraries_are_not_asked_for_what_they_answer_wrongly(flash_attn_4, settings, change, said, both, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    call, _ = call_of(packed=False, **settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = on_a_fake_gpu(replace(call, **{n: x.to(call.q.dtype) if n != "sink" else x for n, x in change.items()}))
        asked = [libraries.outside_torch, *([libraries.outside_flash_attn_4] if both else [])]
        for unable in asked:
            reason = unable(fake)
            assert reason is not None and re.search(said, reason), reason
        if not both:
            assert libraries.outside_flash_attn_4(fake) is None


def test_a_release_of_flash_attn_4_without_an_option_is_not_asked_for_it(flash_attn_4, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(libraries, "_parameters", lambda name: frozenset({"q", "k", "v"}))
    call, _ = call_of(packed=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert libraries.outside_flash_attn_4(on_a_fake_gpu(call)) is None
        with_sink = on_a_fake_gpu(replace(call, sink=torch.zeros(4)))
        assert libraries.outside_flash_attn_4(with_sink) == "this flash-attn-4 has no learnable_sink"


def test_a_broken_flash_attn_4_is_a_reason_and_no_crash(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(libraries, "FLASH_ATTN_4", "no_such_module.at_all")
    monkeypatch.setattr(libraries, "flash_attn_4_module", libraries.flash_attn_4_module.__wrapped__)
    with FakeTensorMode(allow_non_fake_inputs=True):
        reason = libraries.outside_flash_attn_4(on_a_fake_gpu(call_of(packed=False)[0]))
    assert reason is not None and reason.startswith("flash-attn-4 cannot be imported: ModuleNotFoundError")


def test_rows_of_nobody_are_found_without_reading_lengths_on_the_host():
    cu, used = offsets(0, 3, 3, 8), offsets(2, 0, 5)
    assert libraries.unused_rows(cu, None, 10).nonzero().flatten().tolist() == [8, 9]
    assert libraries.unused_rows(cu, used, 10).nonzero().flatten().tolist() == [2, 8, 9]
    assert libraries.unused_rows(offsets(0), None, 2).all() and not libraries.unused_rows(offsets(0, 4), None, 4).any()
