"""One sequence over several devices: torch's context parallelism, with our backward pass in every step of its ring.

    torchrun --nproc-per-node 2 examples/context_parallel.py                             NCCL, a GPU for each process
    torchrun --nproc-per-node 2 examples/context_parallel.py --device cpu --seqlen 256   gloo, no GPU needed

Prints how far out, dQ, dK and dV of the ring are from those of the whole sequence on one device, and which backend
computed the backward passes. The length must be a multiple of twice the number of processes. Where there are fewer GPUs
than processes, they share them: right, and no faster than one.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard
from torch.nn.attention import SDPBackend, sdpa_kernel

from undertow.attention import counts, reset_counts
from undertow.integrations.flash_operators import Options
from undertow.integrations.sdpa import enable, enable_with


class Results(NamedTuple):
    """(batch, heads, seqlen, 64) each."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--backend", choices=("auto", "emulator"), default="auto", help="who computes on the CPU")
    parser.add_argument("--full", action="store_true", help="attention without a causal mask, which cannot be balanced")
    parser.add_argument("--unbalanced", action="store_true", help="devices hold whole chunks, later ones work more")
    return parser.parse_args(arguments)


def tensors(options: argparse.Namespace) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, options.heads, options.seqlen, 64)
    return [torch.randn(shape, generator=generator).to(options.device, torch.bfloat16) for _ in range(4)]


def differentiate(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Results:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))  # the ring's buffers themselves must not require any
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return Results(out.detach(), *grads)


def ring(mesh: DeviceMesh, options: argparse.Namespace) -> Results:
    """Every process computes its part of the sequence; the parts are put together afterwards."""
    _cp_options.enable_load_balance = not (options.unbalanced or options.full)
    q, k, v, dout = tensors(options)
    with context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4):
        parts = differentiate(q, k, v, dout, not options.full)
        return Results(*context_parallel_unshard(mesh, list(parts), [2] * 4))


def take_gpu() -> None:
    """Make a GPU the process's own, or one that it shares where there are too few.

    NCCL takes no two processes of one host on one GPU, but goes by what it is told of the host. Of two hosts, they talk
    through sockets.
    """
    rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    torch.cuda.set_device(rank % count)
    if int(os.environ["LOCAL_WORLD_SIZE"]) > count:
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{rank}"


@contextmanager
def our_backward(options: argparse.Namespace) -> Iterator[None]:
    """On a GPU, what any program does. On the CPU the operators of the ring are missing, so they are brought."""
    if options.device == "cuda":
        with enable(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
        return
    original = F.scaled_dot_product_attention

    def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=is_causal)[0]

    with enable_with(Options(dispatch_key="CPU", forward="reference", backend=options.backend)):
        F.scaled_dot_product_attention = scaled_dot_product_attention
        try:
            yield
        finally:
            F.scaled_dot_product_attention = original


def main(
    arguments: list[str] | None = None, report: Callable[[Results], None] = lambda results: None
) -> dict[str, float]:
    """Relative errors of the ring against one device, by name. report: is given the ring's results."""
    options = parse(arguments)
    if options.device == "cuda":
        take_gpu()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    with our_backward(options):
        reset_counts()
        parts = ring(mesh, options)
        who = counts()
        q, k, v, dout = tensors(options)
        whole = differentiate(q, k, v, dout, not options.full)
    errors = {
        name: float((part.float() - one.float()).norm() / one.float().norm())
        for name, part, one in zip(Results._fields, parts, whole)
    }
    report(parts)
    told = ", ".join(f"{name} {error:.2e}" for name, error in errors.items())
    print(f"process {dist.get_rank()}: relative difference to one device: {told}; backward passes by {who}", flush=True)
    return errors


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
