"""Who computes, why, and the proof that it did: choices, counters, fallbacks, strict mode, determinism."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import undertow
from tests.attention.places import EMULATOR, REFERENCE, complaints, inputs, run
from tests.kernels.packings import offsets
from undertow.attention import (
    BackendError,
    Choice,
    Inputs,
    Problem,
    choose,
    choose_forward,
    counts,
    dispatch,
    forward_counts,
    libraries,
    settings_from,
)
from undertow.attention.backends import by_reference
from undertow.attention.dispatch import BACKENDS, Backend
from undertow.kernels.compile import MachineCodeError
from undertow.kernels.sm100.launch import attention_of

CU: dict[str, Any] = {"cu_seqlens_q": offsets(0, 8), "cu_seqlens_k": offsets(0, 8)}


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(dispatch, "_told", set())
    torch._dynamo.reset()
    monkeypatch.delenv("UNDERTOW_STRICT", raising=False)


@pytest.fixture
def passed_over(monkeypatch):
    """Tensors on the CPU are treated as if on a GPU: our kernels come first, and cannot take them."""
    monkeypatch.setitem(dispatch.ORDER, "cpu", dispatch.ORDER["cuda"])


def problem_of(q: Tensor, k: Tensor, v: Tensor, **more) -> Problem:
    out = torch.empty_like(q)
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    settings = settings_from(q.shape[-1], **more.pop("settings", {}))
    return Problem(q, k, v, out=out, lse=lse, dout=out, settings=settings, **more)


def test_the_counter_says_who_ran():
    tensors = inputs((8, 8))
    for place in (REFERENCE, EMULATOR, EMULATOR):
        assert not complaints(tensors, run(place, tensors))
    assert counts() == {"reference": 1, "emulator": 2} and forward_counts() == {"reference": 3}


def test_tensors_on_the_cpu_are_for_the_reference():
    tensors = inputs((8, 8))[:3]
    choice = choose(problem_of(*tensors))
    assert (choice.backend, choice.rejected) == ("reference", {}) and "CPU" in choice.reason
    assert choose(problem_of(*tensors), "emulator") == Choice("emulator", "asked for by name")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_dim": 128}, "head_dim is 128: the kernels have 64"),
        ({"dtype": torch.float32}, "dtype is torch.float32: the kernels have torch.bfloat16 and torch.float16"),
    ],
)
def test_a_backend_asked_for_by_name_refuses_what_it_cannot_do_already_in_the_forward_pass(change, said):
    q, k, v, _ = inputs((8, 8), **change)
    with pytest.raises(BackendError, match=f"backend='emulator' cannot compute this call: {said}"):
        undertow.flash_attn_func(q.requires_grad_(), k, v, backend="emulator")
    undertow.flash_attn_func(q.detach(), k, v, backend="emulator")  # without gradients nobody needs one


@pytest.mark.parametrize("backend", ["sm100", "sm90", "flash-attn-4", "torch"])
def test_backends_of_a_gpu_refuse_the_cpu(backend):
    with pytest.raises(BackendError, match="cannot compute this call: q is on cpu"):
        choose(problem_of(*inputs((8, 8))[:3]), backend)


def on_a_fake_gpu(unable: dict[str, str], monkeypatch, **more) -> Choice:
    """What is chosen for CUDA tensors if the backends in `unable` say why they cannot."""
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, backend._replace(unable=lambda problem, name=name: unable.get(name)))
    with FakeTensorMode():
        tensors = [torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        return choose(problem_of(*tensors), **more)


FAKES = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


@FAKES
def test_on_a_gpu_our_kernels_come_first_then_kept_libraries_then_the_reference(monkeypatch):
    unable: dict[str, str] = {}
    for name in ("sm100", "sm90", "flash-attn-4", "torch", "reference"):
        monkeypatch.setattr(dispatch, "_plans", {})
        choice = on_a_fake_gpu(unable, monkeypatch)
        assert choice.backend == name and choice.rejected == unable
        assert choice.is_fallback == (name not in ("sm100", "sm90"))
        unable[name] = f"no {name}"


@FAKES
def test_strict_mode_refuses_a_fallback_and_says_every_reason(monkeypatch):
    unable = {"sm100": "compute capability 8.0", "sm90": "compute capability 8.0, too"}
    with pytest.raises(BackendError, match=r"(?s)strict: .* flash-attn-4: .*not sm100: compute .*not sm90: .*, too"):
        on_a_fake_gpu(unable, monkeypatch, strict=True)


REFUSAL = "the machine code of sm_90a-dense for sm_90a is refused"


@pytest.fixture
def refused_code(passed_over, monkeypatch):
    """Our kernels come first and could take everything, but what the compiler makes of them is refused."""
    from undertow.runtime import device

    def refuse(*_):
        raise MachineCodeError(REFUSAL)

    monkeypatch.setattr(device, "backward", refuse)
    for name in ("sm100", "sm90"):
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(unable=lambda problem: None))


def test_refused_machine_code_is_a_fallback_that_is_told_once(refused_code, caplog):
    q, k, v = (x.requires_grad_() for x in inputs((8, 8))[:3])
    with caplog.at_level(logging.WARNING, logger="undertow.attention"):
        for _ in range(2):
            undertow.flash_attn_func(q, k, v).sum().backward()
    assert counts() == {"reference": 2}
    told = [record.getMessage() for record in caplog.records if f"not sm90: {REFUSAL}" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("the backward pass falls back to reference")


def test_refused_machine_code_is_an_error_in_strict_mode_and_by_name(refused_code):
    q, k, v = (x.requires_grad_() for x in inputs((8, 8))[:3])
    out = undertow.flash_attn_func(q, k, v, strict=True)
    with pytest.raises(BackendError, match=f"(?s)strict: .* not sm90: {REFUSAL}"):
        out.sum().backward()
    with pytest.raises(BackendError, match=REFUSAL):
        undertow.flash_attn_func(q, k, v, backend="sm90").sum().backward()


def test_strict_mode_is_asked_for_by_argument_or_environment(passed_over, monkeypatch):
    q, k, v, _ = inputs((8, 8))
    q.requires_grad_()
    with pytest.raises(BackendError, match="strict"):
        undertow.flash_attn_func(q, k, v, strict=True)
    monkeypatch.setenv("UNDERTOW_STRICT", "1")
    with pytest.raises(BackendError, match="strict"):
        undertow.flash_attn_func(q, k, v)
    undertow.flash_attn_func(q, k, v, strict=False).sum().backward()
    monkeypatch.setenv("UNDERTOW_STRICT", "yes")
    with pytest.raises(BackendError, match="UNDERTOW_STRICT='yes': must be 0 or 1"):
        undertow.flash_attn_func(q, k, v)


def test_the_reference_on_the_cpu_is_no_fallback():
    q, k, v, _ = inputs((8, 8))
    undertow.flash_attn_func(q.requires_grad_(), k, v, strict=True).sum().backward()
    assert counts() == {"reference": 1}


def test_a_fallback_is_right_and_logged_once_per_reason(passed_over, caplog, monkeypatch):
    absent = BACKENDS["sm100"]._replace(unable=lambda problem: f"no kernel for {problem.q.dtype}")
    monkeypatch.setitem(BACKENDS, "sm100", absent)
    with caplog.at_level(logging.WARNING, logger="undertow.attention"):
        for length in (8, 9, 10):
            tensors = inputs((length, length))
            assert not complaints(tensors, run(REFERENCE._replace(backend="auto"), tensors))
        assert len(caplog.records) == 1 and "not sm100: no kernel for torch.bfloat16" in caplog.text
        run(REFERENCE._replace(backend="auto"), inputs((8, 8), dtype=torch.float32))
        assert len(caplog.records) == 2, "another reason"
    assert counts() == {"reference": 4}


def test_a_library_that_refuses_is_passed_over_with_its_words(passed_over, monkeypatch, caplog):
    """What no table of ours knows: a release that has given up an option. Asked once per signature, not every time."""
    asked = []

    def refuse(problem, layout):
        asked.append(problem)
        with libraries.asked("flash-attn-4", problem.q):
            raise NotImplementedError("this option is gone")

    monkeypatch.setitem(BACKENDS, "flash-attn-4", Backend(lambda problem: None, refuse))
    tensors = inputs((8, 8))
    for _ in range(2):
        assert not complaints(tensors, run(REFERENCE._replace(backend="auto"), tensors))
    assert len(asked) == 1 and counts() == {"reference": 2}
    assert "not flash-attn-4: flash-attn-4 refuses this call: NotImplementedError: this option is gone" in caplog.text
    with pytest.raises(BackendError, match="this option is gone"):
        run(REFERENCE._replace(backend="flash-attn-4"), tensors)


def test_explain_says_who_why_and_what_is_copied():
    q, k, v, _ = inputs((8, 8))
    told = undertow.explain(q, k, v, causal=True)
    assert (told.backend, told.forward, told.copies, told.deterministic) == ("reference", "reference", {}, False)
    assert str(told).splitlines()[0].startswith("backward: reference: tensors on the CPU")
    assert undertow.explain(q, k, v, backend="emulator", deterministic=True).deterministic
    wide = torch.zeros(1, 8, 2, 66, dtype=torch.bfloat16)[..., :64]
    assert undertow.explain(wide, k, v, backend="emulator").copies == {"q": "stride of 264 bytes in dimension 1"}
    assert "copied for the kernels: q: stride" in str(undertow.explain(wide, k, v, backend="emulator"))
    assert counts() == {} and forward_counts() == {}


def test_explain_speaks_of_packed_sequences_and_of_lse():
    q, k, v, _ = inputs((8, 8), batch=None)
    assert undertow.explain(q, k, v, **CU, return_lse=True, backend="emulator").backend == "emulator"
    with pytest.raises(ValueError, match="cu_seqlens_k=None"):
        undertow.explain(q, k, v, cu_seqlens_q=offsets(0, 8))


def test_a_signature_holds_no_tensor():
    """Dao-AILab/flash-attention#2635: a tensor in the key is never found again, or kept alive."""
    q, k, v, _ = inputs((8, 8), batch=None)
    sequences = undertow.attention.problem.sequences_from(**CU)
    problem = problem_of(q, k, v, sequences=sequences, sink=torch.zeros(2))

    def parts(x):
        yield from (part for y in x for part in parts(y)) if isinstance(x, tuple) else (x,)

    assert not any(isinstance(part, Tensor) for part in parts(problem.signature()))
    assert hash(problem.signature()) == hash(replace(problem, q=q.clone()).signature())


def test_a_signature_says_whether_torch_enforces_determinism():
    """torch's kernel is deterministic only if asked strictly: a choice of it must not outlive that."""
    problem = problem_of(*inputs((8, 8))[:3], settings={"deterministic": True})
    signatures = []
    try:
        for mode in ({"mode": False}, {"mode": True, "warn_only": True}, {"mode": True}):
            torch.use_deterministic_algorithms(**mode)
            signatures.append(problem.signature())
    finally:
        torch.use_deterministic_algorithms(False)
    loose, warned, enforced = signatures
    assert loose == warned != enforced


def test_twenty_calls_with_a_maximum_in_a_tensor_are_planned_once():
    """Dao-AILab/flash-attention#2635."""
    q, k, v, dout = inputs((8, 8), batch=None)
    for _ in range(20):
        run(REFERENCE, (q, k, v, dout), **CU, max_seqlen_q=torch.tensor(512), max_seqlen_k=torch.tensor(512))
    assert len(dispatch._plans) == 1 and counts() == {"reference": 20}


def test_plans_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_PLANS", 3)
    for length in range(1, 9):
        choose(problem_of(*inputs((length, length))[:3]))
    assert len(dispatch._plans) == 3


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_batch_of_one_with_stride_zero_bakes_nothing_in(order):
    """Dao-AILab/flash-attention PR 2298."""
    for batch in order:
        tensors = inputs((40, 40), batch=batch)
        if batch == 1:
            tensors = tuple(x.as_strided(x.shape, (0, *x.stride()[1:])) for x in tensors)
        assert not complaints(tensors, run(EMULATOR, tensors))


PATHS: dict[str, Callable[..., Tensor]] = {
    "dense": lambda q, k, v, **options: undertow.flash_attn_func(q, k, v, **options),
    "packed": lambda q, k, v, **options: undertow.flash_attn_varlen_func(q[0], k[0], v[0], **CU, **options),
    "compiled": torch.compile(
        lambda q, k, v, **options: undertow.flash_attn_func(q, k, v, **options), backend="aot_eager", fullgraph=True
    ),
}


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=["heads", "grouped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_determinism_reaches_the_kernels_on_every_path(path, dtype, heads, monkeypatch):
    """cudnn-frontend PR 837, pytorch PR 197771, Dao-AILab/flash-attention#746: asked of torch or as an argument."""
    variants = []

    def record(problem, copies):
        variants.append(attention_of(problem.settings, problem).deterministic)
        return by_reference(problem)

    monkeypatch.setitem(BACKENDS, "emulator", Backend(lambda problem: None, record))
    q, k, v, _ = inputs((8, 8), heads, dtype=dtype)

    def backward(**options):
        PATHS[path](q.requires_grad_(), k, v, backend="emulator", **options).float().sum().backward()

    backward()
    backward(deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert variants == [False, True, True]


def test_the_deterministic_variant_is_another_kernel(monkeypatch):
    """Dao-AILab/flash-attention#746: the flag is not compiled out, and what it asks for is right."""
    from undertow import emulated

    names = []
    real = emulated.execute
    monkeypatch.setattr(
        emulated, "execute", lambda compiled, *rest: (names.append(compiled.plan), real(compiled, *rest))[1]
    )
    tensors = inputs((150, 150), (1, 1))
    for deterministic in (False, True):
        assert not complaints(tensors, run(EMULATOR, tensors, deterministic=deterministic))
    assert [plan.attention.deterministic for plan in names] == [False, True]


def test_forward_is_chosen_once_per_signature_too():
    q, k, v, _ = inputs((8, 8))
    call = Inputs(q, k, v, settings=settings_from(64))
    assert choose_forward(call) is choose_forward(replace(call, q=q.clone()))
