"""One process of examples/context_parallel.py: rank, number of processes, a file to meet at, a folder for results."""

from __future__ import annotations

import importlib.util
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from undertow.attention import counts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"
VARIANTS = {"balanced": [], "unbalanced": ["--unbalanced"], "full": ["--full"], "emulator": ["--backend", "emulator"]}
SIZE = ["--device", "cpu", "--seqlen", "96", "--heads", "2"]


def main(rank: int, processes: int, meeting: str, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes, timeout=timedelta(seconds=60)
    )
    spec = importlib.util.spec_from_file_location("context_parallel_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for name, arguments in VARIANTS.items():
        parts = {}
        example.main([*SIZE, *arguments], lambda results, parts=parts: parts.update(results._asdict()))
        tensors = example.tensors(example.parse(SIZE))
        torch.save({"parts": parts, "tensors": tensors, "counts": counts()}, folder / f"{name}-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
