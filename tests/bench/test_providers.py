"""Who is installed is found out; each library is asked in its own words, and its answer is put into our shapes."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.deterministic
from torch.nn.attention import SDPBackend

from tests.bench.stand_ins import bench_of, cell_named, ideal_gradients, whole_scoring
from tests.integrations.flash_kernels import cpu_flash_attention
from undertow.attention import dispatch
from undertow.bench import peers
from undertow.bench.peers import (
    PEERS,
    PROVIDERS,
    FlashAttention3,
    FlashAttention4,
    FlexAttention,
    TorchCudnn,
    TorchFlash,
)
from undertow.bench.providers import UNDERTOW, UnableError, Undertow, as_rows, deterministic_torch
from undertow.bench.records import MEASURED
from undertow.bench.workload import Workload, workload
from undertow.reference import Gradients, Scoring, attention_backward, attention_forward
from undertow.tolerance import relative_error

torch_deterministic: Any = torch.utils.deterministic  # a module that makes its setting a property
CELLS = ["gqa-causal-512-bf16", "mha-dense-1k-bf16", "mqa-local-causal-2k-bf16", "mha-varlen-causal-4k-fp16"]


def loaded(name: str) -> Workload:
    cell = cell_named(name)
    return workload(cell, cell.scaled, "cpu")


def with_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Let `name` be a module of these functions, and every other one what it is."""
    known, real = types.SimpleNamespace(**functions), peers.importlib.import_module
    module = types.ModuleType(name)
    vars(module).update(vars(known))
    monkeypatch.setattr(
        peers.importlib, "import_module", lambda asked, *rest: module if asked == name else real(asked, *rest)
    )


def test_names_are_unique_and_ours_is_first():
    assert list(PROVIDERS) == [UNDERTOW, *(peer.name for peer in PEERS)] and len(PROVIDERS) == 6


def test_a_library_that_is_not_installed_is_missing_by_name(monkeypatch):
    assert "flash_attn_interface cannot be imported: ModuleNotFoundError" in str(FlashAttention3().missing())
    with_module(monkeypatch, "flash_attn_interface")
    assert FlashAttention3().missing() is None


def test_a_library_whose_import_fails_is_missing_with_the_reason(monkeypatch):
    def failing(name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(peers.importlib, "import_module", failing)
    why = FlashAttention4().missing()
    assert why == (
        "flash_attn.cute.interface cannot be imported: OSError: libcuda.so.1: cannot open shared object file"
    )


@pytest.mark.parametrize("name", CELLS)
def test_torch_s_flash_operators_give_right_gradients(name):
    with cpu_flash_attention() as calls:
        (record,) = bench_of(TorchFlash(), rounds=1).times(cell_named(name))
    assert (record.status, record.complaint) == (MEASURED, None)
    assert calls["flash_forward"] == 1 and calls["flash_backward"] > 1


def test_torch_s_deterministic_mode_is_in_force_for_deterministic_cells_alone():
    for name, wanted in (("mha-dense-512-bf16", False), ("mha-dense-512-bf16-deterministic", True)):
        with cpu_flash_attention():
            participant = TorchFlash().prepare(loaded(name))
        with participant.around():
            assert torch.are_deterministic_algorithms_enabled() is wanted
        assert not torch.are_deterministic_algorithms_enabled()


def test_the_deterministic_mode_of_the_caller_comes_back():
    with deterministic_torch(True):
        assert not torch_deterministic.fill_uninitialized_memory
        with deterministic_torch(True):
            pass
        assert torch.are_deterministic_algorithms_enabled()
    assert torch_deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("name", CELLS[:2])
def test_scaled_dot_product_attention_by_autograd(name, monkeypatch):
    monkeypatch.setattr(TorchCudnn, "backend", SDPBackend.MATH)
    found = in_float64(name)
    participant = TorchCudnn().prepare(found)
    assert_exact(found, participant.gradients(participant.call()))
    assert_exact(found, participant.gradients(participant.call()))  # the graph is kept


@pytest.mark.parametrize(
    ("provider", "name", "why"),
    [
        (TorchCudnn(), "mha-varlen-512-bf16", "packed"),
        (TorchCudnn(), "mha-local-512-bf16", "windows"),
        (TorchCudnn(), "mha-dense-512-bf16-deterministic", "equal bits"),
        (FlexAttention(), "mha-dense-512-bf16-deterministic", "equal bits"),
    ],
)
def test_what_a_library_does_not_promise_is_not_asked_of_it(provider, name, why):
    with pytest.raises(UnableError, match=why):
        provider.prepare(loaded(name))


@pytest.mark.parametrize("name", ["mha-varlen-causal-4k-fp16", "gqa-causal-512-bf16", "mqa-local-causal-2k-bf16"])
def test_flash_attention_3_is_asked_in_its_words(name, monkeypatch):
    found, asked = in_float64(name), []

    def attention(q, k, v, **options):
        asked.append(options)
        return differentiable(q, k, v, whole_scoring(found)), "lse"

    with_module(monkeypatch, "flash_attn_interface", flash_attn_func=attention, flash_attn_varlen_func=attention)
    participant = FlashAttention3().prepare(found)
    assert_exact(found, participant.gradients(participant.call()))
    (options,) = asked
    left = found.size.window[0]
    assert options["window_size"] == (-1 if left is None else left, -1 if left is None else 0)
    assert (options["causal"], options["deterministic"], options["softmax_scale"]) == (True, False, 0.125)
    assert options.get("max_seqlen_q") == (256 if found.size.packed else None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gqa-causal-512-bf16", {"causal": True, "window_size_left": None, "window_size_right": None}),
        ("mqa-local-causal-2k-bf16", {"causal": False, "window_size_left": 180, "window_size_right": 0}),
        ("mha-dense-512-bf16-deterministic", {"causal": False, "window_size_left": None, "window_size_right": None}),
        ("mha-varlen-causal-4k-fp16", {"causal": True, "max_seqlen_q": 256, "max_seqlen_k": 256}),
    ],
)
def test_flash_attention_4_is_asked_in_its_words(name, words, monkeypatch):
    found, asked = loaded(name), []

    def forward(q, k, v, **options):
        asked.append(options)
        made = attention_forward(q, k, v, whole_scoring(found))
        return made.out.to(q.dtype), made.lse.float(), None, None, None

    def backward(q, k, v, *rest, **options):
        assert len(rest) == 3  # out, dout, lse
        asked.append(options)
        return *(x.reshape(like.shape) for x, like in zip(ideal_gradients(found), (q, k, v))), "more"

    with_module(monkeypatch, FlashAttention4.module, _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    participant = FlashAttention4().prepare(found)
    gradients = participant.gradients(participant.call())
    assert all(map(torch.equal, gradients, ideal_gradients(found)))
    first, second = asked
    assert first.items() >= words.items() and second.items() >= words.items()
    assert first["return_lse"] and "deterministic" not in first
    assert second["deterministic"] is found.cell.deterministic


@pytest.mark.parametrize("name", [*CELLS, "gqa-varlen-1k-fp16"])
def test_flex_attention_sees_the_pairs_of_the_mask(name):
    found = loaded(name)
    seen, size = peers.mask_of(found), found.size
    rows = size.tokens if size.packed else size.lengths[0]
    index = torch.arange(rows)
    kept = torch.zeros(rows, rows, dtype=torch.bool)
    begin = 0
    for length in size.lengths if size.packed else size.lengths[:1]:
        mask = found.scoring.kept(range(length), length, length)
        kept[begin : begin + length, begin : begin + length] = True if mask is None else mask
        begin += length
    if seen is None:
        assert bool(kept.all())
    else:
        zero = torch.tensor(0)
        assert torch.equal(seen(zero, zero, index[:, None], index[None, :]), kept)


def test_rows_come_back_from_heads_first():
    for name in ("gqa-causal-512-bf16", "mha-varlen-causal-4k-fp16"):
        found = loaded(name)
        assert torch.equal(found.rows_first(found.heads_first(found.q)), found.q)


def test_ours_refuses_what_would_fall_back(monkeypatch):
    # as on a GPU without kernels of ours: the dispatcher knows why, and strict mode says it
    monkeypatch.setitem(dispatch.ORDER, "cpu", ("sm100", "reference"))
    with pytest.raises(UnableError, match="strict: none of our kernels computes this call"):
        Undertow().prepare(loaded("gqa-dense-512-bf16"))


def differentiable(q, k, v, scoring: Scoring) -> torch.Tensor:
    """Attention that autograd can go through, from a mask of all pairs."""
    batched = [x if x.dim() == 4 else x[None] for x in (q, k, v)]
    group = q.shape[-2] // k.shape[-2]
    query, key, value = (x.double().transpose(1, 2) for x in batched)
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    rows = query.shape[2]
    kept = torch.zeros(rows, rows, dtype=torch.bool)
    lengths = [range(rows)] if scoring.sequences is None else [used for used, _ in scoring.sequences.used()]
    for used in lengths:
        mask = scoring.kept(range(len(used)), len(used), len(used))
        kept[used.start : used.stop, used.start : used.stop] = True if mask is None else mask
    scores = (query @ key.transpose(-1, -2) * 0.125).masked_fill(~kept, -torch.inf)
    out = (scores.softmax(-1) @ value).transpose(1, 2).to(q.dtype)
    return out if q.dim() == 4 else out[0]


def in_float64(name: str) -> Workload:
    """A workload whose gradients need no rounding."""
    found = loaded(name)
    return replace(found, **{field: getattr(found, field).double() for field in ("q", "k", "v", "dout")})


def assert_exact(found: Workload, gradients: Gradients) -> None:
    """Gradients in float64, in the shapes of the inputs."""
    q, k, v, dout = (found.shaped(x) for x in (found.q, found.k, found.v, found.dout))
    exact = as_rows(found, attention_backward(q, k, v, dout, None, whole_scoring(found)))
    for name, x, y in zip(Gradients._fields, gradients, exact):
        assert x.shape == y.shape and relative_error(x, y) < 1e-12, name
