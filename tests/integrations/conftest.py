"""Every test leaves torch's dispatcher, its registry and the counts of this process as it found them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl

from tests.integrations.flash_kernels import cpu_flash_attention
from undertow.attention import reset_counts
from undertow.integrations import fallback
from undertow.integrations.sdpa import disable


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing counted, nothing told, nothing asked for by the environment; nothing active afterwards."""
    monkeypatch.delenv("UNDERTOW_STRICT", raising=False)
    monkeypatch.setattr(fallback, "_told", set())
    reset_counts()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    if torch.are_deterministic_algorithms_enabled() != was_deterministic:  # saying it loads torch's compiler
        torch.use_deterministic_algorithms(was_deterministic)
    disable()
    assert current_flash_attention_impl() is None


@pytest.fixture
def torch_flash() -> Iterator[Counter[str]]:
    """torch's flash operators for CPU tensors, and how often each ran."""
    with cpu_flash_attention() as calls:
        yield calls
