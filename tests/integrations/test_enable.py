"""Our implementation in torch's registry: never active by itself, found under its name, gone without a trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import (
    SDPBackend,
    _cur_sdpa_kernel_backends,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention import _registry as registry

from undertow.attention import counts
from undertow.attention.problem import AttentionInputError, BackendError
from undertow.integrations import sdpa
from undertow.integrations.flash_operators import Options
from undertow.integrations.sdpa import IMPLEMENTATION, disable, enable, enable_with

CPU = Options(dispatch_key="CPU")
BACKWARD = "aten::_scaled_dot_product_flash_attention_backward"
ROOT = Path(__file__).resolve().parents[2]
OURS = str(Path("undertow", "integrations", "operators.py"))


def overridden(dispatch_key: str = "CPU") -> bool:
    """Whether the operator is ours on a dispatch key."""
    kernels = torch._C._dispatch_dump(BACKWARD).splitlines()
    return any(line.startswith(f"{dispatch_key}: ") and OURS in line for line in kernels)


def test_importing_registers_and_activates_nothing():
    program = f"""
import sys, undertow
assert "torch" not in sys.modules
undertow.integrations.sdpa, undertow.integrations.flash_attn_4  # reached by name
import torch
from torch.nn import attention
assert {IMPLEMENTATION!r} in attention.list_flash_attention_impls()
assert attention.current_flash_attention_impl() is None
assert {OURS!r} not in torch._C._dispatch_dump({BACKWARD!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=ROOT)


def test_enabling_takes_the_operators_over_until_the_block_ends():
    with enable_with(CPU) as enabled:
        assert current_flash_attention_impl() == IMPLEMENTATION
        assert overridden() and enabled.active
    assert current_flash_attention_impl() is None
    assert not overridden() and not enabled.active


def test_the_public_call_is_for_cuda_tensors():
    enable()
    assert overridden("CUDA") and not overridden("CPU")
    disable()
    assert not overridden("CUDA")


def test_an_error_in_the_block_ends_it_too():
    with pytest.raises(RuntimeError, match="of the user"), enable_with(CPU):
        raise RuntimeError("of the user")
    assert not overridden()


def test_disabling_twice_or_without_enabling_does_nothing():
    disable()
    enabled = enable_with(CPU)
    enabled.disable()
    enabled.disable()
    disable()
    assert not overridden()


def test_it_can_be_activated_by_name_without_enable():
    activate_flash_attention_impl(IMPLEMENTATION)
    assert overridden("CUDA")
    restore_flash_attention_impl()
    assert not overridden("CUDA")


class Other:
    """Somebody else's implementation, which counts."""

    def __init__(self) -> None:
        self.active = 0

    def register(self) -> Other:
        self.active += 1
        return self

    def remove(self) -> None:
        self.active -= 1


@pytest.fixture
def other(monkeypatch):
    implementation = Other()
    monkeypatch.setattr(registry, "_FLASH_ATTENTION_IMPLS", dict(registry._FLASH_ATTENTION_IMPLS))
    register_flash_attention_impl("OTHER", register_fn=implementation.register)
    yield implementation
    if current_flash_attention_impl() == "OTHER":
        restore_flash_attention_impl()


def test_what_was_active_before_is_active_afterwards(other):
    activate_flash_attention_impl("OTHER")
    with enable_with(CPU):
        assert current_flash_attention_impl() == IMPLEMENTATION and other.active == 0
    assert current_flash_attention_impl() == "OTHER" and other.active == 1


def test_what_somebody_activated_in_the_meantime_stays(other):
    with enable_with(CPU):
        activate_flash_attention_impl("OTHER")
        assert not overridden()
    assert current_flash_attention_impl() == "OTHER" and other.active == 1


def test_blocks_within_blocks_restore_each_others_options(torch_flash):
    strict = Options(dispatch_key="CPU", backend="emulator", strict=True)
    with enable_with(CPU):
        with enable_with(strict), pytest.raises(BackendError, match="head_dim is 32"):
            differentiate(head_dim=32)
        differentiate(head_dim=32)
    assert counts() == {"reference": 1}


def test_ending_an_outer_block_first_ends_the_inner_one_with_it():
    outer, inner = enable_with(CPU), enable_with(CPU)
    outer.disable()
    assert not inner.active and not overridden()


def test_disable_undoes_every_enable():
    enable_with(CPU)
    enable_with(CPU)
    disable()
    assert not overridden()


def test_names_of_others_stand_for_us_until_disabled(other):
    names = ("FA4", "OTHER")
    before = {name: registry._FLASH_ATTENTION_IMPLS[name] for name in names}
    with enable_with(CPU, replace=names):
        for name in names:
            activate_flash_attention_impl(name)  # as a framework does that wants exactly this one
            assert current_flash_attention_impl() == name and overridden()
        assert other.active == 0
    assert {name: registry._FLASH_ATTENTION_IMPLS[name] for name in names} == before
    assert current_flash_attention_impl() is None and not overridden()


def test_replacing_a_name_that_nobody_has_is_refused():
    with pytest.raises(AttentionInputError, match=r"replace=\('FA9',\): 'FA9' is none of FA3, FA4"):
        enable(replace=("FA9",))
    assert current_flash_attention_impl() is None


def test_an_unknown_forward_is_refused():
    with pytest.raises(AttentionInputError, match=r"forward='cudnn': must be one of auto, torch, flash-attn-4"):
        enable(forward="cudnn")
    assert IMPLEMENTATION in list_flash_attention_impls()


def test_flash_attention_comes_first_and_the_order_of_before_comes_back():
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        before = _cur_sdpa_kernel_backends(with_priority=True)
        with enable_with(CPU):
            during = _cur_sdpa_kernel_backends(with_priority=True)
        assert during[0] == SDPBackend.FLASH_ATTENTION
        assert during[1:] == [backend for backend in before if backend != SDPBackend.FLASH_ATTENTION]
        assert _cur_sdpa_kernel_backends(with_priority=True) == before
        with enable_with(CPU, prefer_flash=False):
            assert _cur_sdpa_kernel_backends(with_priority=True) == before
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


@pytest.mark.parametrize("is_used", [True, False], ids=["gpu in use", "gpu not yet in use"])
def test_torch_s_own_order_does_not_come_back_at_the_first_choice_on_a_gpu(monkeypatch, is_used):
    """torch puts cuDNN first, once, whatever order was set before: seen on an H200, torch 2.11."""
    later = []

    def as_torch() -> None:
        later.clear()
        cudnn = SDPBackend.CUDNN_ATTENTION.value
        torch._C._set_sdp_priority_order([cudnn, *(number for number in order if number != cudnn)])

    order = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: call() if is_used else later.append(call))
    monkeypatch.setattr(sdpa, "_make_torch_choose", as_torch)
    try:
        with enable_with(CPU), enable_with(CPU, prefer_flash=False):
            for call in list(later):
                call()
            first, second, *_ = _cur_sdpa_kernel_backends(with_priority=True)
            assert (first, second) == (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
        assert _cur_sdpa_kernel_backends(with_priority=True)[0] == SDPBackend.CUDNN_ATTENTION
    finally:
        torch._C._set_sdp_priority_order(order)


def test_a_registration_that_fails_leaves_nothing_behind(monkeypatch):
    before = _cur_sdpa_kernel_backends(with_priority=True)
    monkeypatch.setattr("undertow.integrations.sdpa.kernels", lambda options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        enable()
    assert _cur_sdpa_kernel_backends(with_priority=True) == before
    assert current_flash_attention_impl() is None and not overridden("CUDA")


def differentiate(head_dim: int = 64) -> None:
    q, k, v = (torch.randn(1, 1, 16, head_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0].sum().backward()
