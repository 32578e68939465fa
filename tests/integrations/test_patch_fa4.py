"""flash-attn-4's backward pass replaced: ours where it can, the original for everything else, and put back."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
from inspect import Parameter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.flash_attn_4.interface import signature
from tests.integrations.test_flash_operators import packed
from undertow.attention import counts, dispatch
from undertow.attention.dispatch import Choice
from undertow.attention.problem import AttentionInputError, BackendError, Problem
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.integrations.flash_attn_4 import UNDERSTOOD, Options, Patch, patch, unpatch_fa4
from undertow.reference import DENSE, Gradients, Scoring
from undertow.tolerance import sink_error, yardstick
from undertow.verify import complaint

REQUIRED = ("q", "k", "v", "out", "dout", "lse")
OPTIONAL = {
    "softmax_scale": None,
    "causal": False,
    "softcap": 0.0,
    "window_size_left": None,
    "window_size_right": None,
    "m_block_size": 64,
    "pack_gqa": False,
    "deterministic": False,
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k")),
    **dict.fromkeys(("dq", "dk", "dv", "score_mod", "aux_tensors", "block_sparse_tensors", "dlse", "learnable_sink")),
}


class Recorder(ModuleType):
    """A module like flash-attn-4's, whose backward pass says that it was called, and how."""

    def __init__(self) -> None:
        super().__init__("flash_attn.cute.interface")
        self.calls: list[tuple[tuple, dict]] = []

        def _flash_attn_bwd(*args, **kwargs) -> Any:
            self.calls.append((args, kwargs))
            return "dq", "dk", "dv"

        defaults = {**dict.fromkeys(REQUIRED, Parameter.empty), **OPTIONAL}
        arguments = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=x) for name, x in defaults.items()]
        _flash_attn_bwd.__signature__ = inspect.Signature(arguments)  # pyright: ignore[reportFunctionMemberAccess]
        _flash_attn_bwd.compile_cache = {"of": "the original"}  # pyright: ignore[reportFunctionMemberAccess]
        self._flash_attn_bwd: Any = _flash_attn_bwd


@pytest.fixture
def module():
    yield Recorder()
    unpatch_fa4()


def saved(batch: Batch) -> tuple[Tensor, ...]:
    return batch.q, batch.k, batch.v, batch.out, batch.dout, batch.lse


def assert_right(batch: Batch, grads: tuple) -> None:
    assert not complaint(yardstick(batch, batch.scoring, batch.dlse), Gradients(*grads[:3]))


SCORINGS = {
    "dense": (DENSE, {}),
    "causal": (Scoring(causal=True), {"causal": True}),
    "scale": (Scoring(softmax_scale=0.3), {"softmax_scale": 0.3}),
    "softcap": (Scoring(softcap=5.0), {"softcap": 5.0}),
    "window": (Scoring(window=(8, 3)), {"window_size_left": 8, "window_size_right": 3}),
    "left": (Scoring(causal=True, window=(8, None)), {"causal": True, "window_size_left": 8}),
    "negative": (Scoring(window=(None, -4)), {"window_size_right": -4}),
    "two-negative": (DENSE, {"window_size_left": -1, "window_size_right": -1}),
}


@pytest.mark.parametrize("name", SCORINGS)
def test_every_way_of_scoring_is_read_as_flash_attn_4_means_it(module, name):
    scoring, options = SCORINGS[name]
    batch = random_batch(Shape(1, 20, 28, 2, 1), scoring=scoring)
    with patch(module, Options()):
        grads = module._flash_attn_bwd(*saved(batch), **options)
    assert_right(batch, grads)
    assert len(grads) == 3 and counts() == {"reference": 1} and not module.calls


@pytest.mark.parametrize("backend", ["auto", "emulator"])
def test_packed_sequences_with_a_window(module, backend):
    batch = packed((16, 0))
    sequences = batch.scoring.sequences
    assert sequences is not None
    offsets = {"cu_seqlens_q": sequences.cu_seqlens_q, "cu_seqlens_k": sequences.cu_seqlens_k}
    with patch(module, Options(backend=backend, strict=True)):
        grads = module._flash_attn_bwd(
            *saved(batch), None, True, window_size_left=16, max_seqlen_q=50, max_seqlen_k=50, **offsets
        )
    assert_right(batch, grads)
    assert not module.calls


def test_a_sink_and_a_gradient_of_lse(module):
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    scoring = Scoring(causal=True, sink=sink)
    plain = random_batch(Shape(2, 24, 24, 4, 2), scoring=scoring)
    dlse = torch.randn(plain.lse.shape, generator=torch.Generator().manual_seed(4))
    names = ("q", "k", "v", "dout", "out", "lse")
    batch = complete({name: getattr(plain, name) for name in names} | {"dlse": dlse}, scoring)
    with patch(module, Options()):
        grads = module._flash_attn_bwd(*saved(batch), causal=True, dlse=dlse, learnable_sink=sink)
        *_, dsink = module._flash_attn_bwd(*saved(batch), causal=True, dlse=dlse, learnable_sink=sink.bfloat16())
    assert_right(batch, grads)
    error, budget = sink_error(batch, grads[3], scoring, dlse)
    assert len(grads) == 4 and error <= budget
    assert dsink.dtype == torch.bfloat16 and torch.equal(dsink, grads[3].bfloat16()), "in the type of the sink"


def test_the_caller_s_own_results_are_written(module):
    batch = random_batch(Shape(1, 16, 16, 1))
    dq, dv = torch.zeros_like(batch.q), torch.zeros_like(batch.v)
    with patch(module, Options()):
        grads = module._flash_attn_bwd(*saved(batch), dq=dq, dv=dv)
    assert grads[0] is dq and grads[2] is dv
    assert_right(batch, grads)


def test_no_gradient_of_out_is_a_gradient_of_zeros(module):
    batch = random_batch(Shape(1, 16, 16, 1))
    dlse = torch.ones_like(batch.lse)
    tensors = {name: getattr(batch, name) for name in ("q", "k", "v", "out", "lse")}
    right = complete({**tensors, "dout": torch.zeros_like(batch.dout), "dlse": dlse})
    with patch(module, Options()):
        grads = module._flash_attn_bwd(batch.q, batch.k, batch.v, batch.out, None, batch.lse, dlse=dlse)
    assert_right(right, grads)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"score_mod": lambda score: score}, "score_mod is given"),
        ({"block_sparse_tensors": object()}, "block_sparse_tensors is given"),
        ({"aux_tensors": [torch.zeros(1)]}, "aux_tensors is given"),
        ({"m_block_size": 128}, "m_block_size is given"),
        ({"pack_gqa": True}, "pack_gqa is given"),
        ({"seqused_k": torch.full((1,), 8, dtype=torch.int32)}, "cu_seqlens_q=None"),
        ({"softmax_scale": float("nan")}, "softmax_scale=nan"),
        ({"from_a_release_to_come": 1}, "from_a_release_to_come is given"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_we_cannot_read_goes_to_the_original_as_it_came(module, caplog, options, reason):
    batch = random_batch(Shape(1, 16, 16, 1))
    with patch(module, Options()), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert module._flash_attn_bwd(*saved(batch), **options) == ("dq", "dk", "dv")
    assert [(len(args), kwargs) for args, kwargs in module.calls] == [(6, options)] * 2
    assert counts() == {}
    (told,) = [record.getMessage() for record in caplog.records if "_flash_attn_bwd" in record.getMessage()]
    assert reason in told
    with patch(module, Options(strict=True)), pytest.raises(BackendError, match="strict"):
        module._flash_attn_bwd(*saved(batch), **options)


@pytest.mark.parametrize("head_dim", [32, 128])
def test_another_head_dim_goes_to_the_original(module, head_dim):
    x = torch.zeros(1, 8, 1, head_dim, dtype=torch.bfloat16)
    with patch(module, Options(backend="emulator")):
        assert module._flash_attn_bwd(x, x, x, x, x, torch.zeros(1, 1, 8)) == ("dq", "dk", "dv")
    assert len(module.calls) == 1


def test_on_a_gpu_that_is_not_ours_the_original_computes(module, monkeypatch):
    choice = Choice("flash-attn-4", "the first of those able", {"sm100": "9.0", "sm90": "none yet"})
    monkeypatch.setattr(dispatch, "_choose", lambda *_: choice)
    monkeypatch.setattr(dispatch, "_plans", {})
    batch = random_batch(Shape(1, 8, 8, 1))
    with patch(module, Options()):
        assert module._flash_attn_bwd(*saved(batch)) == ("dq", "dk", "dv")
    assert counts() == {}


def test_mask_of_one_call_is_not_that_of_the_next(module):
    """A causal call, then cross attention over other lengths: nothing of the first may be left."""
    causal = random_batch(Shape(1, 64, 64, 1), scoring=Scoring(causal=True))
    cross = random_batch(Shape(1, 64, 128, 1))
    with patch(module, Options()):
        for _ in range(2):
            assert_right(causal, module._flash_attn_bwd(*saved(causal), causal=True, window_size_right=0))
            assert_right(cross, module._flash_attn_bwd(*saved(cross), causal=False))


@pytest.mark.parametrize("by", ["argument", "torch"])
def test_deterministic_reaches_the_kernel(module, monkeypatch, by):
    seen = []

    def run(problem: Problem, copies: dict[str, str]):
        seen.append(problem.settings.deterministic)
        return dispatch.backends.by_reference(problem)

    monkeypatch.setitem(dispatch.BACKENDS, "reference", dispatch.BACKENDS["reference"]._replace(run=run))
    batch = random_batch(Shape(1, 8, 8, 1))
    with patch(module, Options()):
        module._flash_attn_bwd(*saved(batch))
        torch.use_deterministic_algorithms(by == "torch")
        module._flash_attn_bwd(*saved(batch), deterministic=by == "argument")
    assert seen == [False, True]


def test_the_patch_is_undone_and_keeps_the_original_s_attributes(module):
    original = module._flash_attn_bwd
    with patch(module, Options()) as applied:
        assert module._flash_attn_bwd is not original and applied.active
        assert module._flash_attn_bwd.compile_cache is original.compile_cache
        assert inspect.signature(module._flash_attn_bwd) == inspect.signature(original)
    assert module._flash_attn_bwd is original and not applied.active
    applied.undo()
    unpatch_fa4()


def test_patching_twice_is_patching_once(module):
    original = module._flash_attn_bwd
    first = patch(module, Options())
    patch(module, Options(strict=True))
    assert not first.active
    unpatch_fa4()
    assert module._flash_attn_bwd is original


def test_under_somebody_else_s_patch_we_step_aside(module):
    applied = patch(module, Options())
    ours = module._flash_attn_bwd
    module._flash_attn_bwd = theirs = lambda *args, **kwargs: ours(*args, **kwargs)
    applied.undo()
    assert module._flash_attn_bwd is theirs
    assert module._flash_attn_bwd(*saved(random_batch(Shape(1, 8, 8, 1)))) == ("dq", "dk", "dv")
    assert counts() == {}


def test_a_function_without_the_arguments_we_need_is_refused():
    module = ModuleType("other")
    module._flash_attn_bwd = lambda q, k, v, out, dout, causal: None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttentionInputError, match="has no argument lse"):
        Patch(module, Options())


def test_the_installed_release_has_every_argument_that_we_read():
    assert set(signature("_flash_attn_bwd").parameters) >= UNDERSTOOD


def test_its_own_autograd_functions_call_ours():
    signature("_flash_attn_fwd")  # skips if it is not installed
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.flash_attn_4_process"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"reference": 1}
