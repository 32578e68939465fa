"""Tensors on files that are sparse: gigabytes of addresses, a few pages of memory."""

from __future__ import annotations

import math
from pathlib import Path

import torch


def sparse(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no space until they are written. folder: where a file may be made; it is gone on return."""
    path, elements = folder / "sparse", math.prod(shape)
    with path.open("wb") as file:
        file.truncate(elements * dtype.itemsize)
    mapped = torch.from_file(str(path), shared=True, size=elements, dtype=dtype)
    path.unlink()  # the mapping lives on
    return mapped.view(shape)
