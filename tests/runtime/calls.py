"""Calls that the tests of the runtime make: tensors of a few rows, and the variants that are looked at closely."""

from __future__ import annotations

import torch

from undertow.kernels.sm100.call import Variant, variant_named
from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.tensors import BackwardTensors, Sequences
from undertow.plan.schema import DType

EVERYTHING = "window-packed-softcap-deterministic-dlse-sink"


def variant(name: str, dtype: DType = DType.BF16) -> Variant:
    return variant_named(name, dtype)


def settings_for(name: str) -> Settings:
    """Settings that ask for the variant of that name."""
    words = name.split("-")
    window = {"window": (100, 20), "left": (100, None)}.get(words[0], (None, None))
    softcap = 15.0 if "softcap" in words else None
    return Settings(None, words[0] == "causal", window, softcap, "deterministic" in words)


def tensors_for(
    name: str, rows: tuple[int, int] = (300, 200), dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> BackwardTensors:
    """Zeros that ask for the variant of that name: 2 sequences of `rows` (of q, of k), 4 query heads, 2 key heads."""
    words = name.split("-")
    packed = "packed" in words
    leading = [(2 * n,) if packed else (2, n) for n in rows]

    def zeros(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    q, out, dout, dq = (zeros(*leading[0], 4, 64) for _ in range(4))
    k, v, dk, dv = (zeros(*leading[1], 2, 64) for _ in range(4))
    lse = (*leading[0][:-1], 4, leading[0][-1])

    def offsets(count: int) -> torch.Tensor:
        return count * torch.arange(3, dtype=torch.int32, device=device)

    return BackwardTensors(
        q,
        k,
        v,
        out,
        dout,
        zeros(*lse, of=torch.float32),
        dq,
        dk,
        dv,
        dlse=zeros(*lse, of=torch.float32) if "dlse" in words else None,
        sink=zeros(4, of=torch.float32) if "sink" in words else None,
        dsink=zeros(4, of=torch.float32) if "sink" in words else None,
        sequences=Sequences(offsets(rows[0]), offsets(rows[1])) if packed else None,
    )


def moved(tensors: BackwardTensors, device: str) -> BackwardTensors:
    """The same tensors on another device."""

    def there(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    sequences = tensors.sequences
    if sequences is not None:
        sequences = Sequences(**{name: there(x) for name, x in vars(sequences).items()})
    given = {name: there(x) for name, x in vars(tensors).items() if name != "sequences"}
    names = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
    first = [given.pop(name) for name in names]
    return BackwardTensors(*first, sequences=sequences, **given)
