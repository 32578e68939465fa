"""Kernels whose timing is asked for, compiled, executed and recorded: the CTAs that `kernel_time` wants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from undertow.cases import Kernel
from undertow.inputs import Shape, random_batch
from undertow.kernels.backward import plan_named
from undertow.kernels.sm90 import launch as sm90
from undertow.kernels.sm90.parts import parts_of
from undertow.kernels.sm100.tensors import TORCH_TYPES
from undertow.plan.attention import Attention
from undertow.plan.grid import Grid, heads_per_bundle
from undertow.plan.schema import Plan
from undertow.plan.tiles import Band, Tiling
from undertow.reference import Scoring
from undertow.timing.grid_time import Work, work_of
from undertow.timing.kernel_time import Kernels, Recorded, SampleShape, first_cta, sample_shapes, shapes_of_items
from undertow.timing.trace import record

HEAD_DIM = 64
FORWARD_PER_PAIR = 4 * HEAD_DIM
BACKWARD_PER_FORWARD = 2.5


@dataclass(frozen=True)
class Problem:
    """What a launch computes: its sizes, and which pairs of row and key are seen."""

    shape: Shape
    band: Band
    softcap: bool = False
    dtype: torch.dtype = torch.bfloat16
    arch: str = "sm100"

    @property
    def attention(self) -> Attention:
        left, right = (bound is not None for bound in self.band)
        return Attention(left=left, right=right, softcap=self.softcap)

    @property
    def mask(self) -> str:
        """`dense`, `causal`, or the bounds of the window."""
        left, right = self.band
        if (left, right) in ((None, None), (None, 0)):
            return "dense" if right is None else "causal"
        return f"window {left if left is not None else 'none'} {right if right is not None else 'none'}"

    @property
    def group(self) -> int:
        """Query heads to a head of keys."""
        return self.shape.heads // (self.shape.kv_heads or self.shape.heads)

    @functools.cached_property
    def work(self) -> Work:
        """Of all CTAs of the main kernel."""
        batch, seqlen_q, seqlen_k, heads, _ = self.shape
        kv_heads, group, tiling = heads // self.group, self.group, Tiling(seqlen_q, seqlen_k, self.band)
        tiles = -(-seqlen_k // tiling.tile_n)
        if self.arch == "sm90":
            dtype = next(of for of, name in TORCH_TYPES.items() if name == self.dtype)
            parts = parts_of(self.attention, dtype, group, seqlen_q, batch * tiles * kv_heads)
            kv_heads, group = kv_heads * parts, group // parts
            bundle = sm90.bundle_for(self.attention, seqlen_q, group, (batch, kv_heads), tiles)
        else:
            bundle = heads_per_bundle(seqlen_q, group, kv_heads) if self.attention.masked else 1
        return work_of(Grid(tiles, kv_heads, batch, bundle, self.attention.descending), tiling, group)

    @property
    def flops(self) -> float:
        """As published: 2.5 forward passes; a causal mask over equal lengths counts as half of all pairs."""
        batch, seqlen_q, seqlen_k, heads, _ = self.shape
        if self.mask == "causal" and seqlen_q == seqlen_k:
            pairs = seqlen_q * seqlen_k / 2
        else:
            pairs = seen_pairs(seqlen_q, seqlen_k, self.band)
        return BACKWARD_PER_FORWARD * FORWARD_PER_PAIR * pairs * heads * batch


def seen_pairs(seqlen_q: int, seqlen_k: int, band: Band) -> int:
    """Pairs of a row and a key that it sees."""
    row = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    first = torch.zeros_like(row) if band.left is None else (row - band.left).clamp(min=0)
    end = torch.full_like(row, seqlen_k) if band.right is None else (row + band.right + 1).clamp(max=seqlen_k)
    return int((end - first).clamp(min=0).sum())


def recorded(
    arch: str,
    schedules: Sequence[str],
    problem: Problem,
    point: Mapping[str, float],
    step: Callable[[str], None] = lambda text: None,
) -> Kernels:
    """The main kernels of the schedules, for the mask of a problem. point: constants of the chip, at its best guesses.

    Raises: LaunchInputError, PlanError, CompileError; TimingError for what cannot be replayed.
    """
    kernels = {}
    for schedule in schedules:
        step(f"compiling and executing {schedule}, {problem.mask}")
        stays = claims_items(plan_named(arch, schedule, attention=problem.attention))
        ctas = []
        for shape in shapes_of_items(problem.band) if stays else sample_shapes(problem.band):
            kernel = replace(_main_kernel(arch, schedule, problem, shape), name=schedule)
            if stays:
                kernel = claiming(kernel, shape.items)
            counts = first_cta(shape, problem.attention.descending)
            ctas.append(Recorded(counts, record(kernel, point)))
        kernels[schedule] = tuple(ctas)
    return Kernels(kernels)


def claims_items(plan: Plan) -> bool:
    """Whether CTAs stay and claim one key/value tile after another."""
    return any(role.name == "schedule" for role in plan.roles)


def claiming(kernel: Kernel, items: int) -> Kernel:
    """One CTA that may claim so many items: the last two numbers of such a launch."""
    *others, ctas, most_items = kernel.launch.params
    assert isinstance(ctas, int) and isinstance(most_items, int), "CTAs of the launch, and what each may claim"
    launch = replace(kernel.launch, grid=(1, 1, 1), params=(*others, 1, items))
    return replace(kernel, launch=launch)


def _main_kernel(arch: str, schedule: str, problem: Problem, shape: SampleShape) -> Kernel:
    from undertow.backward_case import batch_case

    scoring = Scoring(window=shape.window, softcap=1.0 if problem.softcap else None)
    batch = random_batch(Shape(1, shape.seqlen_q, shape.seqlen_k, 1), 0, scoring, problem.dtype)
    _, main, _ = batch_case(batch, schedule, False, arch)
    return main
